"""Layers with states: the functions by which their code updates these, for a step of one token per row.

transformers' own functions take some dozens of launches a step, of which several read whole states. Those of packages
that take their place where they are installed (flash-linear-attention, causal-conv1d, mamba-ssm) leave many small
launches between. A layer's `forward` here runs with others in the place of both, one launch each (`trial.calling`):
its code, projections and norms stay as they are. Passes of several tokens run the functions that the layer has.

Of gated delta nets as those of Qwen3.5 some ten launches remain, which make decays and betas of projections. These
nets run as a whole in one launch each for convolution, delta rule with its gates, and norm.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from ..._compat import torch_function
from ...kernels.failures import KernelFailedError
from ...kernels.state_steps import reference
from ...kernels.state_steps.api import MOST_WIDTH, Gates, convolve, delta_rule, scan
from ..interception.segments import by_segments
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


_of_copy = by_copy(_others, serves=lambda hidden: hidden.shape[1:-1] == (1,))


def _replacement(module: nn.Module, names: frozenset[str]) -> Callable[..., Any]:
    return by_segments(module, _of_copy(module, names))


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
    "torch_recurrent_gated_delta_rule": (_follows_delta_rule, _delta_rule),
    "mamba2_selective_state_update": (_scans, _scan),
}
"""By name of transformers' function: a trial whether it computes what is known, and what runs in its place."""

STATES = FusedKind("layers with states", may_be, key, form_of, _replacement)


_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_PARTS = {*_PROJECTIONS, "conv1d", "norm", "out_proj"}
_PARAMETERS = {"A_log", "dt_bias"}
_CACHES = ("cache", "cache_params")
"""Names of the argument with the cache, in releases of transformers."""


def _net_may_be(module: type[nn.Module]) -> bool:
    return may_be(module) and {*_PROJECTIONS, *_PARAMETERS} <= set(names_in(module))


def _net_key(module: nn.Module) -> Hashable | None:
    if module._modules.keys() != _PARTS or module._parameters.keys() != _PARAMETERS or module._buffers:
        return None
    return "gated delta nets", key(module), vars(module).get("activation")


def _net_form_of(module: nn.Module) -> frozenset[str] | None:
    """As `form_of`, where a step computes what is known here."""
    names = form_of(module)
    if names is None or len(names) < 2:
        return None
    small: Any = _small(module)
    x = random(3, 1, _NET_WIDTH, seed=8, dtype=torch.float32)
    held = random(3, 96, 4, seed=9, dtype=torch.float32), random(3, 4, 16, 8, seed=10, dtype=torch.float32)
    layer: Any = _layer(*(one.clone() for one in held))
    cache: Any = Cache(layers=[layer])
    found = with_torch_functions(type(module).forward, names)(small, x, cache)
    expected = _step(small, x, *held, _convolve_by_reference, _delta_rule_by_reference)
    after = layer.conv_states[0], layer.recurrent_states[0]
    same = map(_close, (found, *after), (expected, *held))
    return names if all(same) else None


def _run_net(module: Any, other: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    hidden = args[0] if args else kwargs.get("hidden_states")
    cache: Any = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    layer = None if cache is None else cache.layers[module.layer_idx]
    if (
        len(args) > 1
        or any(kwargs.get(name) is not None for name in ("attention_mask", "cu_seq_lens_q"))
        or not isinstance(hidden, Tensor)
        or hidden.shape[1:-1] != (1,)
        or not runs_fused(hidden)
        or not all(map(is_plain, (module, *module.children())))
        or not isinstance(layer, LinearAttentionLayer)
        or layer.record_past
        or not cache.has_previous_state(module.layer_idx, 0)
    ):
        return other(*args, **kwargs)
    held = layer.conv_states[0], layer.recurrent_states[0]
    if {held[0].dtype, module.conv1d.weight.dtype} != {hidden.dtype}:
        return other(*args, **kwargs)
    try:
        return _step(module, hidden, *held, convolve, _delta_rule_or_reference)
    except (ValueError, KernelFailedError):  # of the convolution or before it, when no state has changed
        return other(*args, **kwargs)


def _step(module: Any, x: Tensor, conv: Tensor, state: Tensor, convolve: Any, delta_rule: Any) -> Tensor:
    """A step of hidden states ``[rows, 1, width]``, in which these operators overwrite the states."""
    rows, key_dim = len(x), module.head_k_dim
    mixed = module.in_proj_qkv(x)[:, 0]
    if mixed.dtype != conv.dtype:
        raise ValueError(f"projections give {mixed.dtype}, and states are in {conv.dtype}")
    z, beta, decay = module.in_proj_z(x), module.in_proj_b(x)[:, 0], module.in_proj_a(x)[:, 0]
    mixed = convolve(mixed, conv, module.conv1d.weight[:, 0].contiguous(), module.conv1d.bias, silu=True)
    query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
    query, key = (one.view(rows, -1, key_dim) for one in (query, key))
    gates = Gates(module.A_log, module.dt_bias)
    out = delta_rule(query, key, value.view(rows, -1, module.head_v_dim), decay, beta, state, gates)
    out = module.norm(out.flatten(0, 1), z.reshape(-1, module.head_v_dim))
    result: Tensor = module.out_proj(out.view(rows, 1, -1))
    return result


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
    parts: dict[str, nn.Module | Tensor] = {
        name: linear(_NET_WIDTH, outputs, seed=seed).float()
        for seed, (name, outputs) in enumerate(zip((*_PROJECTIONS, "out_proj"), (96, 32, 4, 4, 32), strict=True))
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


def _layer(conv: Tensor, state: Tensor) -> LinearAttentionLayer:
    layer = LinearAttentionLayer()
    layer.update_conv_state(conv)
    layer.update_recurrent_state(state)
    return layer


DELTA_NETS = FusedKind(
    "gated delta nets",
    _net_may_be,
    _net_key,
    _net_form_of,
    lambda module, names: partial(_run_net, module, _replacement(module, names)),
)
