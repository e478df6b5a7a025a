"""Whether sharing pays for a call: the tokens that it saves, and on the CPU the time that it takes.

On the CPU, each step of ours makes two or more attention calls a layer and merges them, where stock makes one; that
takes about as long for a tiny model as for a large one. Sharing saves the prefill of the shared tokens, and in each
step the reads and copies of their keys and values. `python -m tools.host_costs` measures the constants, and writes
their table in docs/limits.md.

Checks of a model, of a call and of its prompts take one to two milliseconds, as long as a step of a small model. Most
calls that run stock for saving too little can be told from the number and length of their prompts (`ShortCalls`), in
some 20 µs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeGuard
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from ..._compat import local_part
from ...errors import Unsupported
from ..call_context import CallContext
from ..model_state import ModelState
from ..options import FEWEST_SAVED, Options
from ..report import CallReport
from ..structure import Structure
from .call_plan import CallPlan
from .prompt_plan import ComparedPrompts


@dataclass(frozen=True)
class HostCosts:
    """Seconds that sharing costs a call of one kind: once, per step and decoder layer, and per step beside these."""

    call: float
    layer: float
    step: float = 0.0

    def __add__(self, other: HostCosts) -> HostCosts:
        return HostCosts(self.call + other.call, self.layer + other.layer, self.step + other.step)

    def of_call(self, steps: int, layers: int, batches: int = 1) -> float:
        return self.call + steps * (self.step + layers * (self.layer + (max(1, batches) - 1) * BATCH))


COSTS: Final = {
    "keys and values": HostCosts(call=3.1e-3, layer=350e-6),
    "images": HostCosts(call=9.8e-3, layer=400e-6),
    "states": HostCosts(call=1.0e-3, layer=350e-6),
    "latents": HostCosts(call=2.6e-3, layer=560e-6),
    "an encoder": HostCosts(call=4.5e-3, layer=1080e-6),
}
"""Costs by what a call has beside text, or by what layers store."""

_ENTRIES: Final = {"cross": "an encoder", "latent": "latents", "state": "states"}
"""Entries of `COSTS` by the kind of a store that some layer has; the first counts."""

_OURS, _STOCKS = "this package's", "transformers'"

LOOPS: Final = {
    _OURS: HostCosts(call=0.0, layer=0.0),
    _STOCKS: HostCosts(call=0.9e-3, layer=190e-6),
    "a user's": HostCosts(call=1.1e-3, layer=120e-6, step=620e-6),
}
"""Further costs by the loop that decodes. In a user's each pass asks whether the model has changed.

That transformers' beam search copies all keys and values to reorder rows, but not shared ones, is not counted.
"""

BATCH: Final = 70e-6
"""Further seconds for each step and layer of a further batch of nodes, which differ in length or in spacing."""

FLOPS: Final = 6e10
"""Floating-point operations per second and thread of stock's prefill."""

LAYER_OF_A_TOKEN: Final = 1.8e-6
"""Seconds of stock's prefill for each token and layer beside matrix products."""

BANDWIDTH: Final = 2e9
"""Bytes of keys and values per second and thread that stock's step copies and reads."""


@dataclass(frozen=True)
class Savings:
    """Seconds that one saved token saves, in prefill and in each step."""

    prefill: float
    step: float

    @classmethod
    def of(cls, model: PreTrainedModel, structure: Structure) -> Savings:
        """Savings of prompt tokens in the decoder, or with an encoder, of its output's tokens in cross-attention."""
        layout, itemsize = structure.layout, model.dtype.itemsize
        stores = list(layout.shared.values())
        numbers = sum(store.stock_numbers or store.numbers for store in stores)
        if layout.cross:  # rows share an input's keys and values, and the products that make these
            weights = numbers * int(structure.text_config.hidden_size)
        else:
            weights = structure.kept("weights of a token", lambda: _weights_of_a_token(model, structure))
        threads = torch.get_num_threads()
        prefill = 2 * weights / (FLOPS * threads) + len(layout.layers) * LAYER_OF_A_TOKEN
        return cls(prefill, numbers * itemsize / (BANDWIDTH * threads))

    def fewest(self, seconds: float, steps: int) -> int:
        """Tokens that pay for so many seconds in a call of so many steps."""
        return math.ceil(seconds / (self.prefill + steps * self.step))


@dataclass(frozen=True)
class Estimate:
    """Costs and savings of sharing for calls of one kind on the CPU, of a model with so many layers."""

    costs: HostCosts
    layers: int
    savings: Savings

    @classmethod
    def of(cls, call: CallContext, loop: str) -> Estimate | None:
        """The estimate of a call in a loop of `LOOPS`; None on other devices than the CPU."""
        if call.model.device.type != "cpu":
            return None
        layout = call.structure.layout
        kinds = {store.kind for _, store in layout}
        of_tokens = "keys and values" if call.inputs is None else "images"
        entry = next((entry for kind, entry in _ENTRIES.items() if kind in kinds), of_tokens)
        return cls(COSTS[entry] + LOOPS[loop], len(layout.layers), Savings.of(call.model, call.structure))

    def fewest(self, new_tokens: int, batches: int = 1) -> int:
        """Least tokens that sharing must save to take no longer than stock, at least `FEWEST_SAVED`.

        With at most so many new tokens of a row, and so many batches of alike nodes in the forest.
        """
        steps = max(0, new_tokens - 1)
        return max(FEWEST_SAVED, self.savings.fewest(self.costs.of_call(steps, self.layers, batches), steps))


def _weights_of_a_token(model: PreTrainedModel, structure: Structure) -> int:
    """Weights that a token of a prompt is multiplied by: all but those of embeddings, and of experts not chosen."""
    ends = [module for module in structure.walk.modules if isinstance(module, nn.Embedding)]
    left_out = {id(getattr(one, "weight", None)) for one in (*ends, model.get_output_embeddings())}
    weights = [weight for weight in structure.walk.parameters if weight.dim() > 1 and id(weight) not in left_out]
    chosen = getattr(structure.text_config, "num_experts_per_tok", None)
    # Experts of a layer are one parameter of three dimensions.
    return sum(_elements(one) * chosen // len(one) if chosen and one.dim() == 3 else _elements(one) for one in weights)


def _elements(weight: Tensor) -> int:
    """Elements of a weight in this process, also of one whose elements are packed (bitsandbytes, 4 bits)."""
    state = getattr(weight, "quant_state", None)
    return local_part(weight).numel() if state is None else math.prod(state.shape)


_OF_TOKENS: Final = frozenset({"inputs", "input_ids", "attention_mask", "position_ids"})
"""Arguments of a text: no others may hold a value per token."""

_OF_LOOPS: Final = frozenset(
    {
        *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer"),
        *("assistant_model", "assistant_tokenizer", "tokenizer", "eos_token_id"),
    }
)
_SCALARS: Final = (bool, int, float, str)
_SETTINGS: Final = ("num_return_sequences", "num_beams", "max_new_tokens", "pad_token_id")
"""Settings that tell how long a call is, and which token is padding."""
_OTHER_DECODING: Final = ("custom_generate", "cache_implementation")
"""Arguments that may hand a call to code which the estimate does not know: a user's loop may repeat prompts itself."""


def _saves_too_few(saved: object, least: int, remedy: str) -> Unsupported:
    return Unsupported(f"sharing would save {saved} tokens, fewer than {least} (min_saved_tokens)", remedy)


def _takes_longer(saved: object, least: int, options: Options) -> Unsupported:
    return Unsupported(
        f"sharing would save {saved} tokens, and on the CPU a call like this gains from about {least} on",
        f"lower min_saved_tokens to share all the same: min_saved_tokens={options.fewest_saved}",
    )


def _what_helps(prompts: int, samples: int, reuse_prefix: bool | int) -> str:
    """Advice for calls of so many distinct prompts, the first with so many samples, that save too little."""
    if reuse_prefix:
        return "prompts this short are not kept for later calls; lower min_saved_tokens to keep them"
    if prompts > 1:
        return "rows share what neighbours begin with: put prompts that begin alike next to each other"
    if samples > 1:
        return "draw more samples, or of longer prompts"
    return (
        "draw several samples in a call (num_return_sequences), or enable(model, reuse_prefix=True) for prompts that "
        "begin alike and arrive one at a time"
    )


@dataclass
class TextCall:
    """A call of `generate` that is given a text alone, by the shapes of its arguments."""

    ids: Tensor  # [prompts, width]
    mask: Tensor | None
    # Most rows of a prompt, of which the call and its configs may give several numbers (`samples_differ`).
    samples: int
    samples_differ: bool
    new_tokens: int | None  # most new tokens of a row; None if another setting bounds them
    padding: object  # token that stands for padding where there is no mask
    loop: str  # which loop of `LOOPS` decodes, as far as the arguments tell; the one of least cost otherwise

    @classmethod
    def among(
        cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], defaults: GenerationConfig | None
    ) -> TextCall | None:
        """The call with these arguments, and the model's generation config for others; None if they may give more
        than a text, or are not what `generate` takes."""
        mask = kwargs.get("attention_mask")
        ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        if len(args) > 1 or not _are_of_text(kwargs) or not _are_prompts(ids, mask):
            return None
        sources = [kwargs, *[vars(one) for one in (kwargs.get("generation_config"), defaults) if one is not None]]
        given = {name: [one[name] for one in sources if one.get(name) is not None] for name in _SETTINGS}
        samples, beams, lengths, padding = given.values()
        if not {*map(type, samples), *map(type, beams), *map(type, lengths)} <= {int}:
            return None
        counts = [*samples, *beams] or [1]
        most, new_tokens = max(counts), lengths[0] if lengths else None
        loop = _STOCKS if beams[:1] > [1] or kwargs.get("output_hidden_states") else _OURS
        return cls(ids, mask, most, len({*counts}) > 1, new_tokens, padding[0] if padding else None, loop)

    @cached_property
    def whole(self) -> bool:
        """Whether the prompts have no padding."""
        if self.mask is not None:
            return bool(self.mask.all())
        return self.padding is None or (type(self.padding) is int and not bool((self.ids == self.padding).any()))

    @property
    def rows(self) -> int:
        return len(self.ids) * self.samples

    @property
    def at_most(self) -> bool:
        """Whether rows may share less than `shared`: prompts that differ, or have padding."""
        return len(self.ids) > 1 or self.samples_differ or (self.samples > 1 and not self.whole)

    @property
    def prompts(self) -> int:
        """Number of prompts that differ from the one before."""
        return len(self.ids) if len(self.ids) < 2 else 1 + int((self.ids[1:] != self.ids[:-1]).any(1).sum())

    @property
    def shared(self) -> int:
        """Most tokens that rows share with a row before."""
        prompts, width = self.ids.shape
        if prompts > 1 and self.whole:
            of_others = int((self.ids[1:] == self.ids[:-1]).cumprod(1).sum())
        else:  # padding may hide what prompts begin with
            of_others = (prompts - 1) * width
        return (self.rows - prompts) * width + of_others

    @property
    def first_prompt(self) -> Tensor:
        return self.ids[0] if self.mask is None else self.ids[0][self.mask[0].bool()]


@dataclass(frozen=True)
class ShortCalls:
    """A test for short calls of a model, made from one that passed all checks but for saving too little.

    Such a call runs stock, which is right for any model: of what may have changed since, only that matters which makes
    sharing worth more, and that is asked for.
    """

    options: Options
    conditions: tuple[Any, ...]  # what a step's time depends on, and what may add tokens; see `_conditions`
    has_encoder: bool  # whether prompts are an encoder's
    advises: bool  # whether prompts that begin like those of earlier calls are noticed
    estimates: Mapping[str, Estimate]  # by the loops that `TextCall` tells, on the CPU
    mode_reason: str

    @classmethod
    def of(cls, call: CallContext) -> ShortCalls | None:
        """The test, from such a call; None where other calls may be captured, divided or slim."""
        options, layout = call.options, call.structure.layout
        if layout.own or options.unmet_by_stock:
            return None
        estimates = {loop: one for loop in (_OURS, _STOCKS) if (one := Estimate.of(call, loop))}
        if not estimates:
            return None
        advises = not (options.reuse_prefix or layout.beyond_tokens)
        conditions, reason = _conditions(call.model), call.report.mode_reason
        return cls(options, conditions, bool(layout.cross), advises, estimates, reason)

    def hold_for(self, model: PreTrainedModel, state: ModelState) -> bool:
        """Whether they are told by `refusal` for a model, which is as it was as far as a step's time depends on it."""
        return state.options is self.options and _conditions(model) == self.conditions

    def refusal(self, call: TextCall) -> Unsupported | None:
        """Why a call runs stock; None where it may share, or more must be asked to tell."""
        options, reuses, saved = self.options, self.options.reuse_prefix, call.shared
        if self.has_encoder:  # a token of the decoder beside
            saved += call.rows - 1
        if reuses:  # later calls may reuse every token
            saved = call.rows * call.ids.shape[1]
        told = f"at most {saved}" if call.at_most else saved
        if saved < (least := options.fewest_saved):
            return _saves_too_few(told, least, _what_helps(call.prompts, call.rows // call.prompts, reuses))
        if reuses or call.new_tokens is None or options.min_saved_tokens != "auto":
            return None
        least = self.estimates[call.loop].fewest(call.new_tokens)
        return _takes_longer(told, least, options) if saved < least else None


def _conditions(model: PreTrainedModel) -> tuple[Any, ...]:
    """Conditions of the test for a model; methods of its own may add tokens, such as PEFT's virtual ones."""
    kind, first = type(model), next(model.parameters())
    adds = "prepare_inputs_for_generation" in vars(model) or kind.generate is not GenerationMixin.generate
    return kind, first.device.type, first.dtype, torch.get_num_threads(), adds


def told_by_shapes(
    state: ModelState, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallReport | None:
    """The report of a call that runs stock, if the shapes of its arguments tell; takes note of its prompt."""
    short, options = state.short_calls, state.options
    if not isinstance(short, ShortCalls) or state.disable_pending or state.methods.wraps("generate"):
        return None
    if options.log_probs != "auto":  # which our loop has added
        return None
    call = TextCall.among(args, kwargs, model.generation_config)
    if call is None or not short.hold_for(model, state) or (refusal := short.refusal(call)) is None:
        return None
    if short.advises and call.ids.shape[1] >= options.fewest_saved:
        state.note_prompt(model, call.first_prompt)
    return CallReport(reason=str(refusal), mode_reason=short.mode_reason)


def _are_prompts(ids: object, mask: object) -> TypeGuard[Tensor]:
    """Whether they are tokens of some prompts on the CPU, and a mask of their shape or none."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
        return False
    return ids.device.type == "cpu" and (mask is None or (isinstance(mask, Tensor) and mask.shape == ids.shape))


def _are_of_text(kwargs: Mapping[str, Any]) -> bool:
    """Whether arguments give nothing but a text and how to decode it, so that its shape bounds what is saved."""
    for name, value in kwargs.items():
        if value is None or name in _OF_TOKENS or name in _OF_LOOPS:
            continue
        if not isinstance(value, _SCALARS) or name in _OTHER_DECODING:
            return False
    return isinstance(kwargs.get("generation_config"), GenerationConfig | None)


def require_gain(call: CallContext, plan: CallPlan, *, loop: str) -> None:
    """Raise `Unsupported` unless sharing pays for a call, whose mode is set, in a loop of `LOOPS`; report it."""
    report, forest = call.report, plan.nodes.forest
    unshared = 0 if plan.unshared is None else plan.unshared.total
    again = len(plan.prompts.groups) if plan.last_again else 0
    in_nodes = sum(forest.context_lengths)
    # Of unshared tokens kernels read fewer bytes in suffixes than a stock cache has.
    total, saved = in_nodes + unshared, in_nodes - forest.stored_tokens
    if (inputs := plan.cache.inputs) is not None:
        total += forest.rows * inputs.tokens
        saved += (forest.rows - inputs.count) * inputs.tokens
    may_save = total if plan.keeps else saved  # later calls may reuse every token
    # Captured steps are faster than stock's even without sharing.
    if not call.shares_anyway and call.mode == "eager" and not unshared:
        _require_tokens(call, plan, may_save, loop)
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
        known = call.state.short_calls
        if call.inputs is None and not (isinstance(known, ShortCalls) and known.hold_for(call.model, call.state)):
            call.state.short_calls = ShortCalls.of(call)
        raise


def _check_tokens(call: CallContext, plan: CallPlan, may_save: int, loop: str) -> None:
    options, groups = call.options, plan.compared.groups
    if may_save < (least := options.fewest_saved):
        remedy = _forgone(plan.compared) or _what_helps(len(groups), groups[0].count, plan.keeps)
        raise _saves_too_few(may_save, least, remedy)
    if plan.keeps or options.min_saved_tokens != "auto":
        return
    estimate, batches = Estimate.of(call, loop), sum(map(len, plan.nodes.forest.batches))
    if estimate is not None and may_save < (least := estimate.fewest(plan.request.new_tokens, batches)):
        raise _takes_longer(may_save, least, options)


def _forgone(prompts: ComparedPrompts) -> str | None:
    """Why prompts that begin alike share nothing, and the remedy, if they could."""
    if prompts.forgone is None:
        return None
    saved, least = prompts.forgone
    return (
        f"sharing what prompts begin with would save {saved} tokens, fewer than the {least} for which its further "
        "prefill passes pay; lower min_saved_tokens to share it"
    )
