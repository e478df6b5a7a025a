"""The name of a model: ``embedded``, ``shape:NAME``, a folder, a config.json, or an id on the Hugging Face Hub.

A folder or id may hold an adapter alone, as PEFT saves it: its config is that of its base model. The names are checked
without torch and transformers, which take seconds to import.
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
_ADAPTER: Final = "adapter_config.json"


def local_folder(name: str) -> Path | None:
    """The folder of the embedded model or of a path; None where there is no such folder, as for a hub id."""
    folder = MODEL_PATH if name == EMBEDDED else Path(name).expanduser()
    return folder if folder.is_dir() else None


def config_file(name: str) -> Path | None:
    """The config.json that a model's name stands for, or None for an id on the Hugging Face Hub.

    That of a folder with an adapter alone is its base model's.

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
        if (base := _local_base(path)) is not None:
            return _config_of_base(base, path)
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


def base_of(name: str) -> str | None:
    """The name of the model that an adapter of this name was trained for; None for a full model.

    Of an adapter on the Hub, `load_config` must have been called.
    """
    folder = local_folder(name)
    if folder is not None:
        return _local_base(folder)
    from huggingface_hub import try_to_load_from_cache

    config, adapter = (try_to_load_from_cache(name, file) for file in ("config.json", _ADAPTER))
    return _base_in(Path(adapter)) if isinstance(adapter, str) and not isinstance(config, str) else None


def _local_base(folder: Path) -> str | None:
    file = folder / _ADAPTER
    return _base_in(file) if file.is_file() and not (folder / "config.json").exists() else None


def _base_in(file: Path) -> str:
    base = _json_object(file, "name an adapter saved with save_pretrained").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(f"{file} must name a model as base_model_name_or_path, got {base!r}; write its name there")
    return base


def _config_of_base(base: str, adapter: Path) -> Path | None:
    folder = local_folder(base)
    if folder is not None and _local_base(folder) is not None:
        raise InputError(f"{adapter} is an adapter of {base}, which is an adapter too; merge that one into its model")
    try:
        return config_file(base)
    except InputError as error:
        raise InputError(
            f"{adapter} is an adapter of {base}: {error}; put that model there, or name its place as "
            f"base_model_name_or_path in {adapter / _ADAPTER}"
        ) from error


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
        reachable = local_folder(name) is not None or _hub_has(name)
        base = base_of(name)
        return _read_config(name, name, local_files_only=not reachable) if base is None else load_config(base)
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
    if "model_type" not in _json_object(path, "name a model's config.json"):
        raise InputError(f"{path} has no field model_type; name a transformers model's config.json")


def _json_object(path: Path, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a JSON file ({one_line(error)}); {remedy}") from error
    return content if isinstance(content, dict) else {}


def _read_config(folder: str, name: str, **options: Any) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, **options)
    except Exception as error:  # a config class may raise anything on fields that it does not expect
        if options.get("local_files_only"):
            raise InputError(
                f"there is no folder {name}, the Hugging Face Hub is not reachable, and {name} is not in its local "
                f"cache; name a local folder, check the network, or use {EMBEDDED!r}"
            ) from error
        raise InputError(
            f"transformers cannot read the config of {name}: {one_line(error, 200)}; name another model, or install "
            "the release of transformers that it was saved with"
        ) from error


def _hub_has(name: str) -> bool:
    """Whether the Hub answers and has the model's config, or an adapter's, which is downloaded; else False.

    Asked before transformers asks, which retries for half a minute when there is no network.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT)
    except errors.HFValidationError as error:
        raise InputError(
            f"{name!r} is no path, and no Hugging Face Hub id either: {one_line(error)}; name one"
        ) from error
    except errors.GatedRepoError as error:
        raise InputError(f"{name} is gated; accept its terms on the Hub and log in with `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(f"the Hugging Face Hub has no model {name} that you can see; check the spelling") from error
    except errors.EntryNotFoundError as error:
        try:
            hf_hub_download(name, _ADAPTER, etag_timeout=_HUB_TIMEOUT)
        except Exception:
            raise InputError(
                f"{name} has no config.json on the Hugging Face Hub; it is not a transformers model"
            ) from error
    except Exception:  # no network, offline mode, a proxy, a server error: transformers may have it in its cache
        return False
    return True
