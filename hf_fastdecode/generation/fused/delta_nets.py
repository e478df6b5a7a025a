"""Gated delta nets, as those of Qwen3-Next and Qwen3.5, as a whole: convolution, delta rule with its gates, and norm.

Where only the functions of their code are replaced (`states`), some ten launches remain, which make decays and betas
of projections.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from ..._compat import torch_function
from ...cache.layers.state import StateLayer
from ...kernels.failures import KernelFailedError
from ...kernels.state_scans import api as state_scans
from ...kernels.state_scans import reference as scans_reference
from ...kernels.state_steps import api as state_steps
from ...kernels.state_steps import reference as steps_reference
from . import states
from .mamba_scans import starts_of_rows
from .trial import FusedKind, calling, close, global_named, is_plain, linear, names_in, random_fp32, runs_fused, twin

_PROJECTIONS = {
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"): (96, 32, 4, 4),
    ("in_proj_qkvz", "in_proj_ba"): (128, 8),  # of Qwen3-Next: interleaved by groups of heads
}
"""Names of a net's projections, and their outputs in a small net, see `_small`."""

_PARTS = {"conv1d", "norm", "out_proj"}
_PARAMETERS = {"A_log", "dt_bias"}
_HIDDEN = 32
_CACHES = ("cache", "cache_params")
"""Names of the argument with the cache, in releases of transformers."""


def may_be(module: type[nn.Module]) -> bool:
    names = set(names_in(module))
    return states.may_be(module) and names >= _PARAMETERS and any(names.issuperset(one) for one in _PROJECTIONS)


def key(module: nn.Module) -> Hashable | None:
    parts = module._modules.keys() - _PARTS
    known = any(parts == set(one) for one in _PROJECTIONS) and module._modules.keys() >= _PARTS
    if not known or module._parameters.keys() != _PARAMETERS or module._buffers:
        return None
    return "gated delta nets", states.key(module), vars(module).get("activation")


def _projections(module: nn.Module) -> tuple[str, ...]:
    """The names of those that a net has."""
    return next(names for names in _PROJECTIONS if module._modules.keys() >= set(names))


def form_of(module: nn.Module) -> frozenset[str] | None:
    """As `states.form_of`, where passes of several tokens and a step after them compute what is known here."""
    names = states.form_of(module)
    if names is None or len(names) < 4:
        return None
    small: Any = _small(module)
    forward = type(module).forward
    own_code = calling(forward, {name: torch_function(global_named(name, forward)) for name in names})
    assert own_code is not None  # for `states.form_of` made one
    own, known = LinearAttentionLayer(), LinearAttentionLayer()
    of_own, of_known = Cache(layers=[own]), Cache(layers=[known])
    for tokens in (5, 2, 1):
        x = random_fp32(3, tokens, _HIDDEN, seed=8 + tokens)
        found = own_code(small, x, of_own)
        if tokens > 1:
            given = starts_of_rows(3, tokens, x.device), scans_reference.convolve, scans_reference.delta_rule
            expected = _run_tokens(small, x, of_known, *given)
        else:
            expected = _step(small, x, *_held(known), _convolve_by_reference, _delta_rule_by_reference)
        if not all(map(partial(close, atol=1e-4), (found, *_held(own)), (expected, *_held(known)))):
            return None
    return names


def _held(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.conv_states[0], layer.recurrent_states[0]


def _run(module: Any, other: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
            return _run_tokens(module, hidden, cache, starts, state_scans.convolve, state_scans.delta_rule)
        if mask is None:
            return _step(module, hidden, *_held(layer), state_steps.convolve, _delta_rule_or_reference)
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
    gates = state_steps.Gates(module.A_log, module.dt_bias)
    out, state = delta_rule(query, key, value, decay, beta, starts, state, gates)
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
    gates = state_steps.Gates(module.A_log, module.dt_bias)
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
        return state_steps.delta_rule(*args)
    except (ValueError, KernelFailedError):  # the convolution has moved its states: the step goes on
        return _delta_rule_by_reference(*args)


def _delta_rule_by_reference(*args: Any) -> Tensor:
    out, after = steps_reference.delta_rule(*args)
    args[5].copy_(after)
    return out


def _convolve_by_reference(x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    out, after = steps_reference.convolve(x, states, weight, bias, silu=silu)
    states.copy_(after)
    return out


def _small(module: Any) -> nn.Module:
    """A small net: two heads of 16 for keys, and four of 8 for values."""
    names = _projections(module)
    parts: dict[str, nn.Module | Tensor] = {
        name: linear(_HIDDEN, outputs, seed=seed).float()
        for seed, (name, outputs) in enumerate(zip((*names, "out_proj"), (*_PROJECTIONS[names], 32), strict=True))
    }
    norm: Any = module.norm
    small_norm = twin(norm, weight=random_fp32(8, seed=5))
    conv = twin(module.conv1d, weight=random_fp32(96, 1, 4, seed=6))
    conv.register_parameter("bias", None)
    own: Any = twin(
        module, **parts, norm=small_norm, conv1d=conv, A_log=random_fp32(4, seed=7), dt_bias=random_fp32(4, seed=11)
    )
    sizes = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 8, "key_dim": 32, "value_dim": 32}
    vars(own).update(sizes | {"conv_dim": 96, "conv_kernel_size": 4, "layer_idx": 0})
    return own


DELTA_NETS = FusedKind(
    "gated delta nets",
    may_be,
    key,
    form_of,
    lambda module, names: partial(_run, module, states.STATES.replacement(module, names)),
)
