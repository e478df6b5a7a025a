"""From a name on the command line to a model's config."""

from __future__ import annotations

from typing import Any, Final

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError
from transformers import AutoConfig

from .command_options import EMBEDDED, config_file
from .errors import CommandError, one_line

_HUB_TIMEOUT: Final = 10.0  # seconds


def load_config(name: str) -> Any:
    """The transformers config of a model, with the dtype that `load_model` gives it; no weights are read.

    Args:
        name: ``embedded``, a config.json, a model's folder, or an id on the Hugging Face Hub.

    Raises:
        CommandError: There is no such model, it cannot be reached, or its config is not one that transformers knows.
    """
    if (path := config_file(name)) is not None:
        config = _read_config(str(path), name)
        if name == EMBEDDED:
            config.dtype = torch.float32
        return config
    return _read_config(name, name, local_files_only=not _hub_has(name))


def max_positions(config: Any) -> int | None:
    """Most tokens in a row, or None when the config sets no bound."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _read_config(place: str, name: str, **options: Any) -> Any:
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
    except Exception as error:  # a config class may raise anything on fields that it does not expect
        if options.get("local_files_only"):
            raise CommandError(
                f"there is no folder {name}, the Hugging Face Hub is not reachable, and {name} is not in its local "
                f"cache; name a local folder, check the network, or use {EMBEDDED!r}"
            ) from error
        raise CommandError(f"transformers cannot read the config of {name}: {one_line(error)}") from error


def _hub_has(name: str) -> bool:
    """Whether the Hub answers and has the model's config; False when it does not answer.

    Asked before transformers asks, which retries for half a minute when there is no network.
    """
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT)
    except HFValidationError as error:
        raise CommandError(f"{name!r} is no path, and no Hugging Face Hub id either: {one_line(error)}") from error
    except GatedRepoError as error:
        raise CommandError(f"{name} is gated; accept its terms on the Hub and log in with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise CommandError(f"the Hugging Face Hub has no model {name} that you can see; check the spelling") from error
    except EntryNotFoundError as error:
        raise CommandError(
            f"{name} has no config.json on the Hugging Face Hub; it is no transformers model"
        ) from error
    except Exception:  # no network, offline mode, a proxy, a server error: transformers may have it in its cache
        return False
    return True
