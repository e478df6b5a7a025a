"""Finds what neighbouring prompts with equal images begin with, up to where their texts differ.

Prompts share a beginning only with all of their images in it, so that what follows is text alone. A model computes it
from stored keys and values, or states, as it does other text, if it does not attend both ways there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ..call_context import CallContext
from ..inputs.rows import InputRows
from .by_rows import Rows, prefill_rows
from .packed import prefill_nodes
from .prompt_plan import FEWEST, PromptGroup, StoredPrompts, compare_prompts


def shared_beginnings(call: CallContext, groups: Sequence[PromptGroup], common: Sequence[int]) -> list[int]:
    """Of the tokens that neighbouring prompts of a call with images begin with, how many they may share.

    Args:
        groups: The prompts, in row order.
        common: Length of the common prefix of the tokens of groups ``i`` and ``i + 1``.
    """
    images = call.input_rows
    if images is None or not images.apart or not any(common):
        return [0] * len(common)
    firsts = [0, *accumulate(group.count for group in groups[:-1])]
    shared = [
        _shared(images, call.positions.ids, *pair, length)
        for pair, length in zip(pairwise(zip(firsts, groups, strict=True)), common, strict=True)
    ]
    return shared if any(shared) and _continues_text(call, groups[0].tokens[-1:]) else [0] * len(common)


def _shared(
    images: InputRows,
    positions: Tensor | None,
    one: tuple[int, PromptGroup],
    other: tuple[int, PromptGroup],
    common: int,
) -> int:
    """What two prompts, each the first row of a group, may share of so many tokens; all or nothing."""
    for row, group in (one, other):
        end = len(group.tokens) - images.text_after(row)
        if group.gaps or common < end or end > len(group.tokens) - FEWEST:
            return 0
    parts = []
    for row, group in (one, other):
        parts.append(images.of_tokens(row, len(group.tokens), common))
        if positions is not None:
            first = positions.shape[-1] - len(group.tokens)
            parts[-1].append(positions[..., row if positions.shape[-2] > 1 else 0, first : first + common])
    alike = all(torch.equal(*both) for both in zip(*parts, strict=True))
    return common if alike and images.equal(one[0], other[0]) else 0


def _continues_text(call: CallContext, token: Tensor) -> bool:
    """Whether the model attends causally to text, as to what continues a beginning: tried once, with a few tokens.

    Args:
        token: ``[1]``: one of text.
    """
    model, structure, limit = call.model, call.structure, call.max_prefill_tokens

    def tried() -> bool:
        cache = SharedContextCache()
        cache.state.position_planes = call.positions.planes
        tokens = token.repeat(1, 2 * FEWEST)
        plan = compare_prompts([PromptGroup(tokens[0], 1)], StoredPrompts(cache), min_shared_tokens=1).plan()
        try:
            if structure.layout.prefills_by_rows:
                prefill_rows(model, cache, plan, Rows.of(tokens, None), max_tokens=limit, states=True)
            else:
                prefill_nodes(model, cache, plan, max_tokens=limit)
        except (Unsupported, ValueError, TypeError):  # of code that asks for images
            return False
        return True

    return structure.layout.continues_states and structure.kept("text behind images", tried)
