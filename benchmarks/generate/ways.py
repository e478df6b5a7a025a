"""The ways of generating, as data, and the block in which a model generates by one of them.

For a ceiling, attention is left out of the package's own loop: it is registered with transformers under a name, and
an entry of the registry's instance goes before it. Steps captured so must not outlive it: enable the model inside.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from hf_fastdecode.attention.kv import SharedKV
from hf_fastdecode.attention.overrides import ATTENTION_NAME
from hf_fastdecode.measurement import SAMPLING
from hf_fastdecode.measurement.rows import NotAvailableError

from .cases import parse_way


@dataclass(frozen=True)
class GenerateWay:
    """One way of calling `generate`."""

    enable: dict[str, Any] | None = None  # options of `hf_fastdecode.enable`; None for stock
    arguments: dict[str, Any] = field(default_factory=dict)  # of `generate`, in addition
    beams: bool = False  # the samples are the beams of a beam search
    single: bool = False  # takes one sample only
    attention: bool = True
    compiles: bool = False  # may compile anything: it then starts without what others compiled
    hooks: bool = True  # forward hooks leave the way what it is, so that tokens can be counted
    half: bool = False  # on CUDA takes half precision only, as this package's kernels do
    slim: str | None = None  # plan of every layer of a slim model; None for an ordinary model
    requires: str | None = None  # an optional package

    @property
    def exact(self) -> bool:
        """Whether its tokens are supposed to be right."""
        return self.attention and "cache_config" not in self.arguments

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
    **{f"stock-{name}": loop for name, loop in _LOOPS.items()},
    **_MODES,
    **{name: replace(loop, enable={}, compiles=True, hooks=False) for name, loop in _LOOPS.items()},
    "slim-k": replace(_MODES["shared"], slim="k"),
    "slim-k+r": replace(_MODES["shared"], slim="k+r"),
    **{f"{name}-no-attention": replace(way, attention=False) for name, way in _MODES.items()},
}


def find_way(name: str) -> GenerateWay:
    """The way of a name such as ``graph`` or ``graph+sampler=fast``; ValueError as of `parse_way`."""
    base, options = parse_way(name)
    way = _WAYS[base]
    return replace(way, enable={**(way.enable or {}), **options}) if options else way


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
    if way.arguments.get("cache_config", {}).get("backend") == "fp8" and not hasattr(cache_utils, "Fp8QuantizedLayer"):
        raise NotAvailableError(f"transformers {version('transformers')} has no quantized cache in fp8; 5.23 has")
    # Shapes of an earlier case would make this one's dynamic, and its first call shorter.
    if way.compiles and model.device.type == "cuda":
        torch.compiler.reset()
    if way.enable is None:
        yield
        return
    if way.attention:
        with fd.enabled(model, **way.enable):
            yield
        return
    with without_attention() as replaced, fd.enabled(model, **way.enable):
        yield
    if not replaced.called:
        raise NotAvailableError("the attention was not replaced: these steps do not go through the registry")


class Replaced:
    """Whether an attention function was replaced and then called."""

    called = False


@contextmanager
def without_attention() -> Iterator[Replaced]:
    """Within, steps answer a query with itself: nothing is stored, read or computed (Hydragen, section 4.1).

    Prefill attends as usual: a captured pass stores keys and values where attention is called. Restored on leaving,
    also by an error.
    """
    replaced = Replaced()

    def attention(
        module: nn.Module, query: Tensor, key: Any, value: Any, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(key, SharedKV) or query.shape[2] > 1:
            return shared_context_attention(module, query, key, value, mask, **kwargs)
        replaced.called = True
        return query.transpose(1, 2).contiguous(), None

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
