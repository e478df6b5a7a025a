"""``hf-fastdecode serve``: transformers' own server, with the models that it loads enabled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import typer

from ..assets import embedded_folder
from ..errors import CommandError
from ..model_names import EMBEDDED
from .interrupts import exit_on_interrupt

_REMEDY: Final = "pip install 'transformers[serving]'"
_BATCHING: Final = "--continuous-batching"


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
    hand_over(context.args)


def hand_over(words: Sequence[str]) -> None:
    """Run transformers' command line `serve` with these words.

    Raises:
        CommandError: The server's packages are not installed, or the words ask for continuous batching.
    """
    if _BATCHING in words:
        raise CommandError(
            f"{_BATCHING} decodes without `generate`, which is what hf_fastdecode makes fast; leave it out, "
            "or run `transformers serve`"
        )
    with exit_on_interrupt():
        from transformers.utils.import_utils import is_serve_available

        if not is_serve_available():
            raise CommandError(f"transformers' server is not installed; {_REMEDY}")
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
