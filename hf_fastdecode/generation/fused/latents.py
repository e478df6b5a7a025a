"""Attention layers with latents: a step's queries and stored parts in one launch after their projections.

Transformers' code normalizes, rotates, splits and joins by some twenty launches, and `patches` multiplies queries by
the weights that would make keys of latents. In steps of one token per row the kernel of `kernels.latent_queries` does
all that. Other passes keep the layer's code, with the rotation of `rotary` where that serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._compat import uncompiled_call
from ...attention.interface import attend_shared
from ...cache.handles import StoredLayer
from ...instance_methods import is_linear
from ...kernels.failures import KernelFailedError
from ...kernels.latent_queries import reference
from ...kernels.latent_queries.api import Absorbed, Angles, Rotation, absorb, refusal
from ...kernels.pointwise.api import RotaryForm
from . import rotary
from .norms import eps_of
from .trial import (
    TRIED_IN,
    FusedKind,
    Returns,
    calling,
    close,
    function_key,
    is_plain,
    names_in,
    random,
    runs_fused,
    settings,
    tried,
    twin,
)

_INTERFACES = "ALL_ATTENTION_FUNCTIONS"
_COMPRESS, _NORM, _EXPAND = "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"
_WIDTHS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
_QUERY_PARTS = ("q_a_proj", "q_a_layernorm", "q_b_proj")
_CACHES = ("cache", "past_key_values")
"""Names of the argument with the cache, in releases of transformers."""
_TAKEN = {*_CACHES, "hidden_states", "position_embeddings", "position_ids", "cache_position", "use_cache"}
"""Arguments of `forward` that are read here, or have no effect on a step."""
_TOKENS = 5


class Form(NamedTuple):
    """How a layer rotates, whether its angles are complex numbers, and the form of `rotary`, if any."""

    rotation: Rotation
    complex: bool
    others: rotary.Forms | None


def may_be(module: type[nn.Module]) -> bool:
    return hasattr(module, "expand_kv") and {_COMPRESS, _NORM, _INTERFACES} <= set(names_in(module))


def key(module: nn.Module) -> Hashable | None:
    parts, norm = module._modules, module._modules.get(_NORM)
    if not {_COMPRESS, _EXPAND, "o_proj"} <= parts.keys() or norm is None or eps_of(norm) is None:
        return None
    widths = tuple(vars(module).get(name) for name in _WIDTHS)
    of_module, of_norm, in_parts = settings(module), settings(norm), parts.get("q_b_proj") is not None
    if not all(type(width) is int for width in widths) or of_module is None or of_norm is None:
        return None
    if any(parts.get(name) is None for name in (_QUERY_PARTS if in_parts else ("q_proj",))):
        return None
    assert isinstance(of_module, tuple)
    own: Any = type(module)
    alike = tuple(one for one in of_module if not (isinstance(one, tuple) and one[0] == "layer_idx"))
    return "latents", alike, of_norm, in_parts, function_key(own.expand_kv)


def form_of(module: nn.Module) -> Form | None:
    """The form in which the layer's code hands on what `reference.absorb` makes."""
    # Complex numbers are in fp32.
    kinds = ((True, RotaryForm.WHOLE), (False, RotaryForm.ROUNDED), (False, RotaryForm.WHOLE))
    for (is_complex, how), pairs, stays in product(kinds, (True, False), (True, False)):
        rotation = Rotation(how, pairs, stays)
        if tried(_computes, module, rotation, is_complex):
            others = tried(rotary.form_of, module) if rotary.may_be(type(module)) else None
            return Form(rotation, is_complex, others)
    return None


def _computes(module: Any, rotation: Rotation, is_complex: bool) -> bool:
    """Whether the layer's code computes this, between projections that are given here, around attention."""
    key, rotated, value, latent = (getattr(module, name) for name in _WIDTHS)
    heads, seen = 2, dict[str, Any]()
    x = random(1, _TOKENS, 16, seed=0)
    query = random(1, _TOKENS, heads * (key + rotated), seed=1)
    compressed, weight = random(1, _TOKENS, latent + rotated, seed=2), random(heads * (key + value), latent, seed=3)
    attended, result = random(1, _TOKENS, heads, value, seed=4), random(1, _TOKENS, 16, seed=5)
    projections = {name: Returns(query) for name in ("q_proj", *_QUERY_PARTS) if module._modules.get(name) is not None}
    own: dict[str, Any] = {**projections, _COMPRESS: Returns(compressed), "o_proj": Returns(result)}
    factor = random(latent, seed=6)
    small: Any = twin(module, **own, **{_NORM: twin(module._modules[_NORM], weight=factor)})

    def attend(layer: Any, *given: Any, **options: Any) -> tuple[Tensor, None]:
        seen.update(options, given=given)
        return attended, None

    class Interfaces:
        @staticmethod
        def get_interface(*_: Any) -> Callable[..., Any]:
            return attend

    def expand(latents: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        seen.update(latents=latents, keys=keys)
        return latents, keys

    small.expand_kv = expand
    forward = calling(type(module).forward, {_INTERFACES: Interfaces})
    angles, position_embeddings = _angles(rotated, is_complex)
    assert forward is not None
    taken = {"hidden_states": x, "position_embeddings": position_embeddings, "attention_mask": None}
    found = forward(small, **taken)
    tokens = query.view(_TOKENS, heads, -1), compressed[0], factor, weight
    expected = reference.absorb(*tokens, eps_of(small._modules[_NORM]) or 0.0, angles, rotation)
    handed, scaling = seen["given"][0], seen["scaling"]
    first = own["q_a_proj"] if "q_a_proj" in own else own["q_proj"]
    return (
        isinstance(found, tuple)
        and len(found) == 2
        and found[0] is result
        and found[1] is None
        and scaling == module.scaling
        and first.seen[0] is x
        and own[_COMPRESS].seen[0] is x
        and torch.equal(own["o_proj"].seen[0], attended.flatten(2))
        and close(handed[0].transpose(0, 1), expected.plain, rtol=0, atol=0)
        and close(seen["latents"][0, 0], expected.latents, rtol=1e-2)
        and close(seen["keys"][0, 0], expected.keys, rtol=0, atol=0)
    )


def _angles(rotated: int, is_complex: bool) -> tuple[Angles, Any]:
    """Angles of tokens, and as a layer takes them."""
    angle = 9 * random(1, _TOKENS, rotated // 2, seed=7, dtype=torch.float32)
    if is_complex:
        numbers = torch.polar(torch.ones_like(angle), angle)
        return Angles(*torch.view_as_real(numbers[0]).unbind(-1)), numbers
    angle = angle.repeat(1, 1, 2)
    cos, sin = angle.cos().to(TRIED_IN), angle.sin().to(TRIED_IN)
    return Angles(cos[0], sin[0]), (cos, sin)


def _run(module: Any, form: Form, other: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    hidden = kwargs.get("hidden_states")
    cache: Any = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    layer = None if cache is None else cache.layers[module.layer_idx]
    if (
        args
        or not isinstance(hidden, Tensor)
        or hidden.shape[1:-1] != (1,)
        or not runs_fused(hidden)
        or any(kwargs[name] is not None and kwargs[name] is not False for name in kwargs.keys() - _TAKEN)
        or not isinstance(layer, StoredLayer)
        or layer.state.current.items
        or layer.state.current.padded is not None
        or not all(map(is_plain, (module, module._modules[_NORM], module.kv_b_proj)))
        or not is_linear(module.kv_b_proj)
        or (angles := _angles_of(form, hidden, kwargs.get("position_embeddings"))) is None
    ):
        return other(*args, **kwargs)
    if (made := _absorbed(module, form, hidden, angles)) is None:
        return other(*args, **kwargs)
    stored, _ = cache.update(made.latents[:, None, None], made.keys[:, None, None], module.layer_idx)
    kv, _ = module.expand_kv(stored, stored)  # by `patches`, which attends with them
    kv.absorbed = made.query[:, :, None]
    out = attend_shared(module, made.plain[:, :, None], kv, scaling=module.scaling)
    return module.o_proj(out.flatten(2)), None


def _absorbed(module: Any, form: Form, hidden: Tensor, angles: Angles) -> Absorbed | None:
    """Inputs of attention; None where the kernel does not serve the layer's tensors."""
    parts = [module._modules.get(name) for name in _QUERY_PARTS]
    query, compressed = hidden, None
    for projection in [one for one in parts if one is not None] or [module.q_proj]:
        query = projection(query)
        if compressed is None:  # together with the first
            compressed = module.kv_a_proj_with_mqa(hidden)
    assert compressed is not None
    weight, factor, eps = module.kv_b_proj.weight, module.kv_a_layernorm.weight, eps_of(module.kv_a_layernorm)
    rows, width = len(hidden), module.qk_nope_head_dim + module.qk_rope_head_dim
    given = query.view(rows, -1, width), compressed.view(rows, -1), factor, weight
    if module.kv_b_proj.bias is not None or eps is None or refusal(*given) is not None:
        return None
    try:
        return absorb(*given, eps, angles, form.rotation)
    except (ValueError, KernelFailedError):
        return None


def _angles_of(form: Form, hidden: Tensor, given: Any) -> Angles | None:
    """Angles ``[rows or 1, elements]`` of a step; None for others than a layer of this form takes."""
    if form.complex:
        fits = type(given) is Tensor and given.dtype == torch.complex64
        parts = torch.view_as_real(given).unbind(-1) if fits else ()
    else:
        fits = isinstance(given, tuple) and all(type(one) is Tensor and one.dtype == hidden.dtype for one in given)
        parts = tuple(given) if fits else ()
    if len(parts) != 2 or any(part.dim() != 3 or part.shape[1] != 1 for part in parts):
        return None
    return Angles(*(part[:, 0] for part in parts))


def _replacement(module: nn.Module, form: Form) -> Callable[..., Any]:
    own = partial(uncompiled_call, module)
    other = own if form.others is None else rotary.ROTARY.replacement(module, form.others)
    return partial(_run, module, form, other)


LATENTS = FusedKind("layers with latents", may_be, key, form_of, _replacement)
