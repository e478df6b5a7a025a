"""``hf-fastdecode lm-eval``: lm-evaluation-harness's command line, with its model enabled."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import typer

from ..errors import InputError, one_line
from .interrupts import exit_on_interrupt
from .options import HELP_NAMES

PASS_ON: Final[dict[str, Any]] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,  # behind the first word even --help is lm-eval's
    **HELP_NAMES,
}
"""Context settings of the command: what it does not know is lm-eval's."""

LEAST: Final = "0.4.13"
_LM_EVAL: Final = "pip install 'lm-eval>=0.4.13,<0.5'"
_SUBCOMMANDS: Final = ("run", "ls", "validate")


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness's own command line with hf_fastdecode's model.

    Everything behind `lm-eval` goes to it as it is; `hf-fastdecode lm-eval run --help` lists its options. It knows one
    model more, `hf-fastdecode`, which it takes where neither `--model` nor `--config` is given: its own `hf` with
    the model enabled. Repeats of a problem share their prompt, and problems of a batch the examples in front of them.
    Results are those of `hf`: in float32 sample for sample.

    `--model_args` has all that `hf` takes, `pretrained=embedded` for the model that comes with this package, and
    `mode`, `sampler` and `reuse_prefix` of `hf_fastdecode.enable`. `pretrained` may be a multimodal model, which is
    given texts, and the folder of an adapter. With lm-eval's default of `--batch_size 1`,
    `reuse_prefix` is on: then the examples are kept from call to call.

    Needs lm-eval: `pip install 'lm-eval>=0.4.13,<0.5'`, or this package's extra `lm-eval`.

    Examples:

        hf-fastdecode lm-eval --model_args pretrained=MODEL --tasks gsm8k \\
            --batch_size 16
        hf-fastdecode lm-eval --tasks TASK --include_path FOLDER --batch_size 16 \\
            --log_samples --output_path results
        hf-fastdecode lm-eval ls tasks
    """
    check_installed()
    with exit_on_interrupt():
        from lm_eval.__main__ import cli_evaluate

        from ..evals.harness import MODEL_NAME
    given = sys.argv
    sys.argv = ["lm-eval", *with_model(context.args, MODEL_NAME)]
    try:
        cli_evaluate()
    except InputError:
        raise
    except (ValueError, OSError) as error:  # its own refusals, of all kinds
        remedy = "`hf-fastdecode lm-eval ls tasks` lists them" if "ask" in str(error) else "see lm-eval run --help"
        raise InputError(f"lm-eval: {one_line(error)}; {remedy}") from error
    finally:
        sys.argv = given


def check_installed() -> None:
    """Refuse to go on without lm-eval, or with one that is too old."""
    from packaging.version import Version

    try:
        found = version("lm-eval")
    except PackageNotFoundError:
        raise InputError(f"lm-evaluation-harness is not installed; {_LM_EVAL}") from None
    if Version(found) < Version(LEAST):
        raise InputError(f"lm-evaluation-harness must be at least {LEAST}, this is {found}; {_LM_EVAL}")


def with_model(words: Sequence[str], name: str) -> list[str]:
    """The words, with the model of this name where they run an evaluation and name neither a model nor a config."""
    command = words[0] if words and words[0] in _SUBCOMMANDS else "run"
    rest = list(words[1:] if words and words[0] == command else words)
    named = any(word.partition("=")[0] in ("--model", "-M", "--config", "-C") for word in rest)
    return [command, *rest] if command != "run" or named else [command, "--model", name, *rest]
