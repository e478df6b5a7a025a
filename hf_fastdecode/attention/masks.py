"""The mask function: transformers asks it for the masks of a pass over a shared-context cache.

Models for images add to causal masks: transformers' `create_causal_mask` takes ``block_sequence_ids``, the number of
the image that each token is of, and -1 for text; tokens of an image see each other. Models that always give them get a
mask function which is causal for text.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars
from typing import Any, Final

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
)

from ..errors import Unsupported
from .active_passes import lengths_of_pass, stock_attention
from .own_code import own_code_of
from .placeholders import BidirectionalMask, CausalMask, SlidingWindow

NOT_CAUSAL = "the model's mask is not plain causal attention"


def shared_context_mask(
    *args: Any,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Any:
    """Mask function: checks that the model asks for causal attention, windowed or not, and makes no mask.

    Args:
        args: Positional arguments of every mask function, for stock passes only.
        mask_function: Says which keys a query sees.
        local_size: Window or chunk length of a local attention layer, if any.
        allow_is_causal_skip: transformers clears it when the model adds another rule to the causal one.
        kwargs: Arguments of other mask functions.

    Returns:
        None for plain causal attention, or where no row outgrows the window, else a `SlidingWindow`. For architectures
        with code that reads masks, a `CausalMask` instead of None. For attention without a causal rule a
        `BidirectionalMask`, which layers over the cache refuse, but for cross-attention.

    Raises:
        Unsupported: The mask is neither causal nor that of a sliding window.
    """
    lengths = lengths_of_pass()
    if lengths is None:  # a stock pass of another thread
        name = stock_attention(kwargs["config"])
        given = {
            "mask_function": mask_function,
            "allow_is_causal_skip": allow_is_causal_skip,
            "local_size": local_size,
        }
        return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **given, **kwargs)
    if local_size is not None and local_size < 1:
        # A mask that hides every key. Models whose config has a window of 0 create it, but their layers do not use it.
        return SlidingWindow(local_size)
    plain = without_blocks(mask_function, int(kwargs["q_length"]))
    if plain is not mask_function:
        mask_function, allow_is_causal_skip = plain, True
    window = lengths.keep_if_binding(local_size)
    own = own_code_of(type(kwargs.get("config")))
    added_in_stand_ins = own is not None and own.reads_masks
    if mask_function is bidirectional_mask_function and not added_in_stand_ins:  # which would not see it
        return BidirectionalMask(kwargs.get("attention_mask"))
    if (not allow_is_causal_skip and not added_in_stand_ins) or (
        local_size is None and mask_function is not causal_mask_function
    ):
        raise Unsupported(NOT_CAUSAL)
    if window is None:
        return CausalMask() if added_in_stand_ins else None
    if not _slides(mask_function, window):
        raise Unsupported(
            f"chunks of {window} tokens are shorter than the longest row, {lengths.longest} tokens; of local "
            "attention, only sliding windows are supported"
        )
    return SlidingWindow(window)


def _slides(mask_function: Callable[..., Any], window: int) -> bool:
    """Whether a mask function is a sliding window of `window` tokens, rather than one of chunks."""
    # Four ages of a key: just outside the window, the oldest inside, the query itself, and the next token. For two
    # adjacent queries, because the last query of a chunk sees what it would in a window.
    # On the CPU, whatever the default device, because a CUDA graph may be under capture.
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    query = torch.tensor([window, window + 1], device="cpu").repeat_interleave(4)
    age = torch.tensor([window, window - 1, 0, -1], device="cpu").repeat(2)
    key = query - age
    shown = mask_function(zero, zero, query, key).tolist()
    return bool(shown == [False, True, True, False] * 2)


MaskFunction = Callable[..., Any]

_UNION: Final = f"{or_masks.__qualname__}.<locals>.or_mask"
_BLOCKS: Final = f"{blockwise_overlay.__qualname__}.<locals>.inner_mask"


def without_blocks(mask_function: MaskFunction, queries: int) -> MaskFunction:
    """The mask function without blocks that show queries nothing more: of text alone, or of a decode step.

    Args:
        queries: Tokens of each row. One is a step's, which models give as text; of several, blocks are read from the
            device.
    """
    if getattr(mask_function, "__qualname__", "") != _UNION:
        return mask_function
    first, *others = getclosurevars(mask_function).nonlocals["mask_functions"]
    if len(others) != 1 or getattr(others[0], "__qualname__", "") != _BLOCKS:
        return mask_function
    blocks: Tensor = getclosurevars(others[0]).nonlocals["block_sequence_ids"]
    inert = queries == 1 or bool((blocks < 0).all())
    return first if inert else mask_function
