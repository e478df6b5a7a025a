"""Computes what a call's plan has to prefill, and keeps it for later calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from ...cache.forest_cache import consolidate
from ...cache.shared import SharedContextCache
from ..call_context import CallContext
from ..fingerprint import filled_by
from .by_rows import CapturedRowPasses, row_passes, try_step
from .call_plan import CallPlan, keeps_prompts
from .packed import CapturedPasses, PrefillPass, prefill_passes


def passes_of(
    call: CallContext,
    cache: SharedContextCache,
    plan: CallPlan,
    tokens: Sequence[int],
    *,
    captured: CapturedPasses | None = None,
    captured_rows: CapturedRowPasses | None = None,
    **arguments: Any,
) -> Iterator[PrefillPass]:
    """Compute a plan's nodes into a cache, pass by pass.

    Args:
        tokens: Indices of the new tokens to return logits for, ascending; by rows, those of the plan's last positions.
        captured: Runs packed passes by captured graphs where it can.
        captured_rows: Runs passes by rows so.
        arguments: Further model arguments of packed passes.
    """
    model, prompts, limit = call.model, plan.prompts, call.max_prefill_tokens
    if not prompts.by_rows:
        embeddings = None if prompts.embeddings is None else prompts.embeddings.of_ids
        options: dict[str, Any] = {"embeddings": embeddings, "captured": captured, "max_tokens": limit}
        length = prompts.width - plan.last_again
        yield from prefill_passes(model, cache, plan.nodes, tokens, length=length, **options, **arguments)
        return
    rows, layout = prompts.distinct_rows(), call.structure.layout
    yield from row_passes(
        *(model, cache, plan.nodes, rows, layout),
        keep=plan.request.wanted,
        max_tokens=limit,
        captured=captured_rows,
    )
    try_step(call, cache, rows)


def merge_returned(call: CallContext, cache: SharedContextCache) -> None:
    """Merge the prefilled nodes of a cache that the caller gets, on all processes of the model or on none."""
    if call.returns_cache:
        with suppress(torch.OutOfMemoryError):
            consolidate(cache, call.ranks.together())


def end_prefill(call: CallContext, cache: SharedContextCache, *, reusable: bool) -> None:
    """Keep prefilled nodes in the prefix store if they are `reusable`, and note which model filled a kept cache.

    Not within passes, for whose time methods of modules are replaced.
    """
    if cache.kept:
        cache.fingerprint = filled_by(cache.fingerprint, call.model, call.structure.walk)
    of_gaps = cache.gaps and bool(cache.state_layers)  # from which nothing is continued
    of_call = call.given is None  # a given one may hold tokens of direct passes
    if reusable and of_call and not of_gaps and keeps_prompts(call):
        with suppress(torch.OutOfMemoryError):
            call.report.kept_bytes = call.state.prefix_store.keep(
                call.model, cache, call.options.reused_bytes, call.structure, found=call.fingerprint
            )
    call.report.observe_nodes(cache)
