"""Forward passes over a shared-context cache, names and positions of what `forward` takes, and streams beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from inspect import signature
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.generation import GenerationMixin

from .._compat import CACHE, setting, uncompiled_call
from ..attention.interface import at_positions
from ..attention.overrides import own_code_of
from ..cache.captured import CapturedCache, CapturedInputs
from ..cache.layers.cross import ENCODER_OUTPUTS
from ..cache.shared import SharedContextCache
from ..kernels.device import stream_for

POSITIONS_OF_MASKS: Final = frozenset({"opt"})
"""Model types that count positions, where they are given none, by what the mask shows."""
POSITIONS_IGNORED: Final = frozenset({"jamba", "nemotron_h"})
"""Model types whose attention does not read the positions that their code takes."""


class PromptNames(NamedTuple):
    """Names of arguments that say what the decoder, or the whole model if it has no encoder, is given."""

    ids: str = "input_ids"
    embeddings: str = "inputs_embeds"
    mask: str = "attention_mask"
    positions: str = "position_ids"

    def named(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that have the names of a model without an encoder, renamed."""
        names = dict(zip(PromptNames(), self, strict=True))
        return {names.get(name, name): value for name, value in arguments.items()}


_OF_DECODERS: Final = PromptNames(*(f"decoder_{name}" for name in PromptNames()))


def arguments_of_decoders(model: PreTrainedModel) -> set[str]:
    """Names of arguments that the decoder of a model with an encoder has; without one, none."""
    return {*_OF_DECODERS, ENCODER_OUTPUTS} if model.config.is_encoder_decoder else set()


def prompt_names(model: PreTrainedModel) -> PromptNames:
    """The names that a model's `forward`, and `generate`, have for its prompts."""
    return _OF_DECODERS if model.config.is_encoder_decoder else PromptNames()


class Positions(NamedTuple):
    """Positions of a batch of prompts.

    Attributes:
        ids: ``[rows or 1, width]``, or ``[planes, rows or 1, width]`` where planes differ; None for those of the mask.
        planes: Number of planes that the model takes; 0 for positions without planes.
    """

    ids: Tensor | None
    planes: int = 0

    @property
    def shape(self) -> list[int]:
        """As the model takes them."""
        reduced_to_one = self.planes and not self.differ
        return [] if self.ids is None else [*([self.planes] if reduced_to_one else []), *self.ids.shape]

    @property
    def differ(self) -> bool:
        """Whether planes differ, so that tokens have no single position."""
        return self.ids is not None and self.ids.dim() == 3

    @property
    def after(self) -> Tensor | None:
        """``[rows or 1]``: the position of the token after each prompt; None where planes differ there too.

        Of four planes the first is that of text, by which only packed training rows are told apart.
        """
        if self.ids is None:
            return None
        last = self.ids[..., -1]
        if self.differ:
            last = last[1:] if len(last) == 4 else last
            if not bool((last == last[0]).all()):
                return None
            last = last[0]
        return last + 1


def reduced(position_ids: Tensor | None, attention_mask: Tensor | None) -> Positions:
    """Reduce planes of positions ``[planes, rows or 1, width]`` to one where all are equal, as for text alone.

    Positions of padding, by the mask ``[rows, width]``, are not compared.
    """
    if position_ids is None or position_ids.dim() != 3:
        return Positions(position_ids)
    first = position_ids[0]
    equal = position_ids == first
    rows, width = position_ids.shape[1:]
    if attention_mask is not None and attention_mask.shape[-1] == width and rows in (1, len(attention_mask)):
        equal = equal | (attention_mask == 0)
    return Positions(first if bool(equal.all()) else position_ids, len(position_ids))


def forward_pass(
    model: PreTrainedModel, cache: SharedContextCache | CapturedCache, position_ids: Tensor, **arguments: Any
) -> Any:
    """``model(**arguments)`` with hooks, but bypassing ``model.compile()``.

    Dynamo would trace the cache object at every layer and step, and recompile whenever it grows. Models whose
    positions have planes get as many equal ones as they take, and those that count no tokens none. A decoder with an
    encoder gets the arguments by its names for them, and the encoder's output of the cache's inputs.
    """
    if planes := cache.position_planes:
        position_ids = position_ids.expand(planes, -1, -1)
    if takes_positions(model):
        arguments["position_ids"] = position_ids
    given: Cache = cache
    if cache.inputs is not None:
        arguments = prompt_names(model).named(arguments) | cache.inputs.arguments
        if isinstance(cache.inputs, CapturedInputs):
            given = cache.inputs.view
    with at_positions(position_ids):
        return uncompiled_call(model, **{CACHE: given}, **arguments)


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether passes are given ``position_ids``, which the model or its overrides read; models with states alone are
    given none."""
    own = None if model.config.is_encoder_decoder else own_code_of(type(model))
    return counts_positions(model) if own is None else not own.places_tokens


def counts_positions(model: PreTrainedModel) -> bool:
    """Whether the model itself takes ``position_ids``, and counts tokens where it is given none."""
    return _takes(type(model).forward, prompt_names(model).positions)


def reads_positions(model: PreTrainedModel) -> bool:
    """Whether the model's own code reads ``position_ids`` that a caller gives it; others change no token."""
    own = None if model.config.is_encoder_decoder else own_code_of(type(model))
    return counts_positions(model) and not (own is not None and own.ignores_positions(model.config))


def counts_padding(model: PreTrainedModel) -> bool:
    """Whether the model's positions always count the padding of prompts, see `OwnCode.counts_padding`."""
    own = own_code_of(type(model))
    if model.config.is_encoder_decoder and counts_positions(model):  # which Whisper alone without its encoder does not
        return False
    return own is not None and own.counts_padding


def places_tokens(model: PreTrainedModel) -> bool:
    """Whether the model derives positions from ids, see `OwnCode.places_tokens`."""
    own = own_code_of(type(model))
    return own is not None and own.places_tokens


def prepares_positions(model: PreTrainedModel) -> bool:
    """Whether a decoder's positions count what the mask shows, by a method of its class (Whisper)."""
    own = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    return bool(model.config.is_encoder_decoder) and own


def takes_shared_cache(model: PreTrainedModel) -> bool:
    """Whether the model takes its cache by the name that `generate` has for it."""
    return _takes(type(model).forward, CACHE)


@functools.cache
def _takes(forward: Callable[..., Any], name: str) -> bool:
    return name in signature(forward).parameters


def input_device(model: PreTrainedModel) -> torch.device:
    """Device for a pass's inputs. For an offloaded model, whose device is "meta", hooks move the inputs."""
    device = model.device if model.device.type != "meta" else model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device


def forget_offset(model: PreTrainedModel) -> None:
    """Forget the offset of positions that an earlier call with images left (``rope_deltas``).

    transformers adds it to all that continues a cache; a `SharedContextCache` continues text, without an offset.
    """
    owners: tuple[Any, ...] = (model, getattr(model, "model", None))
    for owner in owners:
        if isinstance(getattr(owner, "rope_deltas", None), Tensor):
            owner.rope_deltas = None


_LEFT_OUT: Final = frozenset({"labels"})
"""Arguments that transformers' trainers hand `generate` with a batch, and its preparation of a pass leaves out."""


def left_out(model: PreTrainedModel, arguments: Mapping[str, Any]) -> set[str]:
    """Names of model arguments that no pass gets, by the model's own preparation, or that none reads, so that they
    change no token."""
    given = {name: arguments[name] for name in _LEFT_OUT & arguments.keys()}
    unread = set[str]()
    positions = arguments.get(name := prompt_names(model).positions)
    # Stock counts positions on, and raises for a scalar and for booleans.
    counted = isinstance(positions, Tensor) and positions.dim() and positions.dtype is not torch.bool
    if counted and not reads_positions(model):
        unread.add(name)
    if not given:
        return unread
    ids = torch.zeros(1, 1, dtype=torch.long, device=input_device(model))
    try:
        prepared = model.prepare_inputs_for_generation(ids, use_cache=True, is_first_iteration=False, **given)
    except Exception:  # a method of the model's own, which needs more than that
        return unread
    return unread | (given.keys() - prepared.keys())


_labels: ContextVar[Tensor | None] = ContextVar("hf_fastdecode_labels", default=None)


with_labels = partial(setting, _labels)
"""Context of a pass of a model with a head that is given these labels, of which its decoder does not know."""


labels_of_pass = _labels.get
"""The labels of this thread's pass; None outside `with_labels`."""


class Beside:
    """Runs work on a second stream, one for each purpose, beside later work of the current one, and after its earlier
    work; on devices other than CUDA, at once."""

    def __init__(self, device: torch.device, purpose: str):
        self._stream, self._before = None, None
        if device.type == "cuda":
            self._stream = stream_for(device, purpose)
            self._before = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Context whose work goes to the second stream. The host may read results; other work needs `join` first."""
        if self._stream is not None and self._before is not None:
            self._stream.wait_event(self._before)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let work that is queued on the current stream from now on wait for the second one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
