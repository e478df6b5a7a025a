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


def without_torch(app: str, lines: str, code: int) -> tuple[str, str]:
    """Output and errors of commands, one a line, that end with this code in one interpreter and import no torch."""
    process = python(
        f"from {app} import app\n"
        f"for line in {lines.strip().splitlines()!r}:\n"
        "    try:\n        app(line.split())\n"
        f"    except SystemExit as leaving:\n        assert (leaving.code or 0) == {code}, line\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), line",
        cwd=ROOT,
    )
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output, errors


def refusal(*words: object) -> str:
    """The one line of a command that is refused with exit code 2."""
    done = run(*words)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr
