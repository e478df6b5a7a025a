"""Forward passes over a shared-context cache, and streams beside the one on which they run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache as cached
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from .._compat import CACHE, uncompiled_call
from ..attention.interface import at_positions
from ..attention.own_code import own_code_of
from ..cache.captured import CapturedCache, CapturedInputs
from ..cache.shared import SharedContextCache
from .inputs.encoded import prompt_names


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
    """Whether passes are given ``position_ids``, which the model or its stand-ins read; models with states alone are
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


@cached
def _stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Beside:
    """Runs work on a second stream, beside later work of the current one, and after its earlier work.

    Args:
        device: On devices other than CUDA, work runs at once.
        purpose: Work of one purpose runs in order, on a stream of its own.
    """

    def __init__(self, device: torch.device, purpose: str):
        self._stream, self._before = None, None
        if device.type == "cuda":
            self._stream = _stream(device, purpose)
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
