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

from ...errors import Unsupported, one_line
from ..ranks import Together, in_several_processes
from ..watchdog import watchdog_of
from .fsdp import Fsdp1, Fsdp2
from .parameters import MORE_MEMORY, Gathering
from .zero import Zero3

_KINDS: Final[tuple[type[Gathering], ...]] = (Zero3, Fsdp1, Fsdp2)


class Gathered(NamedTuple):
    """Bytes of the whole parameters of a call on this process, and the seconds that gathering them took."""

    nbytes: int
    seconds: float


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

        All processes gather, or none does: `Gathering.refused` then says why the call runs stock. What follows a
        gather is each process's own: only the entry communicates, and is watched for peers that fail, which count as
        such so many seconds after their last sign of life. Other threads' calls wait for the end of this one; those
        within it gather nothing. `walk` finds the model's modules.

        Raises:
            ValueError: Processes divide the model's parameters differently.
            PeerFailedError: Another process failed before or while parameters were gathered.
        """
        # With a group of one process, parameters may be on the CPU between passes.
        if not (dist.is_available() and dist.is_initialized()) or (self._kept is None and self.of(walk()) is None):
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


def _same(these: tuple[Any, ...], those: tuple[Any, ...]) -> bool:
    """Whether units are the same objects, or tuples of the same ones."""
    return len(these) == len(those) and all(
        one is other or (isinstance(one, tuple) and one == other) for one, other in zip(these, those, strict=True)
    )


def _enter(gathering: Gathering, stack: ExitStack, model: PreTrainedModel, timeout: float) -> Gathered | None:
    """Gather on all processes of the group and its replicas, or on none, with the reason in `refused`.

    Replicas too, since the loop of stock compares finished rows of all processes at every step.
    """
    if (group := gathering.group) is None:
        gathering.refused = Unsupported(gathering.what, gathering.remedy)
        return None
    groups = [group] if (replicas := gathering.replicas) is None else [group, replicas]
    ranks = [Together(one, gathering.device, watchdog_of([one]), type(model).__name__) for one in groups]
    stack.callback(gathering.release)
    began = perf_counter()
    with ExitStack() as watched:
        for those in ranks:
            watched.enter_context(those.watchdog.call("a gather of parameters", timeout))
        refusal = None
        for those in ranks:
            refusal = _agreed(those, gathering, refusal)
        if refusal:
            gathering.release()
            gathering.refused = Unsupported(f"{gathering.what}: {refusal}")
            return None
        with ranks[0].watchdog.running_pass(timeout):
            stack.enter_context(gathering.gathered())
            if gathering.device.type == "cuda":
                torch.cuda.synchronize(gathering.device)
    return Gathered(gathering.nbytes, perf_counter() - began)


def _agreed(ranks: Together, gathering: Gathering, refusal: str | None) -> str:
    """This process's refusal, which is asked for where it is None, or that of another one."""
    try:
        with ranks.together() as offer:
            if refusal := _refusal(gathering) if refusal is None else refusal:
                raise Unsupported(refusal)
            fields = {"bytes of gathered parameters": gathering.received}
            offer.compare(lambda: fields, "parameters are divided differently")
    except Unsupported as error:
        return str(error)
    return ""


def _refusal(gathering: Gathering) -> str:
    """Reserve the memory of a call; returns why it cannot be had, with the remedy, or an empty string."""
    try:
        gathering.reserve()
    except Unsupported as error:
        return str(error if error.remedy else Unsupported(error.what, gathering.remedy))
    except torch.OutOfMemoryError as error:
        needed = f"all of its parameters take {gathering.nbytes / 2**30:.1f} GiB"
        return f"{needed}, and memory ran out ({one_line(error)}); {MORE_MEMORY}"
    return ""
