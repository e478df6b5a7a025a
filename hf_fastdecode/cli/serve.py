"""``hf-fastdecode serve``: transformers' server, with the models that it loads enabled."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import typer

from ..assets import embedded_folder
from ..dtypes import FLOATS, parse_dtype
from ..errors import InputError
from ..model_names import EMBEDDED, base_of, load_config
from .arguments import in_options
from .interrupts import exit_on_interrupt
from .options import HELP_NAMES

_SERVER: Final = "pip install 'transformers[serving]'"
_BATCHING: Final = "--continuous-batching"
_TERMINATED: Final = 143
"""Exit code after SIGTERM, as shells count it."""
_NO_TEMPLATE: Final = (
    "the tokenizer of this model has no chat template; ask /v1/completions with a prompt, or save a template as "
    "chat_template.jinja beside the model"
)


def serve(context: typer.Context) -> None:
    """Run `transformers serve` with every model that it loads enabled.

    Everything behind `serve` goes to it as it is; `transformers serve --help` lists its options. It answers one
    request at a time, so what its calls share is what prompts begin with: the system prompt, the tools, and what was
    said before in a conversation. Up to 2 GiB of keys and values are kept for each model. Answers are those of
    `transformers serve`: in float32 token for token.

    The field `"model"` of a request is MODEL as it is written here, or left out; `/v1/models` lists it. Without MODEL,
    a request names any: a folder, or an id on the Hub. An adapter's folder is served with its base model.

    With `--continuous-batching` the server does not call `generate`: that is refused.

    Needs the server's packages: `pip install 'transformers[serving]'`, or this package's extra `serve`.

    MODEL `embedded` is the model of this package. It has no chat template: ask `/v1/completions`.

    Examples:

        hf-fastdecode serve MODEL --port 8000
        hf-fastdecode serve embedded --device cpu --dtype float32
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
        from transformers.cli.serve import Serve
    # A command of its own, since transformers' `main` reports Ctrl-C as "Aborted!" and errors in several lines.
    program = typer.Typer(add_completion=False, context_settings=HELP_NAMES)
    program.command()(Serve)
    command: Any = typer.main.get_command(program)
    with command.make_context("transformers serve", list(words)) as context:
        given = context.params
        given["dtype"] = parse_dtype(given["dtype"] or "auto", known=(*FLOATS, "float64"))
        model = given["force_model"]
        if model and ".gguf" not in model and "@" not in model and not given["trust_remote_code"]:
            load_config(model)  # an error in one line, before the server's packages and torch are loaded
        with enabled_models(), _exit_on_sigterm():
            command.invoke(context)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Within, SIGTERM ends the process as `sys.exit` does, which removes temporary folders; the server stops first."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def enabled_models() -> Iterator[None]:
    """Have servers that are made in this block enable the models that they load, and explain what they refuse.

    The server has no argument for a model that is loaded already. It looks its model manager up by name when it is
    made, and takes all models from one public method of it; its application is made by a function of such a name too.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.cli.serving import model_manager, server

    from ..api import enable, explain
    from ..model_loading import load_tokenizer

    stock, build = model_manager.ModelManager, server.build_server

    class EnabledModels(stock):  # type: ignore[misc, valid-type]
        """Models that generate are enabled before the first request sees them; adapters are loaded into their base.

        Answers give a model the name that it is known by here, which is the one that was asked for.
        """

        @staticmethod
        def process_model_name(model_id: str) -> str:
            return model_id if os.path.exists(model_id) else model_id.removesuffix("@main")

        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            model, processor = super().load_model_and_processor(*args, **kwargs)
            if model.can_generate() and not explain(model).enabled:
                enable(model, reuse_prefix=True)
            return model, processor

        def _load_processor(self, name: str, *args: Any, **kwargs: Any) -> Any:
            base = base_of(name)
            processor = super()._load_processor(source(base or name), *args, **kwargs)
            return load_tokenizer(name) if base and isinstance(processor, PreTrainedTokenizerBase) else processor

        def _load_model(self, name: str, *args: Any, **kwargs: Any) -> Any:
            base = base_of(name)
            model = super()._load_model(source(base or name), *args, **kwargs)
            if base:
                model.load_adapter(name)
            return model

    def source(name: str) -> str:
        """Folder, or id and revision, as transformers' manager names what it loads."""
        found: str = stock.process_model_name(str(embedded_folder()) if name == EMBEDDED else name)
        return found

    model_manager.ModelManager = EnabledModels
    server.build_server = lambda *args, **kwargs: _explained(build(*args, **kwargs))
    try:
        yield
    finally:
        model_manager.ModelManager, server.build_server = stock, build


def _explained(app: Any) -> Any:
    """The application, which answers what the caller can set right with 400 and the remedy, in place of a bare 500."""
    from transformers.cli.serving.server import JSONResponse

    @app.exception_handler(ValueError)  # type: ignore[untyped-decorator]
    async def refuse(_request: Any, error: ValueError) -> JSONResponse:
        if isinstance(error, InputError):
            return JSONResponse({"detail": in_options(str(error))}, status_code=400)
        if "chat_template is not set" in str(error) or "does not have a chat template" in str(error):
            return JSONResponse({"detail": _NO_TEMPLATE}, status_code=400)
        raise error

    return app
