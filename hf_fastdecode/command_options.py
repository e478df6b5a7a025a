"""Checks of options that need neither torch nor transformers, which take seconds to import."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from .assets import MODEL_PATH
from .errors import CommandError, one_line
from .generation.options import Options
from .measurement.shapes import SHAPES

DTYPES: Final = ("float32", "bfloat16", "float16")
EMBEDDED: Final = "embedded"
SHAPE: Final = "shape:"
"""In front of the name of a shape: a model with random weights."""
_DEVICES: Final = ("cpu", "cuda", "hpu", "mps", "mtia", "npu", "xla", "xpu")


def check_options(
    *, mode: str = "auto", backend: str = "auto", sampler: str = "auto", fuse_projections: str | bool = "auto"
) -> None:
    """Refuse values that `hf_fastdecode.enable` does not take, given as options or by the environment."""
    try:
        Options(mode=mode, backend=backend, sampler=sampler, fuse_projections=fuse_projections)
    except ValueError as error:
        text = str(error).replace("fuse_projections", "fuse-projections")
        raise CommandError(text if text.startswith("$") else f"--{text}") from error


def truth(text: str) -> str | bool:
    """The value of an option that takes ``true``, ``false`` or a word."""
    return {"true": True, "false": False}.get(text, text)


def check_dtype(name: str) -> None:
    """Refuse a dtype that models are not loaded in."""
    if name not in ("auto", *DTYPES):
        raise CommandError(f"--dtype must be one of auto, {', '.join(DTYPES)}, got {name!r}")


def check_model(name: str) -> None:
    """Refuse the name of a model that there is not, as far as can be told without loading it.

    Args:
        name: ``embedded``, a folder or a hub id; or ``shape:`` and one of `SHAPES`.

    Raises:
        CommandError: There is no such folder or shape.
    """
    if not name.startswith(SHAPE):
        config_file(name)
    elif (shape := name.removeprefix(SHAPE)) not in SHAPES:
        raise CommandError(f"there is no shape {shape!r}; choose one of {', '.join(SHAPES)}")


def check_device(name: str) -> None:
    """Refuse what torch knows as no device; whether this machine has it, `pick_device` finds out."""
    kind = re.fullmatch(r"([a-z]+)(:\d+)?", name)
    if name != "auto" and (kind is None or kind[1] not in _DEVICES):
        raise CommandError(f"there is no device {name!r}; try auto or cpu, or cuda:0 for the first GPU")


def config_file(name: str) -> Path | None:
    """The config.json that a model's name stands for, or None for an id on the Hugging Face Hub.

    Raises:
        CommandError: There is no such file, or it is none of a transformers model.
    """
    if not name:
        raise CommandError(f"a model's name is empty; name a folder, a Hugging Face Hub id, or {EMBEDDED!r}")
    try:
        path = MODEL_PATH if name == EMBEDDED else Path(name).expanduser()
        path.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, an unknown user
        raise CommandError(f"{name[:80]!r} cannot be a path ({one_line(error)}); name a folder or a Hub id") from error
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            remedy = "reinstall the package" if name == EMBEDDED else "name a folder saved with save_pretrained"
            raise CommandError(f"there is no {path}; {remedy}")
    if path.is_file():
        _check_json(path)
        return path
    if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
        raise CommandError(f"there is no file or folder {name}; name one, a Hugging Face Hub id, or {EMBEDDED!r}")
    return None


def _check_json(path: Path) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} is not a JSON file ({one_line(error)}); name a model's config.json") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise CommandError(f"{path} has no field model_type; name a transformers model's config.json")
