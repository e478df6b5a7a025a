"""Conversion of the inputs of `prefill` to padded ids and a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..support.call import is_nothing


def has_no_vocabulary(tokenizer: Any) -> bool:
    """Whether a tokenizer has no letters but in special tokens, as transformers makes one of a folder without files.

    Besides special tokens, an empty one of T5 has a word boundary, so that it finds ids for any text.
    """
    words = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    return not any(any(map(str.isalnum, word)) for word in words)


_TOKENIZE = "call the tokenizer: tokenizer(prompts)"


def padded_ids(inputs: object) -> tuple[Tensor, Tensor | None]:
    """Convert prompts to ``input_ids`` and ``attention_mask`` tensors.

    Args:
        inputs: ``input_ids`` ``[prompts, length]``, a list of prompts, or a mapping with one of these as
            ``input_ids`` and an optional ``attention_mask`` of the same form.

    Returns:
        ``input_ids`` and ``attention_mask``, both ``[prompts, length]``; lists are left-padded. The mask is None
        if none was given, or if a list needs no padding.

    Raises:
        ValueError: `inputs` are not prompts.
    """
    if not isinstance(inputs, Mapping):
        inputs = {"input_ids": inputs}
    input_ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(input_ids, Tensor | list | tuple):
        raise ValueError(
            f"input_ids must be a tensor or a list of prompts, got {type(input_ids).__name__}; {_TOKENIZE}"
        )
    for name, value in inputs.items():
        if name not in ("input_ids", "attention_mask") and not is_nothing(value) and not _is_of_text(name, value):
            raise ValueError(
                f"of prompts of text prefill takes input_ids and attention_mask, got {name!r} too; leave it out, or "
                "if the model takes images, pass all that its processor returns with return_tensors='pt'"
            )
    if not isinstance(input_ids, Tensor):
        return _padded(input_ids, mask)
    if not isinstance(mask, Tensor | None):
        raise ValueError(
            f"attention_mask must be a tensor, as input_ids is, got {type(mask).__name__}; call the tokenizer with "
            "return_tensors='pt'"
        )
    return _checked(input_ids), mask


def _is_of_text(name: str, value: object) -> bool:
    """Whether an argument says of all tokens that they are of text, as processors say it of prompts without images."""
    return name == "mm_token_type_ids" and isinstance(value, Tensor) and not bool(value.any())


def _checked(input_ids: Tensor) -> Tensor:
    if input_ids.dim() != 2:
        shape = list(input_ids.shape)
        remedy = "; for one prompt, input_ids[None]" if input_ids.dim() == 1 else ""
        raise ValueError(f"input_ids must have shape [prompts, length], got {shape}{remedy}")
    if input_ids.numel() == 0:
        raise ValueError(
            f"the prompts are empty: input_ids has shape {list(input_ids.shape)}; give at least one token"
        )
    _check_dtype(input_ids, "input_ids")
    return input_ids


def _padded(prompts: Sequence[object], masks: object) -> tuple[Tensor, Tensor | None]:
    if not prompts:
        raise ValueError("the list of prompts is empty; give at least one prompt")
    ids = [_integers(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]
    shown = [torch.ones_like(one) for one in ids]
    if masks is not None:
        if not isinstance(masks, list | tuple) or len(masks) != len(ids):
            found = f"a list of {len(masks)}" if isinstance(masks, list | tuple) else type(masks).__name__
            raise ValueError(
                f"attention_mask must be a list of {len(ids)} rows, as input_ids is, got {found}; pass what one call "
                "of the tokenizer returned"
            )
        shown = [_integers(mask, f"attention_mask of prompt {index}") for index, mask in enumerate(masks)]
        for index, (own, mask) in enumerate(zip(ids, shown, strict=True)):
            if len(own) != len(mask):
                raise ValueError(
                    f"prompt {index} has {len(own)} ids and an attention_mask of {len(mask)}; pass what one call of "
                    "the tokenizer returned"
                )
    input_ids, mask = (pad_sequence(lists, batch_first=True, padding_side="left") for lists in (ids, shown))
    return input_ids, None if bool((mask == 1).all()) else mask


def _integers(values: object, name: str) -> Tensor:
    """Convert one prompt's ids or mask to ``[length]`` int64 on the CPU."""
    if isinstance(values, Tensor):
        if values.dim() != 1:
            remedy = "pass ids[0] of it" if values.dim() == 2 and len(values) == 1 else "pass one tensor for each"
            raise ValueError(f"{name} in a list must have shape [length], got {list(values.shape)}; {remedy}")
        _check_dtype(values, name)
        found = values.long().cpu()
    elif isinstance(values, list | tuple):
        for place, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ValueError(
                    f"{name} must be a list of integers, got {_shown(value)} at position {place}; {_TOKENIZE}"
                )
        found = torch.tensor(values, dtype=torch.int64, device="cpu")
    else:
        remedy = "for one prompt, pass [input_ids]" if isinstance(values, int) else _TOKENIZE
        raise ValueError(f"{name} must be a list of ids or a tensor [length], got {_shown(values)}; {remedy}")
    if not len(found):
        raise ValueError(f"{name} is empty; give at least one token, or leave the prompt out")
    return found


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def _check_dtype(ids: Tensor, name: str) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        found = str(ids.dtype).removeprefix("torch.")
        raise ValueError(f"{name} must be int64 or int32, got {found}; {_TOKENIZE}")
