"""Plans a call once: what is shared and reused of its prompts, and how what is new is prefilled.

A plan is a value, made of `Prompts` and of what the decoding loop asks for (`Request`). Where it turns out not to
hold, another one is made from a changed request.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from ...cache.shared import SharedContextCache
from ...log import logger
from ..call_context import CallContext
from ..decoding.waves import Logits, rows_that_fit
from ..forward_pass import Beside
from .packed import UnsharedPrompts
from .prompt_plan import FEWEST, ComparedPrompts, PromptPlan, StoredPrompts, compare_prompts
from .reading import Prompts


@dataclass(frozen=True)
class Request:
    """What a decoding loop asks of its prefill.

    Attributes:
        new_tokens: Maximum tokens appended per row.
        wanted: Last positions of each prompt to return logits for.
        recompute: Last tokens of each prompt to compute even if stored; see `compare_prompts`.
        ends_in_steps: Whether the loop may compute last tokens of prompts as its first step, and prompt tokens of one
            row alone into its suffix.
        images_after: Whether prompts may have images after what they share or reuse.
        checks_later: Whether the caller asks `weights_hold` later, where the prefix store was looked into.
    """

    new_tokens: int
    wanted: int = 1
    recompute: int = 0
    ends_in_steps: bool = False
    images_after: bool = False
    checks_later: bool = False


@dataclass(frozen=True)
class CallPlan:
    """What a call prefills, and into which cache.

    Attributes:
        cache: A new cache, or a fork of the given one or of one in the prefix store.
        compared: The prompts, compared with each other and with the cache, without what `nodes` leave out.
        nodes: The nodes, and the tokens to prefill into them.
        reuses: Whether the cache is a fork.
        keeps: Whether the prompts are kept for later calls.
        unshared: Prompt tokens to prefill into suffixes, if any.
        last_again: Whether each prompt's last token is computed as the first decode step.
    """

    prompts: Prompts
    request: Request
    cache: SharedContextCache
    compared: ComparedPrompts
    nodes: PromptPlan
    reuses: bool
    keeps: bool
    unshared: UnsharedPrompts | None = None
    last_again: bool = False

    @property
    def images_after_stored(self) -> bool:
        """Whether a pass computes images after tokens that are stored by then."""
        if self.prompts.images is None:
            return False
        rows, parts = self.prompts.distinct_rows(), zip(self.nodes.items, self.nodes.groups, strict=True)
        return any(item.context and rows.images_in(group, item.position, item.span.length) for item, group in parts)


def plan_call(call: CallContext, prompts: Prompts, request: Request) -> CallPlan:
    """The plan of a call with these prompts.

    Raises:
        ValueError: The caller's cache does not fit the prompts or the model.
    """
    cache, compared, reuses = _find_shared(call, prompts, request)
    if prompts.inputs is not None:
        cache.inputs = prompts.inputs.inputs
    keeps = keeps_prompts(call) and prompts.may_reuse and prompts.prefixes.of_text
    unshared, again = None, False
    if request.ends_in_steps and not prompts.by_rows:
        if reuses:
            compared, again = _without_last(call, cache, compared, request)
        else:
            unshared = unshared_prompts(call, compared)
    if again:
        cache.state.max_suffix = request.new_tokens + 1
    elif unshared is not None:
        compared = compared.without_last(compared.unshared_lengths)
    return CallPlan(prompts, request, cache, compared, compared.plan(), reuses, keeps, unshared, again)


def _without_last(
    call: CallContext, cache: SharedContextCache, compared: ComparedPrompts, request: Request
) -> tuple[ComparedPrompts, bool]:
    """The prompts, without their last tokens where these are computed as the first decode step, and whether they are.

    They are if the cache holds a whole prompt, or all but its last token, unless that step would be of too many rows.
    """
    groups = compared.groups
    if not compared.any_stored_whole and compared.new_length > len(groups):
        return compared, False
    rows = sum(group.count for group in groups)
    at_once = call.options.max_rows or rows
    if not call.returns_cache and call.ranks.alone:  # several would have to agree on it
        logits = Logits(call.model.device, int(call.structure.text_config.vocab_size))
        at_once = min(at_once, rows_that_fit(cache, rows, logits, request.new_tokens))
    if not call.returns_cache and rows > at_once:
        # That step would be of all rows: the last token of each prompt becomes a node, as any other new one.
        return replace(compared, recompute=1), False
    return compared.without_last([1] * len(groups)), True


def unshared_prompts(call: CallContext, compared: ComparedPrompts) -> UnsharedPrompts | None:
    """Prompt tokens to prefill into suffixes; None if there are none, or nodes store them better.

    Layers that attend by themselves store suffixes in fewer bytes than nodes, which hold keys and values because their
    bytes are divided by the rows that read them. A node of one row divides them by nothing. Nodes are better where
    later calls are to reuse prompts, where kernels do not read suffixes, and where suffixes, which all have the length
    of the longest, take no fewer bytes; or divided between processes. Of a returned cache the next call makes nodes.
    """
    reused = call.options.reuse_prefix or call.must_share or call.structure.parallel is not None
    layout, layers = call.structure.layout, list(call.structure.layout.own.values())
    if reused or not layers or not layout.attends_by_itself or any(layer.no_captured_steps for layer in layers):
        return None
    lengths = zip(compared.groups, compared.unshared_lengths, strict=True)
    tokens = [group.tokens[len(group.tokens) - length :] for group, length in lengths for _ in range(group.count)]
    unshared, rows = UnsharedPrompts(tuple(tokens)), len(tokens)
    room, backend = rows * unshared.longest, call.options.backend
    fit = all(layer.suffixes_take_prompts(rows, room, unshared.total, backend) for layer in layers)
    return unshared if unshared.total and fit else None


def _find_shared(
    call: CallContext, prompts: Prompts, request: Request
) -> tuple[SharedContextCache, ComparedPrompts, bool]:
    """Find the prefixes that prompts share with each other, the given cache, or one of the prefix store.

    Returns the cache to prefill into, the prompts compared with it, and whether it is a fork.
    """
    given, layout, text = call.given, call.structure.layout, prompts.prefixes.of_text
    _note_reuse(call)
    if given is not None:
        _check_cache(call, given)
    base = given if given is not None else _kept_cache(call, prompts, request)
    cache, compared = _compared(call, prompts, request, base)
    if given is not None:
        _require_prefixes(compared, request.recompute)
        if not prompts.may_reuse:
            base = given = None
            cache, compared = _compared(call, prompts, request, None)
    common = compared
    if layout.states:
        alike, worth = prompts.alike or not text, call.options.worth_passes
        common = compared.from_ends(cache, continues=layout.continues_states, alike=alike, worth=worth)
    if given is not None:
        _warn_of_little(call, given, compared, common)
    common = prompts.prefixes.reusing(common, after=request.images_after)
    if base is not None or layout.states or not text:
        call.report.known_tokens = None if base is None else common.reused_lengths
    cache.gaps = any(group.gaps for group in prompts.groups)
    return cache, common, base is not None


def _note_reuse(call: CallContext) -> None:
    """Log why the option ``reuse_prefix`` is not used, if it is not."""
    if call.options.reuse_prefix and not keeps_prompts(call):
        why = (
            "the model has an encoder, and its decoder's prompts are of one input"
            if call.structure.layout.cross
            else "its layers' scans do not continue states"
        )
        call.state.log_once(f"reuse_prefix is not used: {why}")


def _kept_cache(call: CallContext, prompts: Prompts, request: Request) -> SharedContextCache | None:
    """The prefix store's cache with most of the prompts' tokens; without the store, repeated prompts are noted."""
    base = None
    if not (prompts.may_reuse and prompts.prefixes.of_text):
        return None
    if keeps_prompts(call):
        store, least = call.state.prefix_store, call.options.min_shared_tokens
        base, call.fingerprint = store.find(call.model, prompts.groups, call.structure, least=least)
        if not request.checks_later and not weights_hold(call):
            base = None
    elif not call.structure.layout.prefills_by_rows:
        call.state.note_prompt(call.model, prompts.groups[0].tokens)
    return base


def _compared(
    call: CallContext, prompts: Prompts, request: Request, base: SharedContextCache | None
) -> tuple[SharedContextCache, ComparedPrompts]:
    """A fork of a cache, or a new one, and the prompts compared with it.

    Prompts that run by rows share nothing with others, unless layers have states (`ComparedPrompts.from_ends`) or
    images say what they share.
    """
    options = call.options
    apart = prompts.by_rows and not call.structure.layout.states and not prompts.alike and prompts.prefixes.of_text
    least = max(len(group.tokens) for group in prompts.groups) + 1 if apart else options.min_shared_tokens
    cache = (SharedContextCache() if base is None else base).fork(
        max_suffix=request.new_tokens, backend=options.backend
    )
    cache.state.parallel, cache.kept = call.structure.parallel, call.may_keep_cache
    compared = compare_prompts(
        prompts.groups, StoredPrompts(cache), min_shared_tokens=least, recompute=request.recompute
    )
    return cache, prompts.prefixes.sharing(compared, after=request.images_after)


def _require_prefixes(compared: ComparedPrompts, recompute: int) -> None:
    """Require that every prompt begins with tokens of the caller's cache."""
    for index, (group, reused) in enumerate(zip(compared.groups, compared.reused_lengths, strict=True)):
        if reused == 0 and len(group.tokens) > recompute:
            raise ValueError(
                f"prompt {index} does not begin with tokens of the cache; pass the whole text, including the cached "
                "part"
            )


def planned_alike(call: CallContext, make: Callable[[], CallPlan]) -> CallPlan:
    """The plan that `make` finds, the same on all processes of the model, given the same prompts.

    It is found again without kept prompts where processes keep different ones: some have dropped one to save memory.
    """
    with call.ranks.together() as offer:
        plan = make()
        offer.compare(lambda: _compared_by_ranks(plan))
    if offer.different is None:
        return plan
    call.state.prefix_store.clear()
    call.report.known_tokens = None
    with call.ranks.together():
        return make()


def _compared_by_ranks(plan: CallPlan) -> dict[str, object]:
    # Processes that divide nodes gather what is stored span by span.
    stored = [[(span.start, span.length) for span in path] for path in dict.fromkeys(plan.nodes.forest.paths)]
    return {"new tokens": plan.nodes.new_tokens, "reused": plan.compared.reused_lengths, "stored": stored}


def weights_hold(call: CallContext, beside: Beside | None = None) -> bool:
    """Whether the model's weights are still those of the prefix store's fingerprint, found for this call.

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


def _warn_of_little(
    call: CallContext, given: SharedContextCache, compared: ComparedPrompts, continued: ComparedPrompts
) -> None:
    """Warn of the first prompt that reuses less than half of what the given cache holds.

    It diverges early, e.g. because it was tokenized separately, or layers with states continue none that is near.
    """
    layout, shortest = call.structure.layout, min(given.forest.context_lengths, default=0)
    held, reused = compared.stored_lengths, continued.reused_lengths
    for index, (group, length, used) in enumerate(zip(compared.groups, held, reused, strict=True)):
        if layout.states and 2 * used < length:
            why = (
                f"states continue where a prompt or a completion in the cache ends, by at least {FEWEST} new tokens"
                if layout.continues_states
                else "its layers' scans do not continue states"
            )
            what = "prompt %d begins with %d tokens of the given cache, of which %d are not computed again: %s"
            logger.warning(what, index, length, used, why)
            break
        if not layout.states and 2 * length < min(shortest, len(group.tokens)):
            what = "prompt %d begins with %d of the %d or more tokens of the given cache; the rest of it is prefilled"
            logger.warning(what, index, length, shortest)
            break
    again = max(length - used for length, used in zip(held, reused, strict=True))
    if again > 1 and not layout.states:
        call.state.log_once(
            f"the first pass asks for logits of all prompt tokens, so {again} tokens that the given cache holds "
            "are computed again; pass logits_to_keep=1 for those of the last token alone"
        )
