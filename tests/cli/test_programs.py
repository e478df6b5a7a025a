"""What `hf-fastdecode serve` refuses; what it answers is tested in tests/clients."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import typer
from transformers.utils import import_utils
from typer.testing import CliRunner

from hf_fastdecode.assets import embedded_folder
from hf_fastdecode.cli.console import OneLineErrors
from hf_fastdecode.cli.programs import PASS_ON, serve

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


def test_the_embedded_model_is_handed_over_as_a_folder(monkeypatch):
    handed = []
    server = SimpleNamespace(app=lambda words, **kwargs: handed.append(words))
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: True)
    monkeypatch.setattr("hf_fastdecode.cli.programs.enabled_models", nullcontext)
    monkeypatch.setitem(sys.modules, "transformers.cli.transformers", server)
    done = CliRunner().invoke(root, ["serve", "embedded", "--port", "1"])
    assert done.exit_code == 0, done.output
    assert handed == [["serve", str(embedded_folder()), "--port", "1"]]


def test_without_the_server_one_line_says_the_remedy(monkeypatch):
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: False)
    done = CliRunner().invoke(root, ["serve", "model", "--port", "1"])
    assert done.exit_code == 2
    assert done.stderr == (
        "hf-fastdecode: transformers' server is not installed; pip install 'transformers[serving]'\n"
    )
