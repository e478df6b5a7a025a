"""The command that hands over to lm-evaluation-harness, as far as it goes without it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
import typer
from typer.testing import CliRunner

from hf_fastdecode.cli import programs as command
from hf_fastdecode.cli.console import OneLineErrors

root = typer.Typer(cls=OneLineErrors, rich_markup_mode="markdown")
root.command("lm-eval", context_settings=command.PASS_ON, no_args_is_help=True)(command.lm_eval)
root.command("other")(lambda: None)


def run(*words):
    return CliRunner().invoke(root, ["lm-eval", *words])


@pytest.mark.parametrize("words", [["--help"], ["-h"]])
def test_help_teaches(words):
    shown = run(*words)
    assert shown.exit_code == 0
    text = " ".join(shown.stdout.split())
    for said in (
        "lm-eval run --help",
        "pretrained=embedded",
        "reuse_prefix",
        "pip install 'lm-eval>=0.4.13,<0.5'",
        "Examples",
    ):
        assert said in text


@pytest.mark.parametrize(
    "words", [["--tasks", "gsm8k"], ["run", "--help"], ["ls", "tasks", "-h"], ["-t", "a", "--help"]]
)
def test_without_lm_eval_one_line_says_the_remedy(words, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(command, "version", missing)
    done = run(*words)
    assert done.exit_code == 2
    assert done.stderr == (
        "hf-fastdecode: lm-evaluation-harness is not installed; pip install 'lm-eval>=0.4.13,<0.5'\n"
    )


@pytest.mark.parametrize("found", ["0.4.9", "0.4.12.post1"])
def test_an_old_lm_eval_is_refused(found, monkeypatch):
    monkeypatch.setattr(command, "version", lambda name: found)
    done = run("--tasks", "gsm8k")
    assert done.exit_code == 2
    assert f"lm-evaluation-harness must be at least 0.4.13, this is {found}; pip install" in done.stderr


@pytest.mark.parametrize(
    ("words", "handed"),
    [
        ("--tasks a", "run --model ours --tasks a"),
        ("run --tasks a --limit 2", "run --model ours --tasks a --limit 2"),
        ("--model hf --tasks a", "run --model hf --tasks a"),
        ("run --model=hf", "run --model=hf"),
        ("-M hf", "run -M hf"),
        ("--config c.yaml", "run --config c.yaml"),
        ("--model_args pretrained=a -t b", "run --model ours --model_args pretrained=a -t b"),
        ("ls tasks", "ls tasks"),
        ("validate --tasks run", "validate --tasks run"),
    ],
)
def test_an_evaluation_that_names_no_model_runs_ours(words, handed):
    assert command.with_model(words.split(), "ours") == handed.split()
