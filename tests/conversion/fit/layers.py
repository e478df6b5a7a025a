"""Layers with random weights, and the bound that identities are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_fastdecode.conversion.fit.rope import Rotation
from hf_fastdecode.conversion.fit.weights import AttentionWeights

IDENTICAL = torch.finfo(torch.float32).eps
"""Relative difference of two fp64 results that are the same in exact arithmetic: below what fp32 could tell apart."""


def relative(value: Tensor, oracle: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return (torch.linalg.norm(value.double() - oracle.double()) / torch.linalg.norm(oracle.double())).item()


def spectrum(rows: int, columns: int, condition: float, generator: torch.Generator) -> Tensor:
    """A matrix with random singular vectors and log-uniform singular values from 1 down to ``1 / condition``."""
    rank = min(rows, columns)
    left, right = (
        torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64))[0]
        for size in (rows, columns)
    )
    return left * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), rank, dtype=torch.float64) @ right.mT


def layer(
    *,
    d: int = 48,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 12,
    biases: bool = False,
    condition: float = 100.0,
    seed: int = 0,
) -> AttentionWeights:
    """A layer in fp64 whose key projection has the given condition number."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads = heads if kv_heads is None else kv_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, kv = heads * head_dim, kv_heads * head_dim
    bias = {f"{name}_bias": normal(size) for name, size in (("query", q), ("key", kv), ("value", kv), ("output", d))}
    return AttentionWeights(
        normal(q, d),
        spectrum(kv, d, condition, generator) * d**0.5,
        normal(kv, d) / d**0.5,
        normal(d, q) / q**0.5,
        heads,
        kv_heads,
        **(bias if biases else {}),
    )


def text(tokens: int, d: int = 48, seed: int = 1) -> Tensor:
    """Inputs of a layer."""
    return torch.randn(tokens, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rope(tokens: int, rotary_dim: int = 12, factor: float = 1.0) -> Rotation:
    """RoPE of tokens 0, 1, ..., with an attention factor on its tables."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies
    return Rotation(angles.cos() * factor, angles.sin() * factor)
