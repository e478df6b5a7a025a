"""Which library divides a model's parameters, and calls in which they are gathered, as its processes agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ...errors import PassFailedError, Unsupported, one_line
from ..ranks import Together, in_several_processes
from ..watchdog import watchdog_of
from .fsdp import Fsdp1, Fsdp2
from .parameters import DoesNotFit, Gathering
from .zero import Zero3

_KINDS: Final[tuple[type[Gathering], ...]] = (Zero3, Fsdp1, Fsdp2)


class Gathered(NamedTuple):
    """How a call's parameters were gathered.

    Attributes:
        nbytes: Bytes of the whole parameters on this process; 0 where each pass gathers its layers'.
        seconds: What that took.
        in_passes: Why each pass gathers; empty where none does.
    """

    nbytes: int
    seconds: float
    in_passes: str = ""


class KeptGathering:
    """The library that divides a model's parameters, found for each call, and kept while it is the same."""

    def __init__(self) -> None:
        self._kept: Gathering | None = None
        self._turn = RLock()  # of the thread in whose call parameters are gathered
        self._now: Gathered | None = None  # in that call

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptGathering:
        return KeptGathering()  # a copy of the model has other modules

    def of(self, modules: Sequence[nn.Module]) -> Gathering | None:
        """The library that gathers these modules' parameters in each pass; None if there is none, or all are whole."""
        for kind in _KINDS if in_several_processes() else (Zero3,):  # whose hooks one process runs too
            if units := kind.find(modules):
                kept = self._kept
                if kept is None or type(kept) is not kind or not _same(kept.units, units):
                    kept = self._kept = kind(units)
                return kept
        return None

    @contextmanager
    def call(
        self, model: PreTrainedModel, walk: Callable[[], Sequence[nn.Module]], timeout: float
    ) -> Iterator[Gathered | None]:
        """Context of a call with whole parameters; yields None where they are not gathered for it.

        All processes gather, or none does: where memory is short on one, passes gather layer by layer on all, see
        `_in_step`; otherwise `Gathering.refused` says why the call runs stock. What follows a gather is each
        process's own: only the entry communicates, and is watched for peers that fail. Other threads' calls wait for
        the end of this one; those within it gather nothing.

        Args:
            walk: Finds the model's modules.
            timeout: Seconds after a peer's last sign of life until it counts as failed.

        Raises:
            ValueError: Processes divide the model's parameters differently.
            PeerFailedError: Another process failed before or while parameters were gathered, or in a call whose
                passes gather.
        """
        if not _has_group() or (self.of(walk()) is None and self._kept is None):
            yield None
            return
        with self._turn, ExitStack() as stack:
            if self._now is not None or (gathering := self.of(walk())) is None:
                yield self._now
                return
            try:
                self._now = _enter(gathering, stack, model, timeout)
                yield self._now
            finally:
                self._now = None


def _has_group() -> bool:
    """Whether this process has a default group: if of itself alone, parameters may be on the CPU between passes."""
    return dist.is_available() and dist.is_initialized()


def _same(these: tuple[Any, ...], those: tuple[Any, ...]) -> bool:
    """Whether units are the same objects, or tuples of the same ones."""
    return len(these) == len(those) and all(
        one is other or (isinstance(one, tuple) and one == other) for one, other in zip(these, those, strict=True)
    )


def _enter(gathering: Gathering, stack: ExitStack, model: PreTrainedModel, timeout: float) -> Gathered | None:
    """Gather on all processes of the group, or on none, with `refused` set unless passes gather in step."""
    if (group := gathering.group) is None:
        gathering.refused = Unsupported(gathering.what, gathering.remedy)
        return None
    watchdog = watchdog_of([group])
    ranks = Together(group, gathering.device, watchdog, type(model).__name__)
    stack.callback(gathering.release)
    began = perf_counter()
    with watchdog.call("a gather of parameters", timeout):
        try:
            with ranks.together() as offer:
                short = _reserve(gathering)
                fields = {"bytes of gathered parameters": gathering.nbytes}
                offer.numbers = [ranks.rank if short else ranks.count, _may_step(model, gathering)]
                offer.compare(lambda: fields, "parameters are divided differently")
        except Unsupported as error:
            gathering.refused = Unsupported(f"{gathering.what}: {error}", None if error.remedy else gathering.remedy)
            return None
        if offer.numbers[0] == ranks.count:
            with watchdog.running_pass(timeout):
                stack.enter_context(gathering.gathered())
                if gathering.device.type == "cuda":
                    torch.cuda.synchronize(gathering.device)
            return Gathered(gathering.nbytes, perf_counter() - began)
    gathering.release()
    why = f"on rank {offer.numbers[0]}, {short or 'memory does not hold all of its parameters'}"
    if not offer.numbers[1]:
        gathering.refused = Unsupported(f"{gathering.what}: {why}", gathering.remedy)
        return None
    gathering.refused = None
    stack.callback(setattr, gathering, "refused", Unsupported(gathering.what, gathering.remedy))
    stack.enter_context(_in_step(model, ranks, gathering.device, timeout))
    return Gathered(0, 0.0, why)


def _reserve(gathering: Gathering) -> str:
    """Why memory does not hold the parameters; empty if it does."""
    try:
        gathering.reserve()
    except DoesNotFit as error:
        return str(error)
    except torch.OutOfMemoryError as error:
        return one_line(error)
    return ""


def _may_step(model: PreTrainedModel, gathering: Gathering) -> bool:
    """Whether passes over one token run all of a model's layers, where its parameters are: those of text alone.

    Attention to latents reads parameters of a projection that it does not call.
    """
    parts = {"vision_config", "audio_config", "encoder_config", *(["kv_lora_rank"] if gathering.by_module else [])}
    parts |= {*model.config.sub_configs} - {"text_config", "attn_config", "ffn_config"}  # such as a second decoder
    of_text = not model.config.is_encoder_decoder and parts.isdisjoint(vars(model.config))
    return of_text and all(parameter.device == gathering.device for parameter in model.parameters())


@contextmanager
def _in_step(model: nn.Module, ranks: Together, device: torch.device, timeout: float) -> Iterator[None]:
    """Context of a call whose passes communicate, of which every process is to run as many.

    Before each pass the processes tell each other that one is to come. A process whose call has ended runs passes over
    one token until all have ended: rows may end, and prompts be prefilled, in other numbers of passes. An error of one
    process between passes ends its call alone; in a pass, or one that is no `Exception`, it ends those of all.
    """
    is_running, failed = False, None

    def before(*_: Any) -> None:
        nonlocal is_running
        if is_running:  # a pass that failed, after which the caller goes on, as with fewer rows
            raise PassFailedError("a forward pass failed, as for lack of memory, in which other processes may wait")
        ranks.smallest(0)
        is_running = True

    def after(*_: Any) -> None:
        nonlocal is_running
        is_running = False

    with ranks.watchdog.call("a call whose passes gather parameters", timeout):
        ranks.watchdog.enter_foreign_loop()
        hooks = model.register_forward_pre_hook(before, prepend=True), model.register_forward_hook(after)
        try:
            yield
        except Exception as error:
            if is_running:
                raise
            failed = error
        finally:
            for hook in hooks:
                hook.remove()
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        while ranks.smallest(1) == [0]:
            with torch.no_grad():
                model(input_ids=token, use_cache=False)
    if failed is not None:
        raise failed
