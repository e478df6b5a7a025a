"""Finds the prefixes that prompts share with each other and with stored tokens, and what is stored of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ...cache.consolidate import consolidate
from ...cache.shared import SharedContextCache
from ...log import logger
from ...parallel.agreement import described
from ..beside import Beside
from ..call_context import CallContext
from ..fingerprint import filled_by
from .image_beginnings import ImageBeginnings
from .prompt_plan import FEWEST, ComparedPrompts, PromptGroup, PromptPlan, StoredPrompts, compare_prompts


@dataclass
class Shared:
    """The prompts of a call and the cache to prefill them into.

    Attributes:
        cache: A new cache, or a fork of the given one or of one in the prefix store.
        prompts: The prompts, compared with each other and with the cache.
        reuses: Whether the cache is a fork.
        keeps: Whether the prompts are kept for later calls.
    """

    cache: SharedContextCache
    prompts: ComparedPrompts
    reuses: bool
    keeps: bool


def find_shared(
    call: CallContext,
    groups: list[PromptGroup],
    max_suffix: int,
    *,
    recompute: int = 0,
    by_rows: bool = False,
    alike: bool = False,
    images: ImageBeginnings | None = None,
    reuse: bool = True,
    ahead: bool = False,
) -> Shared:
    """Find the prefixes that prompts share with each other, the given cache, or one of the prefix store.

    Args:
        max_suffix: Maximum tokens appended per row.
        recompute: See `compare_prompts`.
        by_rows: Whether different prompts share nothing, see `by_rows`.
        alike: Whether they nevertheless do where they begin alike and layers have states, see
            `ComparedPrompts.from_ends`.
        images: Of prompts that come with images, tells what they may share and reuse.
        reuse: Whether stored tokens may be used: of the given cache, or if the options allow it, of the prefix store.
        ahead: Whether the caller asks `numbers_hold` later, where the prefix store was looked into.

    Raises:
        ValueError: The caller's cache does not fit the prompts or the model.
    """
    options, given, layout = call.options, call.given, call.structure.layout
    base, states, keeps, text = given, bool(layout.states), keeps_prompts(call), images is None
    if options.reuse_prefix and not keeps:
        why = (
            "the model has an encoder, and its decoder's prompts are of one input"
            if layout.cross
            else "its layers' scans do not continue states"
        )
        call.state.log_once(f"reuse_prefix is not used: {why}")
    if given is not None:
        _check_cache(call, given)
    elif keeps and reuse and text:
        store = call.state.prefix_store
        base, call.fingerprint = store.find(call.model, groups, call.structure, least=options.min_shared_tokens)
        if not ahead and not numbers_hold(call):
            base = None
    elif reuse and text and not layout.prefills_by_rows:
        call.state.note_prompt(call.model, groups[0].tokens)
    alike = alike or not text
    apart = by_rows and not states and not alike  # `from_ends` decides of those with states
    least = max(len(group.tokens) for group in groups) + 1 if apart else options.min_shared_tokens

    def compared(base: SharedContextCache | None) -> tuple[SharedContextCache, ComparedPrompts]:
        cache = (SharedContextCache() if base is None else base).fork(max_suffix=max_suffix, backend=options.backend)
        cache.state.parallel, cache.kept = call.structure.parallel, call.may_keep_cache
        prompts = compare_prompts(groups, StoredPrompts(cache), min_shared_tokens=least, recompute=recompute)
        return cache, prompts if images is None else images.sharing(prompts)

    cache, prompts = compared(base)
    for index, (group, reused) in enumerate(zip(groups, prompts.reused_lengths, strict=True)):
        if given is not None and reused == 0 and len(group.tokens) > recompute:
            raise ValueError(
                f"prompt {index} does not begin with tokens of the cache; pass the whole text, including the cached "
                "part"
            )
    if given is not None and not reuse:
        base = given = None
        cache, prompts = compared(None)
    if base is not None:
        call.report.known_tokens = prompts.reused_lengths
    if given is not None and not states:
        _warn_if_short_match(given, prompts)
        lengths = zip(prompts.stored_lengths, prompts.reused_lengths, strict=True)
        again = max(stored - reused for stored, reused in lengths)
        if again > 1:
            call.state.log_once(
                f"the first pass asks for logits of all prompt tokens, so {again} tokens that the given cache holds "
                "are computed again; pass logits_to_keep=1 for those of the last token alone"
            )
    if states:
        held = prompts.stored_lengths
        prompts = prompts.from_ends(cache, continues=layout.continues_states, alike=alike, worth=options.worth_passes)
        if given is not None:
            _warn_if_states_continue_little(held, prompts.reused_lengths, continues=layout.continues_states)
        call.report.known_tokens = None if base is None else prompts.reused_lengths
    if images is not None:
        prompts = images.reusing(prompts if states else prompts.if_it_saves(options.worth_passes))
        call.report.known_tokens = None if base is None else prompts.reused_lengths
    cache.gaps = any(group.gaps for group in groups)
    return Shared(cache, prompts, base is not None, keeps and reuse and text)


class Planned(Protocol):
    """What a call is to prefill."""

    @property
    def found(self) -> Shared: ...
    @property
    def plan(self) -> PromptPlan: ...


Plan = TypeVar("Plan", bound=Planned)


def planned_alike(call: CallContext, make: Callable[[], Plan]) -> Plan:
    """The plan that `make` finds, the same on all processes of the model, given the same prompts.

    It is found again without kept prompts where processes keep different ones: some have dropped one to save memory.
    """
    with call.ranks.together():
        planned = make()
    if _same_plans(call, planned):
        return planned
    call.state.prefix_store.clear()
    call.report.known_tokens = None
    with call.ranks.together():
        return make()


def _same_plans(call: CallContext, planned: Planned) -> bool:
    def fields() -> dict[str, str]:
        paths = dict.fromkeys(planned.plan.forest.paths)
        return {
            "new tokens": described(planned.plan.new_tokens),
            "reused": described(planned.found.prompts.reused_lengths),
            # Processes that divide nodes gather what is stored span by span.
            "stored": described([[(span.start, span.length) for span in path] for path in paths]),
        }

    return call.ranks.differences(fields) is None


def numbers_hold(call: CallContext, beside: Beside | None = None) -> bool:
    """Whether the model's numbers are still those of the prefix store's fingerprint, found for this call.

    Where they are not, the store is emptied. It takes launches for each parameter: with `beside`, while the device
    computes what a call is to use if they hold.
    """
    if call.fingerprint is None:
        return True
    with nullcontext() if beside is None else beside.here():
        if call.fingerprint.sampled_difference(call.structure.walk) is None:
            return True
    call.state.prefix_store.clear()
    call.fingerprint = None
    return False


def keeps_prompts(call: CallContext) -> bool:
    """Whether prompts of the call are kept for later ones, which could not continue all models' states."""
    layout = call.structure.layout
    return bool(call.options.reuse_prefix) and layout.continues_states and not layout.cross


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


def _check_cache(call: CallContext, cache: SharedContextCache) -> None:
    """Reject a cache of another model, by its layers or fingerprint."""
    cache.meet(call.structure.layout)
    held, asked = cache.state.parallel, call.structure.parallel
    if (held and held.group) is not (asked and asked.group):
        whose = "this process alone" if held is None else f"the processes {list(held.global_ranks)}"
        raise ValueError(
            f"the cache was made for {whose} (sequence_parallel), and this call divides contexts otherwise; make it "
            "again with hf_fastdecode.prefill(model, ...)"
        )
    if cache.fingerprint is not None and (other := cache.fingerprint.difference(call.model)):
        raise ValueError(
            f"the cache was made with other {other}, of another model or before these changed; make it again with "
            "hf_fastdecode.prefill(model, ...)"
        )


def _warn_if_states_continue_little(held: Sequence[int], reused: Sequence[int], *, continues: bool) -> None:
    """Warn when layers with states compute again most of the tokens of a prompt that the given cache holds."""
    for index, (length, used) in enumerate(zip(held, reused, strict=True)):
        if 2 * used < length:
            why = (
                f"states continue where a prompt or a completion in the cache ends, by at least {FEWEST} new tokens"
                if continues
                else "its layers' scans do not continue states"
            )
            logger.warning(
                "prompt %d begins with %d tokens of the given cache, of which %d are not computed again: %s",
                index,
                length,
                used,
                why,
            )
            return


def _warn_if_short_match(given: SharedContextCache, prompts: ComparedPrompts) -> None:
    """Warn when a prompt diverges early from the given cache, e.g. because it was tokenized separately."""
    shortest = min(given.forest.context_lengths, default=0)
    for index, (group, length) in enumerate(zip(prompts.groups, prompts.stored_lengths, strict=True)):
        expected = min(shortest, len(group.tokens))
        if 2 * length < expected:
            logger.warning(
                "prompt %d begins with %d of the %d or more tokens of the given cache; the rest of it is prefilled",
                index,
                length,
                shortest,
            )
            return
