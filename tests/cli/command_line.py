"""hf-fastdecode from the outside: in this process, or in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "assert length('red') == 3\n" * 8
needs_weights = pytest.mark.skipif(
    not (MODEL_PATH / "model.safetensors").is_file(), reason="the embedded model's weights are not installed"
)


def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
    """A command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False)


def ran(*arguments: object, stdin: str | bytes | None = None) -> Result:
    """A command that succeeds."""
    done = run(*arguments, stdin=stdin)
    assert done.exit_code == 0, done.output
    return done


def python(code: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    """A fresh interpreter with this checkout on its path."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], **pipes | options)


def refusal(*words: object) -> str:
    """The one line of a command that is refused with exit code 2."""
    done = run(*words)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr
