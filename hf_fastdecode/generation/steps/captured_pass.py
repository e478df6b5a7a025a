"""A captured forward pass of another decoding loop: several tokens of each row, and the model's whole output.

It differs from a captured decode step in three ways:

- Rows may have several tokens, such as drafts, up to the number that was captured. Earlier tokens do not see later
  ones, and the next pass overwrites what the surplus ones wrote to the suffixes.
- Suffixes may have been reordered: the kernels read a copy of the index table (`SuffixOrigins`).
- Loops may keep the output, which the next replay overwrites: they get a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.utils import ModelOutput

from ..._compat import CACHE
from ...cache.captured import CapturedCache
from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ..snapshot import SET_BY_CALLS
from .cuda_graph import CapturedStep

_FEWEST_ORIGINS = 256


class OutputFields:
    """The tensors of a pass's output, and how the output is made of them.

    Args:
        shape: Rows and tokens, the first two dimensions of each tensor.
    """

    def __init__(self, shape: tuple[int, int]):
        self._shape = shape
        self._kind: type[ModelOutput] = ModelOutput
        self._places: dict[str, int | tuple[int, ...] | nn.Module | None] = {}

    def take(self, model: nn.Module, output: ModelOutput) -> list[Tensor]:
        """The output's tensors, contiguous; raises `Unsupported` for a field of another kind or shape."""
        tensors: list[Tensor] = []
        self._kind, self._places = type(output), {}

        def place(name: str, value: Any) -> int:
            if not isinstance(value, Tensor) or value.shape[:2] != self._shape:
                what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise Unsupported(f"the model's output has {name!r} ({what}), which is not of each row's tokens")
            tensors.append(value.contiguous())
            return len(tensors) - 1

        for name, value in output.items():
            if name.startswith("encoder_"):  # which a step has as a placeholder
                continue
            if isinstance(value, Cache) or name == CACHE:  # which may be a view of it
                self._places[name] = None
            elif name in SET_BY_CALLS and (owner := _owner(model, name, value)) is not None:
                self._places[name] = owner
            elif isinstance(value, tuple | list):
                self._places[name] = tuple(place(name, one) for one in value)
            else:
                self._places[name] = place(name, value)
        if "logits" not in self._places:
            raise Unsupported("the model's output has no logits")
        return tensors

    def output(self, tensors: list[Tensor], cache: SharedContextCache, kept: int) -> ModelOutput:
        """An output of these tensors ``[rows, tokens, ...]``, with the logits of the last `kept` tokens."""
        fields: dict[str, Any] = {}
        for name, place in self._places.items():
            if place is None:
                fields[name] = cache
            elif isinstance(place, nn.Module):
                fields[name] = getattr(place, name)
            elif isinstance(place, tuple):
                fields[name] = tuple(tensors[one] for one in place)
            else:
                fields[name] = tensors[place]
        if kept < fields["logits"].shape[1]:
            fields["logits"] = fields["logits"][:, -kept:].contiguous()
        return self._kind(**fields)


def _owner(model: nn.Module, name: str, value: Any) -> nn.Module | None:
    """The module whose attribute of this name is the value, which the pass has not computed."""
    return next((module for module in model.modules() if getattr(module, name, None) is value), None)


class CapturedPass(CapturedStep):
    """A captured pass of up to as many rows and tokens of each; arguments as for `CapturedStep`."""

    _origins: Tensor | None
    _in_order: bool

    def _prepare(
        self, model: PreTrainedModel, cache: SharedContextCache
    ) -> tuple[CapturedCache, Callable[[Any], tuple[Tensor, ...]]]:
        self.fields = fields = OutputFields((self.rows, self.options.queries))
        self._origins, self._in_order = None, False
        if self.options.reordered:
            tokens = max(_FEWEST_ORIGINS, cache.suffix_length, cache.state.max_suffix or 0)
            capacity = 1 << (tokens - 1).bit_length()
            self._origins = torch.zeros(self.rows, capacity, dtype=torch.int32, device=self.ids.device)
        view = CapturedCache(self.tables, cache, self._origins, self._states_of(cache), self.cross, self.expanded)
        view.position_planes = 0  # positions are given with their planes
        return view, lambda output: tuple(fields.take(model, output))

    @property
    def longest_suffix(self) -> int | None:
        """Most tokens of a suffix before the pass; None for any number."""
        return None if self._origins is None else self._origins.shape[1]

    def fits(self, cache: SharedContextCache) -> bool:
        longest = self.longest_suffix
        return (longest is None or cache.suffix_length <= longest) and super().fits(cache)

    def run(self, cache: SharedContextCache, ids: Tensor, positions: Tensor) -> list[Tensor]:
        """Run one pass, and return copies of the output's tensors, ``[batch, tokens, ...]``.

        Args:
            cache: The batch, for which `fits` holds, with capacity in its suffixes for as many tokens as captured.
            ids: ``[batch, tokens]`` int64, up to as many as captured.
            positions: ``[..., batch or 1, tokens]`` int64.
        """
        rows, tokens = ids.shape
        self._load_states(cache)
        self.ids[:rows, :tokens].copy_(ids)
        self.positions[..., :rows, :tokens].copy_(positions)
        self._follow(cache)
        return [one[:rows, :tokens].clone() for one in self._graph.replay()]

    def _follow(self, cache: SharedContextCache) -> None:
        super()._follow(cache)
        if self._origins is None:
            return
        if (origins := cache.state.suffixes.origins) is not None:
            origins.copy_to(self._origins)
        elif not self._in_order:
            self._origins.copy_(torch.arange(self.rows, dtype=torch.int32, device=self._origins.device)[:, None])
        self._in_order = origins is None
