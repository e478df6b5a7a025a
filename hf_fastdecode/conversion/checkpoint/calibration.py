"""Calibration text, on which layers are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hf_fastdecode.assets import embedded_tasks, few_shot_prompt

TOKENS: Final = 1024
"""Most tokens of a calibration text: half to fit offsets and roundings, half to judge them."""

LEAST: Final = 32
"""Fewest, below which errors say nothing of other texts."""

_CHARACTERS_PER_TOKEN: Final = 256  # a text has about 4


def built_in_text() -> str:
    """English and Python: the embedded tasks with their solutions."""
    tasks = embedded_tasks()
    return "\n\n".join(few_shot_prompt(tasks[at + 6], tasks[at : at + 6]) for at in (0, 12))


def calibration_ids(tokenizer: Any, file: Path | None = None, limit: int | None = None) -> Tensor:
    """The token ids of a calibration text, ``[tokens]``.

    Args:
        tokenizer: Of the model.
        file: UTF-8 text; the built-in one when None.
        limit: Most tokens that the model takes, or None.

    Raises:
        ValueError: The file cannot be read, or the text, or what the model takes of it, is too short.
    """
    try:
        text = built_in_text() if file is None else _beginning(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the calibration text {file}: {error}; name a UTF-8 text file") from error
    ids = tokenizer(text, return_tensors="pt", truncation=False, verbose=False).input_ids[0]
    return beginning(ids, limit)


def beginning(ids: Tensor, limit: int | None = None) -> Tensor:
    """The ids that layers are measured on, ``[tokens]``: at most `TOKENS`, and at most what the model takes.

    Args:
        ids: Of a text, ``[tokens]``.
        limit: Most tokens that the model takes, or None.

    Raises:
        ValueError: There are too few, or they are no single text.
    """
    if limit is not None and limit < LEAST:
        raise ValueError(
            f"layers are measured on {LEAST} tokens or more, and the model takes {limit}; keep it as it is"
        )
    return check_ids(check_ids(ids)[: min(TOKENS, limit or TOKENS)])


def _beginning(file: Path) -> str:
    """The beginning of a text file of any size, which holds all tokens that are used."""
    with file.open(encoding="utf-8") as stream:
        return stream.read(TOKENS * _CHARACTERS_PER_TOKEN)


def check_ids(ids: Tensor) -> Tensor:
    """The same ids.

    Raises:
        ValueError: There are too few, or they are no single text.
    """
    if not isinstance(ids, Tensor):
        raise ValueError(f"calibration must be a tensor of ids of one text, [tokens], got {type(ids).__name__}")
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"calibration must be ids of one text, [tokens], got {ids.dtype} of shape {list(ids.shape)}")
    if len(ids) < LEAST:
        raise ValueError(f"a calibration text needs {LEAST} tokens, got {len(ids)}; give a longer one")
    return ids


def check_vocabulary(ids: Tensor, vocabulary: int) -> Tensor:
    """The same ids.

    Args:
        ids: ``[tokens]``.
        vocabulary: Tokens that the model has.

    Raises:
        ValueError: The model has no such tokens.
    """
    if wrong := [bound for bound in map(int, ids.aminmax()) if not 0 <= bound < vocabulary]:
        raise ValueError(
            f"the calibration text has id {wrong[-1]}, and the model has {vocabulary} tokens, from 0; take the "
            "model's own tokenizer"
        )
    return ids
