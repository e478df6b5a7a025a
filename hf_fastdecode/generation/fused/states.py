"""Layers with states: the functions by which their code updates these, for one token per row or several.

transformers' own functions take some dozens of launches a step, of which several read whole states, and hundreds for
several tokens. Those of packages that take their place where they are installed (flash-linear-attention,
causal-conv1d, mamba-ssm) leave many small launches between, and some tune themselves for a minute before the first
token. A layer's `forward` here runs with others in the place of both, of a few launches (`trial.calling`): its code,
projections and norms stay as they are. Functions that are not known here run as the layer has them.

Of gated delta nets as those of Qwen3-Next and Qwen3.5 some ten launches remain, which make decays and betas of
projections. These nets run as a whole: convolution, delta rule with its gates, and norm.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from ..._compat import is_of_package, torch_function
from ...cache.layers.state import StateLayer
from ...kernels.failures import KernelFailedError
from ...kernels.state_scans import api as scans
from ...kernels.state_scans import reference as scans_reference
from ...kernels.state_steps import reference
from ...kernels.state_steps.api import MOST_WIDTH, Gates, convolve, delta_rule, scan
from ..interception.segments import by_segments
from .mamba_scans import scan_tokens, scans_tokens, starts_of_rows
from .trial import (
    FusedKind,
    by_copy,
    calling,
    close,
    function_key,
    global_named,
    is_plain,
    linear,
    names_in,
    random,
    runs_fused,
    tried,
    twin,
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


def with_torch_functions(forward: Any, names: frozenset[str]) -> Callable[..., Any]:
    """A layer's `forward` with transformers' functions in PyTorch under these names, which run on any device."""
    copied = calling(forward, {name: torch_function(global_named(name, forward)) for name in names})
    assert copied is not None  # for `form_of` made one
    return copied


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
        try:
            silu = activation is not None
            return convolve(hidden_states[..., 0], conv_state, weight.contiguous(), bias, silu=silu)[..., None]
        except (ValueError, KernelFailedError):
            pass
    return own(hidden_states, conv_state, weight, bias, activation)


def _delta_rule(
    own: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Any:
    """``torch_recurrent_gated_delta_rule`` of one token: the state that it returns is the given one, overwritten."""
    served = output_final_state and use_qk_l2norm_in_kernel and kwargs.get("cu_seqlens") is None
    if served and initial_state is not None and query.shape[1] == 1 and query.shape[-1] <= MOST_WIDTH:
        try:
            out = delta_rule(query[:, 0], key[:, 0], value[:, 0], g[:, 0], beta[:, 0], initial_state)
            return out[:, None], initial_state
        except (ValueError, KernelFailedError):
            pass
    return own(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **kwargs,
    )


def _convolve_tokens(
    own: Callable[..., Any],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Any:
    """``causal_conv1d_fn``: ``[rows, channels, tokens]``, of which each token's channels lie together."""
    rows, _, tokens = hidden_states.shape
    segments = kwargs.get("segments")
    dtypes = {one.dtype for one in (hidden_states, weight, bias) if one is not None}
    packed = any(kwargs.get(name) is not None for name in ("seq_idx", *_PACKED))
    if not packed and len(dtypes) == 1 and activation in (None, "silu", "swish"):
        given, silu = (weight.contiguous(), bias), activation is not None
        try:
            if segments is not None:
                x, length = hidden_states[0].mT, segments.length or weight.shape[-1]
                of_segments = x, segments.starts, segments.conv, *given
                out, segments.conv_after = scans.convolve(*of_segments, silu=silu, length=length)
                return out.mT[None]
            x, starts = hidden_states.mT.flatten(0, 1), starts_of_rows(rows, tokens, hidden_states.device)
            out, _ = scans.convolve(x, starts, None, *given, silu=silu, length=weight.shape[-1] - 1)
            return out.unflatten(0, (rows, tokens)).mT
        except (ValueError, KernelFailedError):
            pass
    if segments is not None:
        raise ValueError("the kernel takes no segments like these")
    return own(hidden_states, weight, bias, activation=activation, **kwargs)


def _delta_rule_of_tokens(
    own: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Any:
    """``torch_chunk_gated_delta_rule``."""
    segments = kwargs.get("segments")
    if use_qk_l2norm_in_kernel and all(kwargs.get(name) is None for name in _PACKED):
        rows, tokens = query.shape[:2]
        try:
            packed = [one.flatten(0, 1) for one in (query, key, value, g, beta)]
            packed = [one if one.stride(-1) == 1 else one.contiguous() for one in packed]
            starts = starts_of_rows(rows, tokens, query.device) if segments is None else segments.to_scan()
            given: tuple[Any, ...] = (*packed, starts, initial_state)
            out, state = scans.delta_rule(*given)
            return out.unflatten(0, (rows, tokens)), state if output_final_state else None
        except (ValueError, KernelFailedError):
            pass
    if segments is not None:
        raise ValueError("the kernel takes no segments like these")
    return own(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **kwargs,
    )


def _scan(
    own: Callable[..., Any],
    state: Tensor,
    hidden_states: Tensor,
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
        try:
            out = scan(hidden_states, dt[..., 0], A[:, 0, 0], B, C, D[:, 0], dt_bias[:, 0], state)
            return out if z is None else out * F.silu(z)
        except (ValueError, KernelFailedError):
            pass
    return own(state, hidden_states, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **kwargs)


_ROWS, _CHANNELS, _HEADS, _WIDTH, _SIZE = 3, 12, 4, 8, 16

_SCANS = {"torch_chunk_gated_delta_rule", "mamba2_chunk_scan"}
"""Functions that scan several tokens into states, and take segments."""

_PACKED = ("cu_seqlens", "cu_seq_lens_q")
"""Names of the argument with the rows that others have packed in one."""


_close = partial(close, atol=1e-4)


def _numbers(*shape: int, seed: int) -> Tensor:
    return random(*shape, seed=seed, dtype=torch.float32)


def _convolves(own: Callable[..., Any]) -> bool:
    x, states, weight = (_numbers(_ROWS, _CHANNELS, width, seed=width) for width in (1, 4, 3))
    weight, bias = weight[0], _numbers(_CHANNELS, seed=5)
    for activation, given in ((None, None), ("silu", bias)):
        held = states.clone()
        found = own(x, held, weight, given, activation)
        expected, after = reference.convolve(x[..., 0], states, weight, given, silu=activation is not None)
        if not _close(found[..., 0], expected) or not torch.equal(held, after):
            return False
    return True


def _follows_delta_rule(own: Callable[..., Any]) -> bool:
    query, key, value = (_numbers(_ROWS, 1, _HEADS, _SIZE, seed=seed) for seed in range(3))
    decay, beta = (_numbers(_ROWS, 1, _HEADS, seed=seed) for seed in (3, 4))
    states = _numbers(_ROWS, _HEADS, _SIZE, _SIZE, seed=5)
    named = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found, after = own(query, key, value, g=-decay.exp(), beta=beta, initial_state=states.clone(), **named)
    expected, then = reference.delta_rule(query[:, 0], key[:, 0], value[:, 0], -decay.exp()[:, 0], beta[:, 0], states)
    return _close(found[:, 0], expected) and _close(after, then)


def _convolves_tokens(own: Callable[..., Any]) -> bool:
    x, weight = _numbers(_ROWS, _CHANNELS, 6, seed=6), _numbers(_CHANNELS, 4, seed=4)
    bias = _numbers(_CHANNELS, seed=5)
    for activation, given in ((None, None), ("silu", bias)):
        found = own(x, weight, given, activation=activation)
        starts, silu = starts_of_rows(1, 6, x.device), activation is not None
        for row, one in zip(found, x, strict=True):
            expected, _ = scans_reference.convolve(one.T, starts, None, weight, given, silu=silu, length=3)
            if not _close(row.T, expected):
                return False
    return True


def _follows_delta_rule_of_tokens(own: Callable[..., Any]) -> bool:
    tokens = scans.CHUNK + 2
    query, key, value = (_numbers(1, tokens, 1, _SIZE, seed=seed) for seed in range(3))
    decay, beta = -_numbers(1, tokens, 1, seed=3).exp(), _numbers(1, tokens, 1, seed=4).sigmoid()
    states, named = _numbers(1, 1, _SIZE, _SIZE, seed=5), {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found, after = own(query, key, value, g=decay, beta=beta, initial_state=states.clone(), **named)
    packed = [one[0] for one in (query, key, value, decay, beta)]
    given: tuple[Any, ...] = (*packed, starts_of_rows(1, tokens, query.device), states)
    expected, then = scans_reference.delta_rule(*given)
    return _close(found[0], expected) and _close(after, then)


def _scans(own: Callable[..., Any]) -> bool:
    x, gate = (_numbers(_ROWS, _HEADS, _WIDTH, seed=seed) for seed in (0, 8))
    steps = 12 * _numbers(_ROWS, _HEADS, seed=1)
    inputs, outputs = (_numbers(_ROWS, 2, _SIZE, seed=seed) for seed in (2, 3))
    rates, skips, biases = (_numbers(_HEADS, seed=seed) for seed in (4, 5, 6))
    states, rates = _numbers(_ROWS, _HEADS, _WIDTH, _SIZE, seed=7), -rates.exp()
    held = states.clone()
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
    expected, after = reference.scan(x, steps, rates, inputs, outputs, skips, biases, states)
    return _close(found, expected * F.silu(gate)) and _close(held, after)


_REPLACED: Mapping[str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    "causal_conv1d_update": (_convolves, _convolve),
    "causal_conv1d_fn": (_convolves_tokens, _convolve_tokens),
    "torch_recurrent_gated_delta_rule": (_follows_delta_rule, _delta_rule),
    "torch_chunk_gated_delta_rule": (_follows_delta_rule_of_tokens, _delta_rule_of_tokens),
    "mamba2_selective_state_update": (_scans, _scan),
    "mamba2_chunk_scan": (scans_tokens, scan_tokens),
}
"""By name of transformers' function: a trial whether it computes what is known, and what runs in its place."""

STATES = FusedKind("layers with states", may_be, key, form_of, _replacement)


_PROJECTIONS = {
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"): (96, 32, 4, 4),
    ("in_proj_qkvz", "in_proj_ba"): (128, 8),  # of Qwen3-Next: interleaved by groups of heads
}
"""Names of a net's projections, and their outputs in a small net, see `_small`."""

_PARTS = {"conv1d", "norm", "out_proj"}
_PARAMETERS = {"A_log", "dt_bias"}
_CACHES = ("cache", "cache_params")
"""Names of the argument with the cache, in releases of transformers."""


def _net_may_be(module: type[nn.Module]) -> bool:
    names = set(names_in(module))
    return may_be(module) and names >= _PARAMETERS and any(names.issuperset(one) for one in _PROJECTIONS)


def _net_key(module: nn.Module) -> Hashable | None:
    parts = module._modules.keys() - _PARTS
    known = any(parts == set(one) for one in _PROJECTIONS) and module._modules.keys() >= _PARTS
    if not known or module._parameters.keys() != _PARAMETERS or module._buffers:
        return None
    return "gated delta nets", key(module), vars(module).get("activation")


def _projections(module: nn.Module) -> tuple[str, ...]:
    """The names of those that a net has."""
    return next(names for names in _PROJECTIONS if module._modules.keys() >= set(names))


def _net_form_of(module: nn.Module) -> frozenset[str] | None:
    """As `form_of`, where passes of several tokens and a step after them compute what is known here."""
    names = form_of(module)
    if names is None or len(names) < 4:
        return None
    small: Any = _small(module)
    own, known = LinearAttentionLayer(), LinearAttentionLayer()
    of_own, of_known = Cache(layers=[own]), Cache(layers=[known])
    for tokens in (5, 2, 1):
        x = random(3, tokens, _NET_WIDTH, seed=8 + tokens, dtype=torch.float32)
        found = with_torch_functions(type(module).forward, names)(small, x, of_own)
        if tokens > 1:
            given = starts_of_rows(3, tokens, x.device), scans_reference.convolve, scans_reference.delta_rule
            expected = _run_tokens(small, x, of_known, *given)
        else:
            expected = _step(small, x, *_held(known), _convolve_by_reference, _delta_rule_by_reference)
        if not all(map(_close, (found, *_held(own)), (expected, *_held(known)))):
            return None
    return names


def _held(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.conv_states[0], layer.recurrent_states[0]


def _run_net(module: Any, other: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    hidden = args[0] if args else kwargs.get("hidden_states")
    cache: Any = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    layer = None if cache is None else cache.layers[module.layer_idx]
    mask = kwargs.get("attention_mask")
    if (
        len(args) > 1
        or kwargs.get("cu_seq_lens_q") is not None
        or not isinstance(hidden, Tensor)
        or hidden.dim() != 3
        or not runs_fused(hidden)
        or not all(map(is_plain, (module, *module.children())))
        or not isinstance(layer, LinearAttentionLayer)
        or layer.record_past
    ):
        return other(*args, **kwargs)
    if isinstance(layer, StateLayer):
        layer.begin_segments()
    resumed = cache.has_previous_state(module.layer_idx, 0)
    if {module.conv1d.weight.dtype, layer.conv_states[0].dtype if resumed else hidden.dtype} != {hidden.dtype}:
        return other(*args, **kwargs)
    try:
        if hidden.shape[1] > 1 or not resumed:
            hidden = hidden if mask is None else (hidden * mask[:, :, None]).to(hidden.dtype)
            starts = _starts_of_pass(layer, hidden)
            return _run_tokens(module, hidden, cache, starts, scans.convolve, scans.delta_rule)
        if mask is None:
            return _step(module, hidden, *_held(layer), convolve, _delta_rule_or_reference)
    except (ValueError, KernelFailedError):  # before any state has changed
        pass
    return other(*args, **kwargs)


def _starts_of_pass(layer: LinearAttentionLayer, x: Tensor) -> Tensor:
    """Where segments begin: prompts that are packed in one row, or else rows."""
    if isinstance(layer, StateLayer) and layer.state.current.segments:
        return layer.state.current.starts(x.device)
    return starts_of_rows(len(x), x.shape[1], x.device)


def _run_tokens(module: Any, x: Tensor, cache: Any, starts: Tensor, convolve: Any, delta_rule: Any) -> Tensor:
    """A pass of hidden states ``[rows, tokens, width]`` by these operators, after which the cache's states change.

    Args:
        starts: Of segments, ``[segments + 1]`` int32: the rows, or prompts in one row.
    """
    index, key_dim, length = module.layer_idx, module.head_k_dim, module.conv_kernel_size
    conv, state = _held(cache.layers[index]) if cache.has_previous_state(index, 0) else (None, None)
    mixed, z, beta, decay = _projected(module, x)
    weight = module.conv1d.weight[:, 0].contiguous()
    mixed, conv = convolve(mixed, starts, conv, weight, module.conv1d.bias, silu=True, length=length)
    query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
    query, key, value = (
        one.unflatten(1, (-1, width)) for one, width in zip((query, key, value), (key_dim, key_dim, module.head_v_dim))
    )
    out, state = delta_rule(query, key, value, decay, beta, starts, state, Gates(module.A_log, module.dt_bias))
    out = module.norm(out.flatten(0, 1), z.reshape(-1, module.head_v_dim))
    result: Tensor = module.out_proj(out.view(*x.shape[:2], -1))
    cache.update_conv_state(conv, index, conv_kernel_size=length)  # last: what fails before has changed nothing
    cache.update_recurrent_state(state, index)
    return result


def _step(module: Any, x: Tensor, conv: Tensor, state: Tensor, convolve: Any, delta_rule: Any) -> Tensor:
    """A step of hidden states ``[rows, 1, width]``, in which these operators overwrite the states."""
    rows, key_dim = len(x), module.head_k_dim
    mixed, z, beta, decay = _projected(module, x)
    mixed = convolve(mixed, conv, module.conv1d.weight[:, 0].contiguous(), module.conv1d.bias, silu=True)
    query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
    query, key = (one.view(rows, -1, key_dim) for one in (query, key))
    gates = Gates(module.A_log, module.dt_bias)
    out = delta_rule(query, key, value.view(rows, -1, module.head_v_dim), decay, beta, state, gates)
    out = module.norm(out.flatten(0, 1), z.reshape(-1, module.head_v_dim))
    result: Tensor = module.out_proj(out.view(rows, 1, -1))
    return result


def _projected(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values together, gates of outputs, and projections of betas and decays: ``[tokens, ...]``.

    Raises ValueError if they are in another dtype than `x`, as quantized weights may give them.
    """
    found = [getattr(module, name)(x) for name in _projections(module)]
    if len(found) == 2:
        *mixed, z, beta, decay = (one.flatten(2) for one in module.fix_query_key_value_ordering(*found))
        found = [torch.cat(mixed, -1), z, beta, decay]
    if (dtype := found[0].dtype) != x.dtype:
        raise ValueError(f"projections give {dtype} of hidden states in {x.dtype}")
    return tuple(one.flatten(0, 1) for one in found)


def _delta_rule_or_reference(*args: Any) -> Tensor:
    try:
        return delta_rule(*args)
    except (ValueError, KernelFailedError):  # the convolution has moved its states: the step goes on
        return _delta_rule_by_reference(*args)


def _delta_rule_by_reference(*args: Any) -> Tensor:
    out, after = reference.delta_rule(*args)
    args[5].copy_(after)
    return out


def _convolve_by_reference(x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    out, after = reference.convolve(x, states, weight, bias, silu=silu)
    states.copy_(after)
    return out


_NET_WIDTH = 32


def _small(module: Any) -> nn.Module:
    """A small net: two heads of 16 for keys, and four of 8 for values."""
    names = _projections(module)
    parts: dict[str, nn.Module | Tensor] = {
        name: linear(_NET_WIDTH, outputs, seed=seed).float()
        for seed, (name, outputs) in enumerate(zip((*names, "out_proj"), (*_PROJECTIONS[names], 32), strict=True))
    }
    norm: Any = module.norm
    small_norm = twin(norm, weight=random(8, seed=5, dtype=torch.float32))
    conv = twin(module.conv1d, weight=random(96, 1, 4, seed=6, dtype=torch.float32))
    conv.register_parameter("bias", None)
    own: Any = twin(
        module,
        **parts,
        norm=small_norm,
        conv1d=conv,
        A_log=random(4, seed=7, dtype=torch.float32),
        dt_bias=random(4, seed=11, dtype=torch.float32),
    )
    sizes = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 8, "key_dim": 32, "value_dim": 32}
    vars(own).update(sizes | {"conv_dim": 96, "conv_kernel_size": 4, "layer_idx": 0})
    return own


DELTA_NETS = FusedKind(
    "gated delta nets",
    _net_may_be,
    _net_key,
    _net_form_of,
    lambda module, names: partial(_run_net, module, _replacement(module, names)),
)
