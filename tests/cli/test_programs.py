"""What `hf-fastdecode serve` refuses; what it answers is tested in tests/clients."""

from __future__ import annotations

import pytest
import typer
from transformers.utils import import_utils
from typer.testing import CliRunner

from hf_fastdecode.cli.console import OneLineErrors
from hf_fastdecode.cli.programs import PASS_ON
from hf_fastdecode.cli.serve import serve

root = typer.Typer(cls=OneLineErrors)
root.command("serve", context_settings=PASS_ON)(serve)
root.command("other")(lambda: None)


@pytest.fixture(params=[True, False], ids=["installed", "not-installed"])
def installed(request, monkeypatch):
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: request.param)
    return request.param


def test_continuous_batching_is_refused(installed):
    done = CliRunner().invoke(root, ["serve", "model", "--continuous-batching"])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "--continuous-batching decodes without `generate`" in done.stderr
    assert "run `transformers serve`" in done.stderr


def test_without_the_server_one_line_says_the_remedy(monkeypatch):
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: False)
    done = CliRunner().invoke(root, ["serve", "model", "--port", "1"])
    assert done.exit_code == 2
    assert done.stderr == (
        "hf-fastdecode: transformers' server is not installed; pip install 'transformers[serving]'\n"
    )
