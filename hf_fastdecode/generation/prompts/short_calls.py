"""What sharing costs and saves a call on the CPU, and what is told by the shapes of a call's arguments alone.

On the CPU, each step of ours makes two or more attention calls a layer and merges them, where stock makes one; that
takes about as long for a tiny model as for a large one. Sharing saves the prefill of the shared tokens, and in each
step the reads and copies of their keys and values. `python -m tools.host_costs` measures the constants, and writes
their table in docs/limits.md.

Checks of a model, of a call and of its prompts take one to two milliseconds, as long as a step of a small model. Most
calls that run stock for saving too little can be told from the number and length of their prompts, in some 20 µs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from ...cache.layout import ModelLayout
from ...cache.stores import Kind
from ...errors import Unsupported
from ...parallel.ranks import in_several_processes
from ..options import FEWEST_SAVED, Options
from ..structure import Structure


@dataclass(frozen=True)
class HostCosts:
    """Seconds that sharing costs a call of one kind.

    Attributes:
        call: Fixed, per call.
        layer: Per step and decoder layer.
        step: Per step, whatever its layers.
    """

    call: float
    layer: float
    step: float = 0.0

    def __add__(self, other: HostCosts) -> HostCosts:
        """Costs of what has both."""
        return HostCosts(self.call + other.call, self.layer + other.layer, self.step + other.step)

    def of_call(self, steps: int, layers: int, batches: int = 1) -> float:
        """Seconds of a call with so many steps, whose forest has so many batches of alike nodes."""
        return self.call + steps * (self.step + layers * (self.layer + (max(1, batches) - 1) * BATCH))


COSTS: Final = {
    "keys and values": HostCosts(call=3.1e-3, layer=350e-6),
    "images": HostCosts(call=9.8e-3, layer=400e-6),
    "states": HostCosts(call=1.0e-3, layer=350e-6),
    "latents": HostCosts(call=2.6e-3, layer=560e-6),
    "an encoder": HostCosts(call=4.5e-3, layer=1080e-6),
}
"""Costs by what a call has beside text, or by what layers store."""

LOOPS: Final = {
    "this package's": HostCosts(call=0.0, layer=0.0),
    "transformers'": HostCosts(call=0.9e-3, layer=190e-6),
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
    """Seconds that one saved token saves: once in prefill, and in each step."""

    prefill: float
    step: float

    @classmethod
    def of(cls, model: PreTrainedModel, structure: Structure) -> Savings:
        """Those of a prompt's tokens in the decoder, or if there is an encoder, of its output's in cross-attention."""
        layout, itemsize = structure.layout, model.dtype.itemsize
        stores = list((layout.cross or layout.per_token).values())
        numbers = sum(store.stock_numbers or store.numbers for store in stores)
        if layout.cross:  # rows share an input's keys and values, and the products that make these
            weights = numbers * int(structure.text_config.hidden_size)
        else:
            weights = structure.kept("weights of a token", lambda: _weights_of_a_token(model, structure))
        threads = torch.get_num_threads()
        prefill = 2 * weights / (FLOPS * threads) + len(layout.layers) * LAYER_OF_A_TOKEN
        return cls(prefill, numbers * itemsize / (BANDWIDTH * threads))

    def fewest(self, seconds: float, steps: int) -> int:
        """Tokens that save so many seconds in a call of so many steps."""
        return math.ceil(seconds / (self.prefill + steps * self.step))


def kind_of(layout: ModelLayout, *, images: bool) -> str:
    """The entry of `COSTS` of calls of a model, given images or not."""
    if layout.cross:
        return "an encoder"
    if any(store.kind is Kind.LATENT for store in layout.per_token.values()):
        return "latents"
    if layout.states:
        return "states"
    return "images" if images else "keys and values"


@dataclass(frozen=True)
class Estimate:
    """What sharing costs and saves a model's calls of one kind on the CPU, which has so many layers."""

    costs: HostCosts
    layers: int
    savings: Savings

    @classmethod
    def of(cls, model: PreTrainedModel, structure: Structure, loop: str, *, images: bool) -> Estimate | None:
        """That of a call in a loop of `LOOPS`, given images or not; None on other devices than the CPU."""
        if model.device.type != "cpu":
            return None
        layout = structure.layout
        costs = COSTS[kind_of(layout, images=images)] + LOOPS[loop]
        return cls(costs, len(layout.layers), Savings.of(model, structure))

    def fewest(self, new_tokens: int, batches: int = 1) -> int:
        """Least tokens that sharing must save to take no longer than stock, at least `FEWEST_SAVED`.

        Args:
            new_tokens: Most new tokens of a row.
            batches: Batches of alike nodes in the forest.
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
    return sum(one.numel() * chosen // len(one) if chosen and one.dim() == 3 else one.numel() for one in weights)


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


def saves_too_few(saved: object, least: int, remedy: str) -> Unsupported:
    """Sharing would save fewer tokens than `Options.fewest_saved`."""
    return Unsupported(f"sharing would save {saved} tokens, fewer than {least} (min_saved_tokens)", remedy)


def takes_longer(saved: object, least: int, options: Options) -> Unsupported:
    """Sharing would save fewer tokens than pay for its time on the CPU."""
    return Unsupported(
        f"sharing would save {saved} tokens, and on the CPU a call like this gains from about {least} on",
        f"lower min_saved_tokens to share all the same: min_saved_tokens={options.fewest_saved}",
    )


def what_helps(prompts: int, samples: int, reuse_prefix: bool | int) -> str:
    """What would make calls of so many distinct prompts, the first with so many samples, save more."""
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
    """A call of `generate` that is given a text alone, by the shapes of its arguments.

    Attributes:
        ids: ``[prompts, width]``.
        samples: Most rows of a prompt.
        samples_differ: Whether the call and its configs give several such numbers.
        new_tokens: Most new tokens of a row; None if another setting bounds them.
        padding: Token that stands for padding where there is no mask.
        loop: Which loop of `LOOPS` decodes, as far as the arguments tell; the one of least cost otherwise.
    """

    ids: Tensor
    mask: Tensor | None
    samples: int
    samples_differ: bool
    new_tokens: int | None
    padding: object
    loop: str

    @classmethod
    def among(
        cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], defaults: GenerationConfig | None
    ) -> TextCall | None:
        """The call with these arguments; None if they may give more than a text, or are not what `generate` takes.

        Args:
            defaults: The model's own generation config.
        """
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
        loop = "transformers'" if beams[:1] > [1] or kwargs.get("output_hidden_states") else "this package's"
        return cls(ids, mask, most, len({*counts}) > 1, new_tokens, padding[0] if padding else None, loop)

    @cached_property
    def whole(self) -> bool:
        """Whether the prompts have no padding."""
        if self.mask is not None:
            return bool(self.mask.all())
        return self.padding is None or (type(self.padding) is int and not bool((self.ids == self.padding).any()))

    @property
    def rows(self) -> int:
        """Most rows."""
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
        """``[length]``: the tokens of the first prompt."""
        return self.ids[0] if self.mask is None else self.ids[0][self.mask[0].bool()]


@dataclass(frozen=True)
class ShortCalls:
    """What tells short calls of a model, known from one that passed all checks but for saving too little.

    Such a call runs stock, which is right for any model: of what may have changed since, only that matters which makes
    sharing worth more, and that is asked for.

    Attributes:
        options: Those that it holds for.
        kind: The model's class.
        dtype: Of its parameters.
        threads: Threads of PyTorch.
        has_encoder: Whether prompts are an encoder's.
        advises: Whether prompts that begin like those of earlier calls are noticed.
        estimates: By loop, on the CPU.
        mode_reason: Why steps would run eagerly.
    """

    options: Options
    kind: type[PreTrainedModel]
    dtype: torch.dtype
    threads: int
    has_encoder: bool
    advises: bool
    estimates: Mapping[str, Estimate]
    mode_reason: str

    @classmethod
    def of(cls, model: PreTrainedModel, options: Options, structure: Structure, mode_reason: str) -> ShortCalls | None:
        """What tells a model's short calls; None where others of it may be captured, divided or slim."""
        layout = structure.layout
        several = in_several_processes() or structure.parallel is not None
        if layout.own or several or options.unmet_by_stock:
            return None
        estimates = {loop: one for loop in LOOPS if (one := Estimate.of(model, structure, loop, images=False))}
        if not estimates:
            return None
        return cls(
            options=options,
            kind=type(model),
            dtype=model.dtype,
            threads=torch.get_num_threads(),
            has_encoder=bool(layout.cross),
            advises=not (options.reuse_prefix or layout.prefills_by_rows),
            estimates=estimates,
            mode_reason=mode_reason,
        )

    def hold_for(self, model: PreTrainedModel, options: Options) -> bool:
        """Whether they are told by `refusal` for a model, which is as it was as far as a step's time depends on it."""
        if options is not self.options or type(model) is not self.kind or in_several_processes():
            return False
        if "prepare_inputs_for_generation" in vars(model) or self.kind.generate is not GenerationMixin.generate:
            return False  # which may add tokens: PEFT's virtual ones
        first = next(model.parameters())
        of_model = first.device.type == "cpu" and first.dtype is self.dtype
        return of_model and torch.get_num_threads() == self.threads

    def refusal(self, call: TextCall) -> Unsupported | None:
        """Why a call runs stock; None where it may share, or more must be asked to tell."""
        options, reuses, saved = self.options, self.options.reuse_prefix, call.shared
        if self.has_encoder:  # a token of the decoder beside
            saved += call.rows - 1
        if reuses:  # later calls may reuse every token
            saved = call.rows * call.ids.shape[1]
        told = f"at most {saved}" if call.at_most else saved
        if saved < (least := options.fewest_saved):
            return saves_too_few(told, least, what_helps(call.prompts, call.rows // call.prompts, reuses))
        if reuses or call.new_tokens is None or options.min_saved_tokens != "auto":
            return None
        least = self.estimates[call.loop].fewest(call.new_tokens)
        return takes_longer(told, least, options) if saved < least else None


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
