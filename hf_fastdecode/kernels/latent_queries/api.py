"""`absorb`: queries that have taken in the product from latents to keys, and a token's latent and rotated key.

A layer with latents (DeepSeek-V2, section 2.1) normalizes the latent of a token, rotates a part of its key and of the
queries, and in steps multiplies what else is in a query by the weights that would make keys of latents, head by head.
PyTorch's operators are some twenty launches, several of which copy what others have written. This is one, with the
same roundings, that writes each part where attention reads it. There is no backward pass.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..ahead import launch_named
from ..device import overlap_options, power_of_two
from ..failures import Kernel
from ..limits import refusal_in_half, refusal_of_operands, refusal_of_weights, refused
from ..pointwise.api import RotaryForm


class Angles(NamedTuple):
    """Cosines and sines of a token's angles, ``[rows or 1, rotary or rotary / 2]`` each, of equal strides."""

    cos: Tensor
    sin: Tensor


class Rotation(NamedTuple):
    """How elements are rotated in pairs."""

    form: RotaryForm  # where results are rounded
    pairs: bool  # whether neighbours are a pair; else an element of the first half and one of the second
    stays: bool = False  # whether each pair's results are neighbours; else they go to the two halves


class Absorbed(NamedTuple):
    """Inputs of attention over latents in a step, contiguous."""

    query: Tensor  # ``[rows, heads, latent + rotary]``, the second part rotated
    plain: Tensor  # ``[rows, heads, key + rotary]``: the query itself, likewise
    latents: Tensor  # ``[rows, latent]``, normalized
    keys: Tensor  # ``[rows, rotary]``, rotated


MOST_ROWS: Final = 512
MOST_WIDTH: Final = 1024  # elements of a latent, which a program normalizes whole, or of a head

_COLUMNS = 64  # elements of a latent, of a program
_ROWS = 16  # of a program; 64 took 80 us for a layer's products and this launch on an H200, 16 take 31


def absorb(
    query: Tensor, compressed: Tensor, factor: Tensor, weight: Tensor, eps: float, angles: Angles, rotation: Rotation
) -> Absorbed:
    """The queries of a step over latents, and what is stored of its tokens (DeepSeek-V2, section 2.1.2).

    Args:
        query: ``[rows, heads, key + rotary]``, contiguous; see `refusal` for what is served.
        compressed: ``[rows, latent + rotary]``, contiguous: a token's latent, and what becomes its rotated key.
        factor: ``[latent]``: the weight of the latents' norm, of `NormForm.ROUNDED`.
        weight: ``[heads * (key + value), latent]``, contiguous: from latents to keys and values.
        eps: Of the norm.
        angles: Of each row's token, or of all.
        rotation: How they are applied.

    Raises:
        ValueError: Other shapes or strides.
    """
    (rows, heads, width), latent = query.shape, len(factor)
    rotary, (cos, sin) = compressed.shape[-1] - latent, angles
    angle_widths = (rotary, rotary // 2)
    shapes = compressed.shape == (rows, latent + rotary) and weight.shape[1] == latent and not len(weight) % heads
    shapes = shapes and 0 < rotary < width and not rotary % 2 and cos.shape == sin.shape and cos.dim() == 2
    shapes = shapes and cos.stride() == sin.stride() and len(cos) in (1, rows) and cos.shape[1] in angle_widths
    if not shapes or any(not part.is_contiguous() for part in (query, compressed, factor, weight)):
        takes = "contiguous query [rows, heads, key + rotary], compressed [rows, latent + rotary], factor [latent], "
        takes += "weight [heads * (key + value), latent] and angles [rows or 1, rotary or rotary / 2]"
        raise refused(f"absorb takes {takes}", query, compressed, factor, weight, cos, sin)
    sizes = ((rows, heads, latent + rotary), query.shape, (rows, latent), (rows, rotary))
    made = Absorbed(*(torch.empty(size, dtype=query.dtype, device=query.device) for size in sizes))
    block_rows, blocks = min(_ROWS, max(16, power_of_two(rows))), -(-latent // _COLUMNS)
    launch_named(
        Kernel.LATENTS,
        "latent_queries.kernel.absorb",
        query.device,
        (heads + 1, blocks, -(-rows // block_rows)),
        *(query, compressed, factor, weight, cos, sin, *made, rows, float(eps)),
        *(cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)),
        HEADS=heads,
        KEY=width - rotary,
        ROTARY=rotary,
        VALUE=len(weight) // heads - (width - rotary),
        LATENT=latent,
        # Where the second of a pair has its angle: both have the same, but for what comes in two halves.
        SECOND=rotary // 2 if cos.shape[1] == rotary and not rotation.pairs else 0,
        PAIRS=rotation.pairs,
        STAYS=rotation.stays,
        ROUNDING=rotation.form.value,
        BLOCK_M=block_rows,
        BLOCK_N=_COLUMNS,
        BLOCK_K=max(16, power_of_two(width - rotary)),
        BLOCK_R=power_of_two(-(-block_rows // blocks)),
        BLOCK_L=power_of_two(latent),
        BLOCK_D=power_of_two(rotary // 2),
        enable_fp_fusion=False,  # a product and a sum in one instruction would not round the product
        **overlap_options(query.device),
    )
    return made


def refusal(query: Tensor, compressed: Tensor, factor: Tensor, weight: Tensor) -> str | None:
    """Why `absorb` does not serve these tensors; None when it does. Arguments as for `absorb`."""
    if reason := refusal_of_operands(query, compressed, factor, weight) or refusal_of_weights([weight]):
        return reason
    if not 1 <= len(query) <= MOST_ROWS or max(query.shape[-1], weight.shape[1]) > MOST_WIDTH:
        return f"it takes up to {MOST_ROWS} rows, and latents and heads of up to {MOST_WIDTH} elements"
    return refusal_in_half(query, Kernel.LATENTS)
