"""Plans a call once: what is shared and reused of its prompts, and how what is new is prefilled.

A plan is a value, made of `Prompts` and of what the decoding loop asks for (`Request`). Where it turns out not to
hold, another one is made from a changed request. The processes that compute a model together agree on it in
`planned_alike`, and prefill what it says without asking each other.
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
from ..support import why_not_kept
from .packed import UnsharedPrompts
from .prompt_plan import ComparedPrompts, PromptPlan, StoredPrompts, compare_prompts, continuation_of
from .reading import Prompts


@dataclass(frozen=True)
class Request:
    """Requirements of a decoding loop on its prefill."""

    new_tokens: int  # maximum tokens appended per row
    wanted: int = 1  # last positions of each prompt to return logits for
    recompute: int = 0  # last tokens of each prompt to compute even if stored; see `compare_prompts`
    # Whether the loop may compute last tokens of prompts as its first step, and prompt tokens of one row alone into
    # its suffix.
    ends_in_steps: bool = False
    checks_later: bool = False  # whether the caller can ask `weights_hold` while the device prefills


@dataclass(frozen=True)
class CallPlan:
    """The plan of a call: its nodes, the tokens to prefill, and the cache."""

    prompts: Prompts
    request: Request
    cache: SharedContextCache  # a new cache, or a fork of the given one or of one in the prefix store (`reuses`)
    # The prompts, compared with each other and with the cache, without what `nodes` leave out.
    compared: ComparedPrompts
    nodes: PromptPlan  # the nodes, and the tokens to prefill into them
    reuses: bool
    keeps: bool  # whether the prompts are kept for later calls
    checks_later: bool  # whether the caller must ask `weights_hold`, since the prefix store was looked into
    unshared: UnsharedPrompts | None = None  # prompt tokens to prefill into suffixes, if any
    last_again: bool = False  # whether each prompt's last token is computed as the first decode step


def planned_alike(call: CallContext, make: Callable[[], CallPlan]) -> CallPlan:
    """The plan that `make` finds, the same on all processes of the model, given the same prompts.

    It is found again without kept prompts where processes keep different ones: some have dropped one to save memory.
    """
    with call.together() as offer:
        plan = make()
        offer.compare(lambda: _agreed(plan))
    if offer.different is None:
        return plan
    call.state.prefix_store.clear()
    call.report.known_tokens = None
    with call.together():
        return make()


def _agreed(plan: CallPlan) -> dict[str, object]:
    # Processes that divide nodes gather what is stored span by span.
    stored = [[(span.start, span.length) for span in path] for path in dict.fromkeys(plan.nodes.forest.paths)]
    return {"new tokens": plan.nodes.new_tokens, "reused": plan.compared.reused_lengths, "stored": stored}


def plan_call(call: CallContext, prompts: Prompts, request: Request) -> CallPlan:
    """The plan of a call with these prompts; raises ValueError if the caller's cache does not fit."""
    # Several processes would have to agree on what they find later.
    later = request.checks_later and call.alone and call.given is None
    cache, compared, reuses = _find_shared(call, prompts, request, later)
    if prompts.inputs is not None:
        cache.inputs = prompts.inputs.inputs
    keeps = keeps_prompts(call) and prompts.may_reuse and prompts.prefixes.of_text
    unshared, again = None, False
    if request.ends_in_steps and not prompts.by_rows and not continuation_of(call.structure.layout).scans:
        if reuses:
            compared, again = _without_last(call, cache, compared, request)
        else:
            unshared = unshared_prompts(call, compared)
    if again:
        cache.state.max_suffix = request.new_tokens + 1
    elif unshared is not None:
        compared = compared.without_last(compared.unshared_lengths)
    return CallPlan(prompts, request, cache, compared, compared.plan(), reuses, keeps, later, unshared, again)


def _without_last(
    call: CallContext, cache: SharedContextCache, compared: ComparedPrompts, request: Request
) -> tuple[ComparedPrompts, bool]:
    """The prompts, without their last tokens where these are computed as the first decode step, and whether they are:
    if the cache holds a whole prompt, or all but its last token, unless that step would be of too many rows."""
    groups = compared.groups
    whole = any(len(group.tokens) == held for group, held in zip(groups, compared.stored_lengths, strict=True))
    if not whole and compared.new_length > len(groups):
        return compared, False
    rows = sum(group.count for group in groups)
    at_once = call.options.max_rows or rows
    if not call.returns_cache and call.alone:  # several would have to agree on it
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
    later calls are to reuse prompts or routers are recorded, where kernels do not read suffixes, and where suffixes,
    all of the length of the longest, take no fewer bytes; or divided between processes. Of a returned cache the next
    call makes nodes.
    """
    layout, layers = call.structure.layout, list(call.structure.layout.own.values())
    nodes = call.options.reuse_prefix or call.recorder is not None or call.shares_anyway
    if nodes or not layers or not layout.attends_by_itself:
        return None
    lengths = zip(compared.groups, compared.unshared_lengths, strict=True)
    tokens = [group.tokens[len(group.tokens) - length :] for group, length in lengths for _ in range(group.count)]
    unshared, rows, backend = UnsharedPrompts(tuple(tokens)), len(tokens), call.options.backend
    most, total = rows * unshared.longest, unshared.total
    fit = all(
        not layer.no_captured_steps and layer.suffixes_take_prompts(rows, most, total, backend) for layer in layers
    )
    return unshared if total and fit else None


def _find_shared(
    call: CallContext, prompts: Prompts, request: Request, checks_later: bool
) -> tuple[SharedContextCache, ComparedPrompts, bool]:
    """The cache to prefill into, the prompts compared with each other and with it, and whether it is a fork: of the
    given one, or of one in the prefix store."""
    given, text = call.given, prompts.prefixes.of_text
    if call.options.reuse_prefix and (why := why_not_kept(call.structure.layout)) is not None:
        call.state.log_once(f"reuse_prefix is not used: {why}")
    if given is not None:
        _check_cache(call, given)
    base = given if given is not None else _kept_cache(call, prompts, checks_later)
    cache, compared = _compared(call, prompts, request, base)
    if given is not None:
        _require_prefixes(compared, request.recompute)
        if not prompts.may_reuse:
            base = given = None
            cache, compared = _compared(call, prompts, request, None)
    common = continuation_of(call.structure.layout).reusing(
        compared, cache, call.options.worth_passes, text=text, alike=prompts.alike or not text
    )
    if given is not None:
        _warn_of_little(call, given, compared, common)
    common = prompts.prefixes.reusing(common)
    call.report.known_tokens = None if base is None else common.reused_lengths
    cache.gaps = any(group.gaps for group in prompts.groups)
    return cache, common, base is not None


def _kept_cache(call: CallContext, prompts: Prompts, checks_later: bool) -> SharedContextCache | None:
    """The prefix store's cache with most of the prompts' tokens; without the store, repeated prompts are noted."""
    if not (prompts.may_reuse and prompts.prefixes.of_text):
        return None
    if keeps_prompts(call):
        store, least = call.state.prefix_store, call.options.min_shared_tokens
        base, call.then = store.find(call.model, call.structure, prompts.groups, least=least)
        return base if checks_later or weights_hold(call) else None
    if not call.structure.layout.beyond_tokens:
        call.state.note_prompt(call.model, prompts.groups[0].tokens)
    return None


def _compared(
    call: CallContext, prompts: Prompts, request: Request, base: SharedContextCache | None
) -> tuple[SharedContextCache, ComparedPrompts]:
    """A fork of a cache, or a new one, and the prompts compared with it; not what prompts by rows do not share."""
    cache, stops = call.fork(base, request.new_tokens), request.recompute
    least = call.options.min_shared_tokens
    compared = compare_prompts(prompts.groups, StoredPrompts(cache), min_shared_tokens=least, recompute=stops)
    if prompts.by_rows and not prompts.alike and prompts.prefixes.of_text:
        compared = compared.apart()
    return cache, prompts.prefixes.sharing(compared)


def _require_prefixes(compared: ComparedPrompts, recompute: int) -> None:
    for index, (group, reused) in enumerate(zip(compared.groups, compared.reused_lengths, strict=True)):
        if reused == 0 and len(group.tokens) > recompute:
            raise ValueError(
                f"prompt {index} does not begin with tokens of the cache; pass the whole text, including the cached "
                "part, or leave the cache out"
            )


def weights_hold(call: CallContext, beside: Beside | None = None) -> bool:
    """Whether the model's weights are still those of the prefix store's fingerprint, found for this call.

    Where they are not, the store is emptied. It takes launches for each parameter: with `beside`, while the device
    computes what a call is to use if they hold.
    """
    if call.then is None:
        return True
    with nullcontext() if beside is None else beside.here():
        if call.then.fingerprint.sampled_difference(call.structure.walk) is None:
            return True
    call.state.prefix_store.clear()
    call.then = None
    return False


def keeps_prompts(call: CallContext) -> bool:
    return bool(call.options.reuse_prefix) and why_not_kept(call.structure.layout) is None


def _check_cache(call: CallContext, cache: SharedContextCache) -> None:
    """Reject a cache of another model or of other processes."""
    cache.meet(call.structure.layout)
    if not (division := cache.state.division).is_as(call.structure.division):
        raise ValueError(
            f"the cache was made for {division.whose} (sequence_parallel), and this call divides contexts otherwise; "
            "make it again with hf_fastdecode.prefill(model, ...)"
        )
    if cache.fingerprint is not None and (other := cache.fingerprint.difference(call.model)):
        raise ValueError(
            f"the cache was made with other {other}, of another model or before these changed; make it again with "
            "hf_fastdecode.prefill(model, ...)"
        )


def _warn_of_little(
    call: CallContext, given: SharedContextCache, compared: ComparedPrompts, continued: ComparedPrompts
) -> None:
    """Warn of the first prompt that reuses less than half of what the given cache holds."""
    continuation = continuation_of(call.structure.layout)
    shortest = min(given.forest.context_lengths, default=0)
    held, reused = compared.stored_lengths, continued.reused_lengths
    for index, (group, length, used) in enumerate(zip(compared.groups, held, reused, strict=True)):
        if (why := continuation.why_little(shortest, len(group.tokens), length, used)) is not None:
            logger.warning("prompt %d begins with %s", index, why)
            break
    again = max(length - used for length, used in zip(held, reused, strict=True))
    if again > 1 and not continuation.scans:
        call.state.log_once(
            f"the first pass asks for logits of all prompt tokens, so {again} tokens that the given cache holds "
            "are computed again; pass logits_to_keep=1 for those of the last token alone"
        )
