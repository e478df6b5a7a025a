"""Whether sharing pays for a call: the tokens that it saves, and the time that it takes."""

from __future__ import annotations

from collections import defaultdict
from weakref import ref

from transformers import PreTrainedModel

from ..._compat import local_part
from ...attention.forest import Forest
from ...attention.launch.dispatch import PLAIN, Choice, Heads, choose, prefill_rate
from ...cache.layout import ModelLayout
from ...cache.stores import Kind
from ...errors import Unsupported
from ..call_context import CallContext
from .call_plan import CallPlan
from .prompt_plan import ComparedPrompts
from .short_calls import Estimate, ShortCalls, saves_too_few, takes_longer, what_helps


def require_gain(call: CallContext, plan: CallPlan, *, loop: str) -> None:
    """Raise `Unsupported` unless sharing pays off, and report it.

    Args:
        call: The call, with the mode set.
        loop: Which loop decodes, of `LOOPS`.
    """
    layout, report, forest = call.structure.layout, call.report, plan.nodes.forest
    unshared = 0 if plan.unshared is None else plan.unshared.total
    again, new_tokens = len(plan.prompts.groups) if plan.last_again else 0, plan.request.new_tokens
    in_nodes = sum(forest.context_lengths)
    # Of unshared tokens kernels read fewer bytes in suffixes than a stock cache has.
    total, saved = in_nodes + unshared, in_nodes - forest.stored_tokens
    if (inputs := plan.cache.inputs) is not None:
        total += forest.rows * inputs.tokens
        saved += (forest.rows - inputs.count) * inputs.tokens
    may_save = total if plan.keeps else saved  # later calls may reuse every token
    # Captured steps are faster than stock's even without sharing.
    divided = call.structure.parallel is not None  # which is to save memory and time of each context
    if not call.must_share and call.mode == "eager" and not unshared and not divided:
        _require_tokens(call, plan, may_save, loop)
        if not plan.keeps and inputs is None and (choice := plain_is_faster(call.model, layout, forest, new_tokens)):
            raise Unsupported(f"stock decoding is predicted to be faster: {choice}")
    why = []
    if saved or not (plan.keeps or plan.reuses):
        why.append(f"{saved} of {total} context tokens are shared by rows")
    if plan.reuses:
        prompt_tokens = sum(len(group.tokens) for group in plan.compared.groups) + again
        why.append(f"{sum(report.known_tokens or ())} of {prompt_tokens} prompt tokens were stored before")
    elif not why:
        why.append("its prompts are kept for later calls")
    if (forgone := _forgone(plan.compared)) is not None:
        why.append(forgone)
    report.path, report.reason, report.computed_again = "shared", "; ".join(why), again
    report.rows, report.prefilled_tokens = forest.rows, len(plan.nodes.new_tokens) + unshared
    report.cache = ref(plan.cache)


def _require_tokens(call: CallContext, plan: CallPlan, may_save: int, loop: str) -> None:
    """Raise `Unsupported` where sharing would save too few tokens, and note what tells such calls."""
    try:
        _check_tokens(call, plan, may_save, loop)
    except Unsupported:  # without a name, which would keep the frames' tensors alive
        options, known = call.options, call.state.short_calls
        if call.inputs is None and (known is None or not known.hold_for(call.model, options)):
            reason = call.report.mode_reason
            call.state.short_calls = ShortCalls.of(call.model, options, call.structure, reason)
        raise


def _check_tokens(call: CallContext, plan: CallPlan, may_save: int, loop: str) -> None:
    options, groups = call.options, plan.compared.groups
    if may_save < (least := options.fewest_saved):
        remedy = _forgone(plan.compared) or what_helps(len(groups), groups[0].count, plan.keeps)
        raise saves_too_few(may_save, least, remedy)
    if plan.keeps or options.min_saved_tokens != "auto":
        return
    estimate, batches = (
        Estimate.of(call.model, call.structure, loop, images=call.inputs is not None),
        plan.nodes.forest.batches,
    )
    if estimate is not None and may_save < (least := estimate.fewest(plan.request.new_tokens, sum(map(len, batches)))):
        raise takes_longer(may_save, least, options)


def _forgone(prompts: ComparedPrompts) -> str | None:
    """Why prompts that begin alike share nothing, and the remedy, if they could."""
    if prompts.forgone is None:
        return None
    saved, least = prompts.forgone
    return (
        f"sharing what prompts begin with would save {saved} tokens, fewer than the {least} for which its further "
        "prefill passes pay; lower min_saved_tokens to share it"
    )


def plain_is_faster(model: PreTrainedModel, layout: ModelLayout, forest: Forest, new_tokens: int) -> Choice | None:
    """The cost model's choice if plain decoding is faster by more than sharing saves in prefill."""
    if model.device.type != "cuda" or model.dtype.itemsize != 2:
        return None
    seconds = defaultdict[str, float](float)
    for store, layers in layout.distinct.items():
        if not store.numbers or store.kind is Kind.LATENT:  # no prediction: stock makes all keys anew in each step
            return None
        heads = Heads(store.query_heads, store.kv_heads, store.head_dim, window=store.window)
        for name, one in choose(forest, new_tokens / 2, heads, model.device).seconds.items():
            seconds[name] += layers * one
    if not seconds:
        return None
    best = min(seconds, key=lambda name: seconds[name])
    choice = Choice(best, {name: time / len(layout.per_token) for name, time in seconds.items()})
    if choice.name != PLAIN:
        return None
    lost = (min(time for name, time in seconds.items() if name != PLAIN) - seconds[PLAIN]) * new_tokens
    parameters = sum(local_part(parameter).numel() for parameter in model.parameters())
    saved = 2 * parameters * (sum(forest.context_lengths) - forest.stored_tokens) / prefill_rate(model.device)
    return choice if lost > saved else None
