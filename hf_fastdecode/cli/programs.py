"""``hf-fastdecode lm-eval`` and ``hf-fastdecode serve``: other programs' command lines, with their models enabled."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import typer

from ..assets import embedded_folder
from ..errors import InputError
from ..model_names import EMBEDDED
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
_SERVER: Final = "pip install 'transformers[serving]'"
_BATCHING: Final = "--continuous-batching"
_SUBCOMMANDS: Final = ("run", "ls", "validate")


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness's own command line with hf_fastdecode's model.

    Everything behind `lm-eval` goes to it as it is; `hf-fastdecode lm-eval run --help` lists its options. It knows one
    model more, `hf-fastdecode`, which it takes where neither `--model` nor `--config` is given: its own `hf` with
    the model enabled. Repeats of a problem share their prompt, and problems of a batch the examples in front of them.
    Results are those of `hf`: in float32 sample for sample.

    `--model_args` has all that `hf` takes, `pretrained=embedded` for the model that comes with this package, and
    `mode`, `sampler` and `reuse_prefix` of `hf_fastdecode.enable`. With lm-eval's default of `--batch_size 1`,
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


def serve(context: typer.Context) -> None:
    """Run `transformers serve` with every model that it loads enabled.

    Everything behind `serve` goes to it as it is; `transformers serve --help` lists its options. It answers one
    request at a time, so what its calls share is what prompts begin with: the system prompt, the tools, and what was
    said before in a conversation. Up to 2 GiB of keys and values are kept for each model. Answers are those of
    `transformers serve`: in float32 token for token.

    With `--continuous-batching` the server does not call `generate`: that is refused.

    Needs the server's packages: `pip install 'transformers[serving]'`, or this package's extra `serve`.

    MODEL `embedded` is the model of this package. It has no chat template: ask `/v1/completions`.

    Examples:

        hf-fastdecode serve MODEL --port 8000
    """
    run_server(context.args)


def run_server(words: Sequence[str]) -> None:
    """Run transformers' command line `serve` with these words."""
    if _BATCHING in words:
        raise InputError(
            f"{_BATCHING} decodes without `generate`, which is what hf_fastdecode makes fast; leave it out, "
            "or run `transformers serve`"
        )
    with exit_on_interrupt():
        from transformers.utils.import_utils import is_serve_available

        if not is_serve_available():
            raise InputError(f"transformers' server is not installed; {_SERVER}")
        from transformers.cli.transformers import app
    if EMBEDDED in words:
        words = [str(embedded_folder()) if word == EMBEDDED else word for word in words]
    with enabled_models():
        app(["serve", *words], prog_name="transformers")


@contextmanager
def enabled_models() -> Iterator[None]:
    """Have servers that are made in this block enable the models that they load.

    The server has no argument for a model that is loaded already. It looks its model manager up by name when it is
    made, and takes all models from one public method of it.
    """
    from transformers.cli.serving import model_manager

    from ..api import enable, explain

    stock = model_manager.ModelManager

    class EnabledModels(stock):  # type: ignore[misc, valid-type]
        """Models that generate are enabled before the first request sees them."""

        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            model, processor = super().load_model_and_processor(*args, **kwargs)
            if model.can_generate() and not explain(model).enabled:
                enable(model, reuse_prefix=True)
            return model, processor

    model_manager.ModelManager = EnabledModels
    try:
        yield
    finally:
        model_manager.ModelManager = stock
