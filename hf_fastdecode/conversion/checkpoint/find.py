"""Find a checkpoint: the embedded one, a folder, or the download of an id on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from transformers import AutoConfig

from ...errors import one_line
from ...model_names import EMBEDDED, base_of, load_config, local_folder

BESIDE: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of files beside the weights: tokenizers, generation config."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or converted."""


def find_checkpoint(name: str, check: Callable[[Any], object] = lambda config: None) -> Path:
    """The folder of a checkpoint: the embedded one, a local folder, or the download of a hub id.

    `check` gets the config before weights are downloaded, and raises to refuse it. Raises CheckpointError where there
    is an adapter alone or cannot be downloaded, InputError where there is none or its config cannot be read.
    """
    config = load_config(name)
    if (base := base_of(name)) is not None:
        raise CheckpointError(
            f"{name} is an adapter of {base}; merge it into that model first, by peft's merge_and_unload, and convert "
            "the folder that save_pretrained writes then"
        )
    check(config)
    if (local := local_folder(name)) is not None:
        return local
    _download(name, [f"*{suffix}" for suffix in BESIDE])
    folder = _download(name, ["model*.safetensors"])
    return folder if any(folder.glob("*.safetensors")) else _download(name, ["pytorch_model*.bin"])


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # no such repository, no network, gated, no valid id
        raise CheckpointError(
            f"the Hugging Face Hub does not give {name} ({one_line(error)}); name a folder, an id on the Hub, or "
            f"{EMBEDDED!r}"
        ) from error


def read_config(folder: Path) -> Any:
    """The config in a folder; CheckpointError where there is none, or transformers cannot read it."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"there is no config.json in {folder}; name a folder saved with save_pretrained")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a config class may raise anything on fields that it does not expect
        raise CheckpointError(f"transformers cannot read {folder}/config.json: {error}") from error
