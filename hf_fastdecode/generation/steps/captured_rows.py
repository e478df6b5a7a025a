"""First passes by rows of decoders with an encoder, captured in CUDA graphs and kept between calls.

A pass over a prompt of some tokens takes the host longer, to launch the kernels of all layers, than the device to run
them. A captured pass is of so many inputs of one length, as recordings are, and of prompts of one length, all without
padding; it stores keys and values of both, see `cache.captured_rows`. Others run eagerly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...attention.active_passes import RowLengths
from ...attention.forest import Forest
from ...cache.captured_rows import CapturedRowsCache
from ...cache.layers.cross import ENCODER_OUTPUTS
from ...cache.shared import SharedContextCache
from ..forward_pass import forward_pass
from ..structure import Structure
from .graph_capture import capture_first_pass


class RowShape(NamedTuple):
    """What a captured pass is made for.

    Attributes:
        rows: Number of inputs, and of prompts.
        width: Tokens of each prompt.
        tokens: Tokens of each input.
    """

    rows: int
    width: int
    tokens: int


class CapturedRows:
    """A first pass of a model over a prompt of each of some inputs.

    Args:
        cache: The cache of the pass to capture with, whose items are being prefilled.
        longest: Tokens of the longest row by the end of the call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: RowShape,
        cache: SharedContextCache,
        longest: int,
        structure: Structure,
        pool: Any,
    ):
        assert cache.inputs is not None
        self.shape, self.lengths, device = shape, RowLengths(longest), model.device
        hidden: Tensor = cache.inputs.arguments[ENCODER_OUTPUTS][0]
        self._ids, self._places = torch.zeros(2, shape.rows, shape.width, dtype=torch.long, device=device)
        self._hidden = torch.zeros_like(hidden)
        self._view = view = CapturedRowsCache(cache, shape.rows, self._hidden, structure.layout)
        self._kinds = kinds = list[Any]()  # of the model's output
        arguments = {"input_ids": self._ids, "use_cache": True, "return_dict": True}

        def run(places: Tensor = self._places) -> tuple[Tensor, ...]:  # no reference to self, see `CapturedGraph`
            view.begin()
            output = forward_pass(model, view, places, **arguments)
            kinds[:] = [type(output)]
            logits = output.logits.contiguous()  # of all tokens: what is wanted differs from loop to loop
            return logits, *view.take()

        rows = shape.rows * shape.width
        self._graph = capture_first_pass(run, model, structure, self.lengths, pool, rows=rows, fused_rows=0)

    def fits(self, forest: Forest | None, longest: int) -> bool:
        """Whether it computes a pass of its shape as the model would, and its memory is not read by another cache."""
        return self.lengths.serve(longest) and self._view.is_free

    def __call__(self, cache: SharedContextCache, ids: Tensor, places: Tensor, wanted: int) -> Any:
        """Prefill the cache's current items, for which `fits` holds.

        Args:
            ids: ``[rows, width]`` int64.
            places: ``[rows or 1, width]`` int64: their positions.
            wanted: Last positions of each row to return logits for.

        Returns:
            The model's output, with logits ``[rows, wanted, vocabulary]`` alone.
        """
        assert cache.inputs is not None
        self._ids.copy_(ids)
        self._places.copy_(places)
        self._hidden.copy_(cache.inputs.arguments[ENCODER_OUTPUTS][0])
        logits, *buffers = self._graph.replay()
        self._view.store(cache, buffers)
        self._view.lend(cache)
        return self._kinds[0](logits=logits[:, -wanted:].clone())
