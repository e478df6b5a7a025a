"""`absorb` in PyTorch, with the roundings that the kernel repeats; exact in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pointwise.api import NormForm, RotaryForm
from ..pointwise.reference import rms_norm, wide
from .api import Absorbed, Angles, Rotation


def absorb(
    query: Tensor, compressed: Tensor, factor: Tensor, weight: Tensor, eps: float, angles: Angles, rotation: Rotation
) -> Absorbed:
    """See `api.absorb`."""
    heads, latent = query.shape[1], len(factor)
    rotary = compressed.shape[1] - latent
    plain, rest = query.split([query.shape[2] - rotary, rotary], -1)
    to_keys = weight.unflatten(0, (heads, -1))[:, : plain.shape[2]]
    of_latents = torch.einsum("rhk,hkl->rhl", plain, to_keys)
    rest = rotated(rest, angles, rotation)
    latents = rms_norm(compressed[:, :latent], factor, eps, NormForm.ROUNDED)
    keys = rotated(compressed[:, None, latent:], angles, rotation)[:, 0]
    return Absorbed(torch.cat((of_latents, rest), -1), torch.cat((plain, rest), -1), latents, keys)


def rotated(x: Tensor, angles: Angles, rotation: Rotation) -> Tensor:
    """Elements ``[rows, heads, rotary]``, rotated."""
    half = x.shape[-1] // 2
    cos, sin = (part[:, None] for part in angles)
    first, second = (x[..., ::2], x[..., 1::2]) if rotation.pairs else x.chunk(2, -1)
    if rotation.form is RotaryForm.WHOLE:
        first, second, cos, sin = wide(first), wide(second), wide(cos), wide(sin)
    later = slice(None, half) if rotation.pairs else slice(-half, None)
    one = first * cos[..., :half] - second * sin[..., :half]
    other = second * cos[..., later] + first * sin[..., later]
    parts = (one.to(x.dtype), other.to(x.dtype))
    return torch.stack(parts, -1).flatten(-2) if rotation.stays else torch.cat(parts, -1)
