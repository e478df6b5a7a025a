"""The ways of generating, as data, and the block in which a model generates by one of them.

Other attention, none at all or a baseline's, runs in the package's own loop for the time of a measurement: the
package's attention is registered with transformers under a name, and an entry of the registry's instance goes before
it. Steps captured under another attention must not outlive it: enable the model inside of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, cache_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_fastdecode as fd
from hf_fastdecode.attention.interface import shared_context_attention
from hf_fastdecode.attention.kv import ForestKV, Segment, SharedKV
from hf_fastdecode.attention.overrides import ATTENTION_NAME
from hf_fastdecode.cache.handles import DecodeKV
from hf_fastdecode.generation.options import Options
from hf_fastdecode.measurement import SAMPLING
from hf_fastdecode.measurement.rows import NotAvailableError

from ..ops.baselines import TwoCalls, bifurcated
from ..ops.inputs import NodeBatch
from .cases import parse_way


@dataclass(frozen=True)
class GenerateWay:
    """One way.

    Attributes:
        enable: Options of `hf_fastdecode.enable`; None for stock.
        arguments: What `generate` is given in addition.
        beams: Whether the samples are the beams of a beam search.
        single: Whether it takes one sample only.
        attention: Another attention in our loop, one of `REPLACEMENTS`.
        batch: Through `generate_batch`.
        compiles: Whether it may compile anything: it then starts without what others compiled.
        hooks: Whether forward hooks leave the way what it is, so that tokens can be counted.
        half: Whether on CUDA it takes half precision only, as this package's kernels and flash attention do.
        slim: Plan of every layer of a slim model; None for an ordinary model.
        requires: The optional package that it needs.
    """

    enable: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    beams: bool = False
    single: bool = False
    attention: str | None = None
    batch: bool = False
    compiles: bool = False
    hooks: bool = True
    half: bool = False
    slim: str | None = None
    requires: str | None = None

    @property
    def exact(self) -> bool:
        """Whether its tokens are supposed to be right."""
        return self.attention != "none" and "cache_config" not in self.arguments

    @property
    def backend(self) -> str | None:
        """The backend of transformers' quantized cache, where this way has one."""
        backend: str | None = self.arguments.get("cache_config", {}).get("backend")
        return backend

    def call_arguments(self, samples: int) -> dict[str, Any]:
        """Arguments of `generate` for so many samples of one prompt, in a copy, as it may change them."""
        if not self.beams:
            return SAMPLING | {"num_return_sequences": samples} | deepcopy(self.arguments)  # 5.17 takes keys out
        return {"num_beams": samples, "num_return_sequences": samples}


_MODES = {
    "shared": GenerateWay(enable={}, compiles=True, hooks=False),
    "eager": GenerateWay(enable={"mode": "eager"}),
    "graph": GenerateWay(enable={"mode": "graph"}, hooks=False, half=True),
}


# Loops of transformers that this package leaves as they are.
_LOOPS = {
    "beams": GenerateWay(beams=True),
    "lookup": GenerateWay(arguments={"prompt_lookup_num_tokens": 8}, single=True),
    "hidden-states": GenerateWay(arguments={"output_hidden_states": True, "return_dict_in_generate": True}),
}


def _quantized(backend: str, requires: str | None = None, **config: int) -> GenerateWay:
    arguments = {"cache_implementation": "quantized", "cache_config": {"backend": backend, **config}}
    return GenerateWay(arguments=arguments, requires=requires)


_WAYS: dict[str, GenerateWay] = {
    "stock": GenerateWay(),
    "stock-static": GenerateWay(arguments={"cache_implementation": "static"}, compiles=True, hooks=False),
    "stock-slim-k": GenerateWay(slim="k"),
    "stock-slim-k+r": GenerateWay(slim="k+r"),
    "quantized-fp8": _quantized("fp8"),
    "quantized-hqq": _quantized("hqq", "hqq", nbits=8, axis_key=1, axis_value=1),
    "quantized-quanto": _quantized("quanto", "optimum-quanto", nbits=4),
    **{f"stock-{name}": loop for name, loop in _LOOPS.items()},
    "generate_batch": GenerateWay(batch=True, hooks=False),
    **_MODES,
    **{name: replace(loop, enable={}, compiles=True, hooks=False) for name, loop in _LOOPS.items()},
    "slim-k": replace(_MODES["shared"], slim="k"),
    "slim-k+r": replace(_MODES["shared"], slim="k+r"),
    **{f"{name}-no-attention": replace(way, attention="none") for name, way in _MODES.items()},
    "eager-bifurcated": replace(_MODES["eager"], attention="bifurcated"),
    "eager-hydragen": replace(_MODES["eager"], attention="hydragen", half=True),
}


def find_way(name: str) -> GenerateWay:
    """The way of a name such as ``graph`` or ``graph+sampler=fast``; ValueError as of `parse_way`."""
    base, options = parse_way(name)
    way = _WAYS[base]
    if not options:
        return way
    enable = {**(way.enable or {}), **{key: _value(text) for key, text in options.items()}}
    Options(**enable)
    return replace(way, enable=enable)


def _value(text: str) -> int | str:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isdecimal() else text


@contextmanager
def using(model: PreTrainedModel, way: GenerateWay) -> Iterator[None]:
    """Within, the model generates this way; on leaving it is stock again, and what was captured is gone.

    Raises NotAvailableError where the attention was not replaced, or a package is not installed or too old.
    """
    if way.requires is not None:
        try:
            version(way.requires)
        except PackageNotFoundError as error:
            raise NotAvailableError(f"{way.requires} is not installed; pip install {way.requires}") from error
    if way.backend == "fp8" and not hasattr(cache_utils, "Fp8QuantizedLayer"):
        raise NotAvailableError(f"transformers {version('transformers')} has no quantized cache in fp8; 5.23 has")
    # Shapes of an earlier case would make this one's dynamic, and its first call shorter.
    if way.compiles and model.device.type == "cuda":
        torch.compiler.reset()
    if way.enable is None:
        yield
        return
    if way.attention is None:
        with fd.enabled(model, **way.enable):
            yield
        return
    with replaced_attention(REPLACEMENTS[way.attention]) as replaced, fd.enabled(model, **way.enable):
        yield
    if not replaced.called:
        raise NotAvailableError("the attention was not replaced: these steps do not go through the registry")


Attend = Callable[[SharedKV, Tensor, float], Tensor | None]
"""Handle, query ``[rows, heads, queries, head_dim]`` and scale to an output of that shape; None: attend as usual."""


# What layers ask of attention that the papers' ways do not compute.
_NOT_KNOWN = ("softcap", "sliding_window", "s_aux")


class Replaced:
    """Whether an attention function was replaced and then called."""

    called = False


@contextmanager
def replaced_attention(attend: Attend) -> Iterator[Replaced]:
    """Within, shared-context attention is `attend`'s; restored on leaving, also by an error."""
    replaced = Replaced()

    def attention(
        module: nn.Module, query: Tensor, key: Any, value: Any, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        scale = kwargs.get("scaling")
        out = None
        if isinstance(key, SharedKV):
            if attend is not no_attention and (
                mask is not None or any(kwargs.get(name) is not None for name in _NOT_KNOWN)
            ):
                raise NotAvailableError(f"{type(module).__name__} has a window, sinks or a soft cap, which it ignores")
            out = attend(key, query, query.shape[-1] ** -0.5 if scale is None else float(scale))
        if out is None:
            return shared_context_attention(module, query, key, value, mask, **kwargs)
        replaced.called = True
        return out.transpose(1, 2).contiguous(), None

    # Compiled layers break where they break for the attention that it replaces.
    attention = torch.compiler.disable(attention)
    # An entry of this very instance is set and deleted: the one that registration made stays where it is.
    if ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is not shared_context_attention:
        raise RuntimeError("attention is replaced already; leave that block first")
    ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] = attention
    try:
        yield replaced
    finally:
        del ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]


def no_attention(handle: SharedKV, query: Tensor, scale: float) -> Tensor | None:
    """The query for an answer in steps: nothing is stored, read or computed (Hydragen, section 4.1, "No Attention").

    Prefill attends as usual: a captured pass stores keys and values where attention is called.
    """
    return query if query.shape[2] == 1 else None


def bifurcated_attention(handle: SharedKV, query: Tensor, scale: float) -> Tensor | None:
    """Bifurcated's einsums over the one context and the suffixes."""
    if not isinstance(handle, DecodeKV) or handle.step.tables is not None:  # of a captured step
        return None
    nodes = handle.append()
    own = _used(nodes)
    if len(nodes.forest.nodes) != 1 or query.shape[2] != 1:
        raise NotAvailableError(f"Bifurcated attention takes one context and one query a row, got {nodes.forest!r}")
    return bifurcated(query, nodes.node(nodes.forest.nodes[0].span), own, scale)


def hydragen_attention(handle: SharedKV, query: Tensor, scale: float) -> Tensor | None:
    """Hydragen's call for each node, call for the suffixes, and merge."""
    if not isinstance(handle, DecodeKV) or handle.step.tables is not None:  # of a captured step
        return None
    kv = handle.append()
    own = _used(kv)
    if query.shape[2] != 1 or any(sum(node.row_count for node in level) < len(query) for level in kv.forest.levels):
        raise NotAvailableError(f"two calls take one query a row and levels over all rows, got {kv.forest!r}")
    levels = [
        [NodeBatch(node.row_start, node.row_stop, *(part[None] for part in kv.node(node.span))) for node in level]
        for level in kv.forest.levels
    ]
    return TwoCalls("flash", pack=False)(query, levels, own, scale)


def _used(kv: ForestKV) -> Segment:
    _, length = kv.suffix_bounds
    return Segment(kv.suffix.keys[:, :, :length], kv.suffix.values[:, :, :length])


REPLACEMENTS: dict[str, Attend] = {
    "none": no_attention,
    "bifurcated": bifurcated_attention,
    "hydragen": hydragen_attention,
}
