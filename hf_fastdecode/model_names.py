"""The name of a model: ``embedded``, ``shape:NAME``, a folder, a config.json, or an id on the Hugging Face Hub.

The names are checked without torch and transformers, which take seconds to import.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from .assets import MODEL_PATH
from .errors import InputError, one_line
from .measurement.shapes import SHAPES

EMBEDDED: Final = "embedded"
SHAPE: Final = "shape:"
"""Prefix of the name of a shape: a model with random weights."""
_HUB_TIMEOUT: Final = 10.0  # seconds


def local_folder(name: str) -> Path | None:
    """The folder of the embedded model or of a path; None where there is no such folder, as for a hub id."""
    folder = MODEL_PATH if name == EMBEDDED else Path(name).expanduser()
    return folder if folder.is_dir() else None


def config_file(name: str) -> Path | None:
    """The config.json that a model's name stands for, or None for an id on the Hugging Face Hub.

    Raises:
        InputError: There is no such file, or it is not the config of a transformers model.
    """
    if not name:
        raise InputError(f"a model's name is empty; name a folder, a Hugging Face Hub id, or {EMBEDDED!r}")
    try:
        path = local_folder(name) or Path(name).expanduser()
    except (OSError, RuntimeError) as error:  # a name too long, an unknown user
        raise InputError(f"{name[:80]!r} cannot be a path ({one_line(error)}); name a folder or a Hub id") from error
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            remedy = "reinstall the package" if name == EMBEDDED else "name a folder saved with save_pretrained"
            raise InputError(f"there is no {path}; {remedy}")
    if path.is_file():
        _check_json(path)
        return path
    if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
        raise InputError(f"there is no file or folder {name}; name one, a Hugging Face Hub id, or {EMBEDDED!r}")
    return None


def check_model(name: str) -> None:
    """Refuse a shape that does not exist, or a name that `config_file` refuses."""
    if not name.startswith(SHAPE):
        config_file(name)
    elif (shape := name.removeprefix(SHAPE)) not in SHAPES:
        raise InputError(f"there is no shape {shape!r}; choose one of {', '.join(SHAPES)}")


def load_config(name: str) -> Any:
    """The transformers config of a model, with the dtype that the command line loads it in; no weights are read.

    Args:
        name: ``embedded``, a config.json, a model's folder, or an id on the Hugging Face Hub.

    Raises:
        InputError: There is no such model, it cannot be reached, or its config is not one that transformers knows.
    """
    if (path := config_file(name)) is None:
        return _read_config(name, name, local_files_only=not _hub_has(name))
    config = _read_config(str(path), name)
    if name == EMBEDDED:
        import torch

        config.dtype = torch.float32
    return config


def max_positions(config: Any) -> int | None:
    """Most tokens in a row, or None when the config sets no bound."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _check_json(path: Path) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a JSON file ({one_line(error)}); name a model's config.json") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise InputError(f"{path} has no field model_type; name a transformers model's config.json")


def _read_config(place: str, name: str, **options: Any) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
    except Exception as error:  # a config class may raise anything on fields that it does not expect
        if options.get("local_files_only"):
            raise InputError(
                f"there is no folder {name}, the Hugging Face Hub is not reachable, and {name} is not in its local "
                f"cache; name a local folder, check the network, or use {EMBEDDED!r}"
            ) from error
        raise InputError(f"transformers cannot read the config of {name}: {one_line(error)}") from error


def _hub_has(name: str) -> bool:
    """Whether the Hub answers and has the model's config; False when it does not answer.

    Asked before transformers asks, which retries for half a minute when there is no network.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT)
    except errors.HFValidationError as error:
        raise InputError(f"{name!r} is no path, and no Hugging Face Hub id either: {one_line(error)}") from error
    except errors.GatedRepoError as error:
        raise InputError(f"{name} is gated; accept its terms on the Hub and log in with `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(f"the Hugging Face Hub has no model {name} that you can see; check the spelling") from error
    except errors.EntryNotFoundError as error:
        raise InputError(
            f"{name} has no config.json on the Hugging Face Hub; it is not a transformers model"
        ) from error
    except Exception:  # no network, offline mode, a proxy, a server error: transformers may have it in its cache
        return False
    return True
