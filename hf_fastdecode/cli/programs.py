"""Other programs with the models that they load enabled: ``hf-fastdecode lm-eval``, ``serve`` and ``run``."""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, entry_points, version
from types import TracebackType
from typing import Annotated, Any, Final

import typer

from ..assets import embedded_folder
from ..dtypes import FLOATS, parse_dtype
from ..enabled_loading import enabled_loading
from ..errors import InputError, one_line
from ..model_names import EMBEDDED, base_of, load_config
from .console import in_options
from .interrupts import exit_on_interrupt
from .options import HELP_NAMES, EnableOptions, expand_option_groups

PASS_ON: Final[dict[str, Any]] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,  # after the first word even --help is lm-eval's
    **HELP_NAMES,
}
"""Context settings of the command: unknown options go to lm-eval."""

LEAST: Final = "0.4.13"
_LM_EVAL: Final = "pip install 'lm-eval>=0.4.13,<0.5'"
_SUBCOMMANDS: Final = ("run", "ls", "validate")


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness's command line with hf_fastdecode's model.

    Everything after `lm-eval` goes to it as it is; `hf-fastdecode lm-eval run --help` lists its options. It knows one
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
    except (ValueError, OSError) as error:  # its refusals, of all kinds
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
    given = list(words[1:] if words and words[0] == command else words)
    named = any(word.partition("=")[0] in ("--model", "-M", "--config", "-C") for word in given)
    return [command, *given] if command != "run" or named else [command, "--model", name, *given]


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

    Everything after `serve` goes to it as it is; `transformers serve --help` lists its options. It answers one
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
    # A separate command, since transformers' `main` reports Ctrl-C as "Aborted!" and errors in several lines.
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
    """Context in which new servers enable the models that they load, and explain refused requests.

    The server has no argument for a model that is loaded already. It looks its model manager up by name when it is
    made, and takes all models from one public method of it; its application is made by a function of such a name too.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.cli.serving import model_manager, server

    from ..api import enable, explain
    from ..model_loading import load_tokenizer

    stock, build = model_manager.ModelManager, server.build_server

    class EnabledModels(stock):  # type: ignore[misc, valid-type]
        """Enables models before the first request, and loads adapters into their base; names are those asked for."""

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
        """The model's folder, or id and revision, as named by transformers' manager."""
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


WORDS: Final[dict[str, Any]] = {"allow_extra_args": True, "allow_interspersed_args": False, **HELP_NAMES}
"""Context settings of the command: arguments after the program go to the program."""

_SCRIPTS: Final = "console_scripts"


@expand_option_groups
def run(
    context: typer.Context,
    options: EnableOptions,
    program: Annotated[str, typer.Argument(help="A script's path, a command such as `trl`, or with `-m` a module.")],
    module: bool = typer.Option(False, "-m", "--module", help="PROGRAM is a module, as in `python -m`."),
    reuse_prefix: bool = typer.Option(
        False, "--reuse-prefix", help="Keep what prompts begin with from call to call, up to 2 GiB."
    ),
) -> None:
    """Run a Python program with the models that it loads enabled.

    PROGRAM runs in this process as it would alone, with all words after it. What `from_pretrained` returns, of any
    class that generates, is enabled, which a line on stderr says; at the end of the program that is undone. Python
    processes that the program starts do the same (`trl grpo`, `accelerate launch`), unless they ignore the
    environment. Models that are made otherwise, and engines that do not call `generate`, stay as they are.

    Examples:

        hf-fastdecode run trl grpo --model_name_or_path MODEL ...
        hf-fastdecode run --reuse-prefix script.py --its options
        torchrun --nproc-per-node 2 -m hf_fastdecode -- run -m package.train ...
    """
    arguments = options.arguments()
    start = _module(program) if module else _command(program)
    with ExitStack() as held:
        if arguments is not None:
            held.enter_context(enabled_loading(**arguments, reuse_prefix=reuse_prefix))
        elif reuse_prefix:
            raise InputError("--reuse-prefix is for hf_fastdecode, and --stock runs without it; leave one out")
        held.callback(setattr, sys, "argv", sys.argv)
        sys.argv = [program, *context.args]
        try:
            returned = start()
            code = 0 if isinstance(returned, dict) else returned  # the names of a module or a script
        except Exception as error:
            error.__traceback__ = _of_program(error.__traceback__)
            traceback.print_exception(error)
            code = 1
    sys.exit(code)


def _module(name: str) -> Callable[[], Any]:
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of its parent
        found = None
    if found is None:
        raise InputError(f"there is no module {name!r} in {sys.prefix} or the current folder; install it, or check it")
    return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)


def _command(program: str) -> Callable[[], Any]:
    names = {point.name: point for point in entry_points(group=_SCRIPTS)}
    if os.sep not in program and not program.endswith(".py") and (point := names.get(program)) is not None:
        sys.path.insert(0, os.path.join(sys.prefix, "bin"))  # as the command's file does
        return lambda: point.load()()
    if os.path.isfile(program):
        path = os.path.abspath(program)  # as Python sets `__file__` of a script
        sys.path.insert(0, os.path.dirname(path))
        return lambda: runpy.run_path(path, run_name="__main__")
    near = "".join(f"; did you mean {name!r}?" for name in get_close_matches(program, names, 1))
    raise InputError(
        f"{program!r} is neither a file nor a command of a package in {sys.prefix}; a module is named after -m{near}"
    )


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Traceback frames of the program, without those of its launcher."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename in ours:
        found = found.tb_next
    return found or trace
