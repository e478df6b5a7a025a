"""The operators of this folder in PyTorch, with the roundings that the kernels repeat; exact in fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .api import Activation, GatedNormForm, HeadNorms, NormForm, RotaryForm


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """See `api.rms_norm`."""
    x_wide = wide(x)
    normalized = x_wide * torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)
    if form is NormForm.ROUNDED:
        return weight * normalized.to(x.dtype)
    factor = wide(weight) + (1.0 if form is NormForm.PLUS_ONE else 0.0)
    return (factor * normalized).to(x.dtype)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, form: GatedNormForm, *, group: int | None = None
) -> Tensor:
    """See `api.gated_rms_norm`."""
    x_wide, opened = wide(x), F.silu(wide(gate))
    if form is GatedNormForm.BEFORE:
        x_wide = x_wide * opened
    groups = x_wide.unflatten(-1, (-1, group or x.shape[-1]))
    normalized = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    weighted = weight * normalized.to(x.dtype)
    return weighted if form is GatedNormForm.BEFORE else (wide(weighted) * opened).to(x.dtype)


def rotate(
    queries: Tensor,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    form: RotaryForm,
    *,
    halves: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor]:
    """See `api.rotate`."""
    if norms is not None:
        queries = rms_norm(queries, norms.query_weight, norms.eps, norms.form)
        keys = rms_norm(keys, norms.key_weight, norms.eps, norms.form)
    if halves:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return _rotated(queries, cos, sin, form), _rotated(keys, cos, sin, form)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm) -> Tensor:
    cos, sin, width = cos[:, None], sin[:, None], cos.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    if form is RotaryForm.WHOLE:
        turned, cos, sin = wide(turned), wide(cos), wide(sin)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(x.dtype), kept), dim=-1)


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """See `api.gated`."""
    if activation is Activation.SILU:
        return F.silu(gate) * up
    return gelu(gate, activation) * up


def gelu(gate: Tensor, activation: Activation) -> Tensor:
    return F.gelu(gate, approximate="tanh" if activation is Activation.GELU_TANH else "none")


def wide(x: Tensor) -> Tensor:
    """Convert to fp32; fp64 stays."""
    return x if x.dtype == torch.float64 else x.float()
