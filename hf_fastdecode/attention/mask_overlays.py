"""What models for images add to causal masks, and whether it shows anything where there are none.

transformers' `create_causal_mask` takes ``block_sequence_ids``, the number of the image that each token is of, and -1
for text: tokens of an image see each other. Models that always give them get a mask function which is causal for text.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars
from typing import Any, Final

from torch import Tensor
from transformers.masking_utils import blockwise_overlay, or_masks

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
