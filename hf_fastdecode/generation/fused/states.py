"""Layers with states: the functions by which their code updates these, for one token per row or several.

transformers' own functions take some dozens of launches a step, of which several read whole states, and hundreds for
several tokens. Those of packages that take their place where they are installed (flash-linear-attention,
causal-conv1d, mamba-ssm) leave many small launches between, and some tune themselves for a minute before the first
token. A layer's `forward` here runs with others in the place of both, of a few launches (`trial.calling`): its code,
projections and norms stay as they are. Functions that are not known here run as the layer has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import is_of_package, torch_function
from ...kernels.failures import KernelFailedError
from ...kernels.state_scans import api as state_scans
from ...kernels.state_scans import reference as scans_reference
from ...kernels.state_steps import api as state_steps
from ...kernels.state_steps import reference as steps_reference
from ..interception.segments import by_segments
from .mamba_scans import scan_token, scan_tokens, scans_token, scans_tokens, starts_of_rows
from .trial import (
    FusedKind,
    by_copy,
    calling,
    close,
    function_key,
    global_named,
    is_plain,
    names_in,
    random_fp32,
    runs_fused,
    tried,
)


def may_be(module: type[nn.Module]) -> bool:
    return not _REPLACED.keys().isdisjoint(names_in(module))


def key(module: nn.Module) -> Hashable | None:
    forward = type(module).forward
    found = [(name, function_key(global_named(name, forward))) for name in sorted(_REPLACED)]
    return type(module), function_key(forward), tuple(found)


def form_of(module: nn.Module) -> frozenset[str] | None:
    """The names of those functions that compute what is known here; None if there are none, or no copy can be made."""
    forward, read = type(module).forward, names_in(type(module))
    if calling(forward, {}) is None:
        return None
    own = {name: torch_function(global_named(name, forward)) for name in _REPLACED if name in read}
    return frozenset(name for name, function in own.items() if tried(_REPLACED[name][0], function)) or None


def _others(forward: Callable[..., Any], names: frozenset[str]) -> dict[str, Callable[..., Any]]:
    return {name: partial(_REPLACED[name][1], global_named(name, forward)) for name in names}


_of_copy = by_copy(_others, serves=lambda hidden: runs_fused(hidden) and hidden.dim() == 3)


def _replacement(module: nn.Module, names: frozenset[str]) -> Callable[..., Any]:
    call = _of_copy(module, names)
    return by_segments(module, call, partial(_at_once, module, call) if _take_segments(module, names) else None)


def _take_segments(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether functions with these names are all that convolve and scan, and a layer hands arguments on to them."""
    hands_on = inspect.unwrap(type(module).forward).__code__.co_flags & inspect.CO_VARKEYWORDS
    if is_of_package(global_named("mamba2_chunk_scan", type(module).forward)):  # which runs, see `scan_tokens`
        names = names - {"mamba2_chunk_scan"}
    scans_states = "update_recurrent_state" in names_in(type(module))
    return bool(hands_on) and "causal_conv1d_fn" in names and (not scans_states or not _SCANS.isdisjoint(names))


def _at_once(module: nn.Module, call: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Result of a copy for a packed row, whose functions take the segments, see `StateLayer.at_once`."""
    hidden = args[0] if args else kwargs["hidden_states"]
    if not runs_fused(hidden) or not is_plain(module):
        return None
    with suppress(ValueError, KernelFailedError):  # of a function that takes none
        return layer.at_once(call, hidden.device, *args, **kwargs)
    return None


def _convolve(
    own: Callable[..., Any],
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """``causal_conv1d_update``: ``[rows, channels, 1]`` through states ``[rows, channels, length]``."""
    dtypes = {one.dtype for one in (hidden_states, conv_state, weight, bias) if one is not None}
    if hidden_states.shape[-1] == 1 and len(dtypes) == 1 and activation in (None, "silu", "swish"):
        given, silu = (weight.contiguous(), bias), activation is not None
        with suppress(ValueError, KernelFailedError):
            return state_steps.convolve(hidden_states[..., 0], conv_state, *given, silu=silu)[..., None]
    return own(hidden_states, conv_state, weight, bias, activation)


def _delta_rule(
    own: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
) -> Any:
    """``torch_recurrent_gated_delta_rule`` of one token: the state that it returns is the given one, overwritten."""
    state, named = kwargs.get("initial_state"), ("output_final_state", "use_qk_l2norm_in_kernel")
    served = all(map(kwargs.get, named)) and kwargs.get("cu_seqlens") is None
    if served and state is not None and query.shape[1] == 1 and query.shape[-1] <= state_steps.MOST_WIDTH:
        with suppress(ValueError, KernelFailedError):
            out = state_steps.delta_rule(query[:, 0], key[:, 0], value[:, 0], g[:, 0], beta[:, 0], state)
            return out[:, None], state
    return own(query, key, value, g=g, beta=beta, **kwargs)


def _convolve_tokens(
    own: Callable[..., Any],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Any:
    """``causal_conv1d_fn``: ``[rows, channels, tokens]``, of which each token's channels lie together."""
    (rows, _, tokens), length = hidden_states.shape, weight.shape[-1]
    segments = kwargs.get("segments")
    dtypes = {one.dtype for one in (hidden_states, weight, bias) if one is not None}
    packed = any(kwargs.get(name) is not None for name in ("seq_idx", *_PACKED))
    if not packed and len(dtypes) == 1 and activation in (None, "silu", "swish"):
        given, silu = (weight.contiguous(), bias), activation is not None
        with suppress(ValueError, KernelFailedError):
            x = hidden_states.mT.flatten(0, 1)
            starts = starts_of_rows(rows, tokens, x.device) if segments is None else segments.starts
            # States that are not read are as long as those of segments: another length would be another variant.
            before, length = (None, length) if segments is None else (segments.conv, segments.length or length)
            out, after = state_scans.convolve(x, starts, before, *given, silu=silu, length=length)
            if segments is not None:
                segments.conv_after = after
            return out.unflatten(0, (rows, tokens)).mT
    if segments is not None:
        raise ValueError("the kernel takes no segments like these")
    return own(hidden_states, weight, bias, activation=activation, **kwargs)


def _delta_rule_of_tokens(
    own: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
) -> Any:
    """``torch_chunk_gated_delta_rule``."""
    segments = kwargs.get("segments")
    if kwargs.get("use_qk_l2norm_in_kernel") and all(kwargs.get(name) is None for name in _PACKED):
        rows, tokens = query.shape[:2]
        with suppress(ValueError, KernelFailedError):
            packed = [one.flatten(0, 1) for one in (query, key, value, g, beta)]
            packed = [one if one.stride(-1) == 1 else one.contiguous() for one in packed]
            starts = starts_of_rows(rows, tokens, query.device) if segments is None else segments.to_scan()
            given: tuple[Any, ...] = (*packed, starts, kwargs.get("initial_state"))
            out, state = state_scans.delta_rule(*given)
            return out.unflatten(0, (rows, tokens)), state if kwargs.get("output_final_state") else None
    if segments is not None:
        raise ValueError("the kernel takes no segments like these")
    return own(query, key, value, g=g, beta=beta, **kwargs)


_ROWS, _CHANNELS, _HEADS, _SIZE = 3, 12, 4, 16

_SCANS = {"torch_chunk_gated_delta_rule", "mamba2_chunk_scan"}
"""Functions that scan several tokens into states, and take segments."""

_PACKED = ("cu_seqlens", "cu_seq_lens_q")
"""Names of the argument with the rows that others have packed in one."""

_close = partial(close, atol=1e-4)


def _convolves(own: Callable[..., Any]) -> bool:
    x, states, weight = (random_fp32(_ROWS, _CHANNELS, width, seed=width) for width in (1, 4, 3))
    weight, bias = weight[0], random_fp32(_CHANNELS, seed=5)
    for activation, given in ((None, None), ("silu", bias)):
        held = states.clone()
        found = own(x, held, weight, given, activation)
        expected, after = steps_reference.convolve(x[..., 0], states, weight, given, silu=activation is not None)
        if not _close(found[..., 0], expected) or not torch.equal(held, after):
            return False
    return True


def _follows_delta_rule(own: Callable[..., Any]) -> bool:
    query, key, value = (random_fp32(_ROWS, 1, _HEADS, _SIZE, seed=seed) for seed in range(3))
    decay, beta = (random_fp32(_ROWS, 1, _HEADS, seed=seed) for seed in (3, 4))
    states = random_fp32(_ROWS, _HEADS, _SIZE, _SIZE, seed=5)
    named = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found, after = own(query, key, value, g=-decay.exp(), beta=beta, initial_state=states.clone(), **named)
    expected, then = steps_reference.delta_rule(
        query[:, 0], key[:, 0], value[:, 0], -decay.exp()[:, 0], beta[:, 0], states
    )
    return _close(found[:, 0], expected) and _close(after, then)


def _convolves_tokens(own: Callable[..., Any]) -> bool:
    x, weight = random_fp32(_ROWS, _CHANNELS, 6, seed=6), random_fp32(_CHANNELS, 4, seed=4)
    bias = random_fp32(_CHANNELS, seed=5)
    for activation, given in ((None, None), ("silu", bias)):
        found = own(x, weight, given, activation=activation)
        starts, silu = starts_of_rows(1, 6, x.device), activation is not None
        for row, one in zip(found, x, strict=True):
            expected, _ = scans_reference.convolve(one.T, starts, None, weight, given, silu=silu, length=3)
            if not _close(row.T, expected):
                return False
    return True


def _follows_delta_rule_of_tokens(own: Callable[..., Any]) -> bool:
    tokens = state_scans.CHUNK + 2
    query, key, value = (random_fp32(1, tokens, 1, _SIZE, seed=seed) for seed in range(3))
    decay, beta = -random_fp32(1, tokens, 1, seed=3).exp(), random_fp32(1, tokens, 1, seed=4).sigmoid()
    states, named = (
        random_fp32(1, 1, _SIZE, _SIZE, seed=5),
        {"output_final_state": True, "use_qk_l2norm_in_kernel": True},
    )
    found, after = own(query, key, value, g=decay, beta=beta, initial_state=states.clone(), **named)
    packed = [one[0] for one in (query, key, value, decay, beta)]
    given: tuple[Any, ...] = (*packed, starts_of_rows(1, tokens, query.device), states)
    expected, then = scans_reference.delta_rule(*given)
    return _close(found[0], expected) and _close(after, then)


_REPLACED: Mapping[str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    "causal_conv1d_update": (_convolves, _convolve),
    "causal_conv1d_fn": (_convolves_tokens, _convolve_tokens),
    "torch_recurrent_gated_delta_rule": (_follows_delta_rule, _delta_rule),
    "torch_chunk_gated_delta_rule": (_follows_delta_rule_of_tokens, _delta_rule_of_tokens),
    "mamba2_selective_state_update": (scans_token, scan_token),
    "mamba2_chunk_scan": (scans_tokens, scan_tokens),
}
"""By name of transformers' function: a trial whether it computes what is known, and what runs in its place."""

STATES = FusedKind("layers with states", may_be, key, form_of, _replacement)
