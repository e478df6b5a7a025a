"""Mamba-2's scans of one token and of several, which transformers' layers call by name, as kernels.

transformers' function of several tokens keeps products of all pairs of a token of a chunk and another, for each head:
of Nemotron-H-8B some megabytes for a token, which take most of a prefill's time. The kernel's memory is its output.
Where a package of kernels is installed (mamba-ssm), that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import is_of_package
from ...kernels.failures import KernelFailedError
from ...kernels.state_scans import api as state_scans
from ...kernels.state_scans import reference as scans_reference
from ...kernels.state_steps import api as state_steps
from ...kernels.state_steps import reference as steps_reference
from .trial import close, random_fp32

_OF_OTHER_FORMS = ("z", "seq_idx", "cu_seqlens", "cu_seq_lens_q")
"""Arguments of gates and of packed rows; None where a model's own forward passes them."""

_ROWS, _LENGTH, _HEADS, _WIDTH, _GROUPS, _SIZE, _CHUNK = 2, 7, 4, 8, 2, 16, 4
_OF_STATE = _ROWS, _HEADS, _WIDTH, _SIZE


def starts_of_rows(rows: int, tokens: int, device: torch.device) -> Tensor:
    """Where rows of so many tokens begin when they are packed in one, ``[rows + 1]`` int32."""
    return torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=device)


def scan_token(
    own: Callable[..., Any],
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """``mamba2_selective_state_update``, whose arguments are expanded to the elements of a head and of a state."""
    # Numbers that are the same throughout a head are views of one.
    expanded = dt.stride(-1) == 0 and A.stride()[1:] == (0, 0)
    expanded = expanded and all(one is not None and one.stride(-1) == 0 for one in (D, dt_bias))
    if expanded and dt_softplus and D is not None and dt_bias is not None:
        with suppress(ValueError, KernelFailedError):
            out = state_steps.scan(x, dt[..., 0], A[:, 0, 0], B, C, D[:, 0], dt_bias[:, 0], state)
            return out if z is None else out * F.silu(z)
    return own(state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **kwargs)


def scan_tokens(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``mamba2_chunk_scan`` of rows of tokens, as one segment each."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    if (
        len(args) == 5
        and given.keys() >= {"D", "dt_bias"}
        and given.keys().isdisjoint(_OF_OTHER_FORMS)
        and given.get("dt_softplus") is True
        and not is_of_package(own)
    ):
        with suppress(ValueError, KernelFailedError):
            out, after = _scanned(*args, **given)
            return (out, after) if given.get("return_final_states") else out
    if "segments" in given:
        raise ValueError("the kernel takes no segments like these")
    return own(*args, **kwargs)


def _scanned(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float] = (0.0, inf),
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """The kernel over ``[rows, length, heads, width]`` x, of whose memory the channels may lie along the tokens."""
    rows, length = x.shape[:2]
    starts = others["segments"].to_scan() if "segments" in others else None
    starts = starts_of_rows(rows, length, x.device) if starts is None else starts
    flat = (one if one.stride(-1) == 1 else one.contiguous() for one in (x, B, C))
    number, given, read = (one.flatten(0, 1) for one in flat)
    before = others.get("initial_states")
    before = None if before is None else before.contiguous()
    tensors = number, dt.flatten(0, 1), A, given, read, D, dt_bias, starts, before
    out, after = state_scans.scan(*tensors, limits=dt_limit)
    return out.unflatten(0, (rows, length)), after


def scans_token(own: Callable[..., Any]) -> bool:
    """Whether a function computes what is known, with a gate."""
    x, gate = (random_fp32(_ROWS, _HEADS, _WIDTH, seed=seed) for seed in (0, 8))
    steps = 12 * random_fp32(_ROWS, _HEADS, seed=1)
    inputs, outputs = (random_fp32(_ROWS, _GROUPS, _SIZE, seed=seed) for seed in (2, 3))
    rates, skips, biases = (random_fp32(_HEADS, seed=seed) for seed in (4, 5, 6))
    before, rates = random_fp32(*_OF_STATE, seed=7), -rates.exp()
    held = before.clone()
    found = own(
        held,
        x,
        steps[..., None].expand(-1, -1, _WIDTH),
        rates[:, None, None].expand(-1, _WIDTH, _SIZE),
        inputs,
        outputs,
        skips[:, None].expand(-1, _WIDTH),
        z=gate,
        dt_bias=biases[:, None].expand(-1, _WIDTH),
        dt_softplus=True,
    )
    expected, after = steps_reference.scan(x, steps, rates, inputs, outputs, skips, biases, before)
    return close(found, expected * F.silu(gate), atol=1e-4) and close(held, after, atol=1e-4)


def scans_tokens(own: Callable[..., Any]) -> bool:
    """Whether a function computes what is known: with limits of steps, and with states before the first tokens."""
    x, steps = random_fp32(_ROWS, _LENGTH, _HEADS, _WIDTH, seed=3), random_fp32(_ROWS, _LENGTH, _HEADS, seed=6)
    both, before = random_fp32(_ROWS, _LENGTH, 2 * _GROUPS, _SIZE, seed=4), random_fp32(*_OF_STATE, seed=5)
    rates, skips, biases = (random_fp32(_HEADS, seed=seed) for seed in range(3))
    starts, (given, read) = torch.arange(0, _ROWS * _LENGTH + 1, _LENGTH, device="cpu"), both.chunk(2, 2)
    for held, limits in ((None, (0.0, inf)), (before, (0.3, 1.5))):
        named = {"D": skips, "dt_bias": biases, "dt_softplus": True, "dt_limit": limits, "initial_states": held}
        tensors = x, steps, -rates.exp(), given, read
        found, after = own(*tensors, chunk_size=_CHUNK, z=None, **named | {"return_final_states": True})
        flat = (one.flatten(0, 1) if one.dim() > 1 else one for one in tensors)
        arguments: list[Any] = [*flat, skips, biases, starts, held, limits]
        expected, then = scans_reference.scan(*arguments)
        if not close(found.flatten(0, 1), expected) or not close(after, then):
            return False
    alone = own(*tensors, chunk_size=_CHUNK, **named)
    return close(alone.flatten(0, 1), expected)
