"""Gated delta nets as those of Qwen3.5: one launch each for convolution, delta rule with its gates, and norm.

Where `states` replaces functions alone, some ten launches remain that make decays and betas of projections.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from ...kernels.failures import KernelFailedError
from ...kernels.state_steps import reference
from ...kernels.state_steps.api import Gates, convolve, delta_rule
from . import states
from .runs import is_plain, runs_fused
from .trial import linear, names_in, random, twin

WHAT = "gated delta nets"

_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_PARTS = {*_PROJECTIONS, "conv1d", "norm", "out_proj"}
_PARAMETERS = {"A_log", "dt_bias"}
_CACHES = ("cache", "cache_params")
"""Names of the argument with the cache, in releases of transformers."""


def may_be(module: type[nn.Module]) -> bool:
    """Whether modules of a class may be such nets."""
    return states.may_be(module) and {*_PROJECTIONS, *_PARAMETERS} <= set(names_in(module))


def kind(module: nn.Module) -> Hashable | None:
    """What tells nets apart that compute differently; None for a module of other parts."""
    if module._modules.keys() != _PARTS or module._parameters.keys() != _PARAMETERS or module._buffers:
        return None
    return WHAT, states.kind(module), vars(module).get("activation")


def form_of(module: nn.Module) -> frozenset[str] | None:
    """As `states.form_of`, where a step computes what is known here."""
    names = states.form_of(module)
    if names is None or len(names) < 2:
        return None
    small: Any = _small(module)
    x = random(3, 1, _WIDTH, seed=8, dtype=torch.float32)
    held = random(3, 96, 4, seed=9, dtype=torch.float32), random(3, 4, 16, 8, seed=10, dtype=torch.float32)
    layer: Any = _layer(*(one.clone() for one in held))
    cache: Any = Cache(layers=[layer])
    found = states.with_torch_functions(type(module).forward, names)(small, x, cache)
    expected = _step(small, x, *held, _convolve_by_reference, _delta_rule_by_reference)
    after = layer.conv_states[0], layer.recurrent_states[0]
    same = all(
        one.shape == two.shape and torch.allclose(one, two, rtol=1e-3, atol=1e-4)
        for one, two in zip((found, *after), (expected, *held), strict=True)
    )
    return names if same else None


def replacement(module: nn.Module, names: frozenset[str]) -> Any:
    """What runs in the place of the module."""
    return partial(_run, module, states.replacement(module, names))


def _run(module: Any, other: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
    if {held[0].dtype, module.conv1d.weight.dtype, module.in_proj_qkv.weight.dtype} != {hidden.dtype}:
        return other(*args, **kwargs)
    try:
        return _step(module, hidden, *held, convolve, _delta_rule_or_reference)
    except (ValueError, KernelFailedError):  # of the convolution, before which no state has changed
        return other(*args, **kwargs)


def _step(module: Any, x: Tensor, conv: Tensor, state: Tensor, convolve: Any, delta_rule: Any) -> Tensor:
    """A step of hidden states ``[rows, 1, width]``, in which these operators overwrite the states."""
    rows, key_dim = len(x), module.head_k_dim
    mixed = module.in_proj_qkv(x)[:, 0]
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


_WIDTH = 32


def _small(module: Any) -> nn.Module:
    """A small net: two heads of 16 for keys, and four of 8 for values."""
    parts: dict[str, nn.Module | Tensor] = {
        name: linear(_WIDTH, outputs, seed=seed).float()
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
