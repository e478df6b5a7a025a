"""Prefill by rows: each distinct prompt is a row of the pass, with the padding and the positions that stock gives it.

What packed prefill cannot lay end to end in one row: positions whose planes differ. Every prompt is a node of its own,
so that its samples and beams share it; common beginnings of different prompts are not shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import keeps_logits
from ...cache.shared import SharedContextCache
from ..forward_pass import forward_pass, input_device
from .packed import PrefillPass
from .prompt_plan import PromptGroup, PromptPlan


class Rows(NamedTuple):
    """The rows of a call, as its first pass is given them.

    Attributes:
        inputs: ``[rows, width]`` ids, or ``[rows, width, hidden]`` embeddings.
        attention_mask: ``[rows, width]``, or None.
        position_ids: ``[planes, rows or 1, width]``.
    """

    inputs: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor

    def distinct(self, groups: Sequence[PromptGroup]) -> Rows:
        """The first row of each group."""
        firsts = torch.tensor([0, *(group.count for group in groups[:-1])], device="cpu").cumsum(0)
        firsts = firsts.to(self.inputs.device)
        planes = self.position_ids
        return Rows(
            self.inputs[firsts],
            None if self.attention_mask is None else self.attention_mask[firsts],
            planes if planes.shape[1] == 1 else planes[:, firsts],
        )

    def part(self, rows: slice) -> Rows:
        """Some of the rows."""
        planes = self.position_ids
        mask = None if self.attention_mask is None else self.attention_mask[rows]
        return Rows(self.inputs[rows], mask, planes if planes.shape[1] == 1 else planes[:, rows])


def row_passes(
    model: PreTrainedModel,
    cache: SharedContextCache,
    plan: PromptPlan,
    rows: Rows,
    *,
    keep: int,
    max_tokens: int,
    **arguments: Any,
) -> Iterator[PrefillPass]:
    """Compute the plan's nodes into the cache, pass by pass, then set its forest.

    Args:
        cache: The empty cache; the tokens become its first segment.
        plan: With a node for each prompt.
        rows: The distinct rows, one for each of the plan's items.
        keep: Last positions of each row to return logits for.
        max_tokens: Maximum positions per forward pass, padding included; a pass has at least one row.
    """
    cache.add_segment(plan.new_tokens)
    width, device = rows.inputs.shape[1], input_device(model)
    at_once = max(1, max_tokens // width)
    for first in range(0, len(plan.items), at_once):
        part, items = rows.part(slice(first, first + at_once)), plan.items[first : first + at_once]
        mask = part.attention_mask
        real = torch.ones(part.inputs.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        name = "input_ids" if part.inputs.dim() == 2 else "inputs_embeds"
        with cache.prefilling(items, real.to(device)):
            output = forward_pass(
                model,
                cache,
                part.position_ids.to(device),
                **{name: part.inputs.to(device)},
                attention_mask=None if mask is None else mask.to(device),
                use_cache=True,
                return_dict=True,
                **({"logits_to_keep": keep} if keeps_logits(model) else {}),
                **arguments,
            )
        kept = real[:, -keep:].to(output.logits.device)
        # In the order of the tokens, row by row.
        wanted = [
            token
            for item, count in zip(items, kept.sum(1).tolist(), strict=True)
            for token in range(item.span.stop - count, item.span.stop)
        ]
        yield PrefillPass(wanted, output.logits[:, -keep:][kept], output)
    cache.set_forest(plan.forest, width)
