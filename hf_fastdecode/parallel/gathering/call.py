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

from ...errors import Unsupported
from ..ranks import NoRoomError, Together
from ..watchdog import watchdog_of
from .fsdp import Fsdp1, Fsdp2
from .parameters import Gathering
from .zero import Zero3

_KINDS: Final[tuple[type[Gathering], ...]] = (Zero3, Fsdp1, Fsdp2)


class Gathered(NamedTuple):
    """A gather: bytes of the whole parameters on this process, and seconds it took."""

    nbytes: int
    seconds: float


class KeptGathering:
    """What divides one model's parameters, found anew for each call, and kept with its memory while it is the same."""

    def __init__(self) -> None:
        self._kept: Gathering | None = None
        self._turn = RLock()  # of the thread in whose call parameters are gathered

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptGathering:
        return KeptGathering()  # a copy of the model has other modules

    def of(self, modules: Sequence[nn.Module]) -> Gathering | None:
        """What gathers parameters of these modules in each pass; None where nothing does, or all are gathered."""
        if not _has_group():
            return None
        for kind in _KINDS:
            if units := kind.find(modules):
                kept = self._kept
                if kept is None or type(kept) is not kind or not _same(kept.units, units):
                    kept = self._kept = kind(units)
                return kept
        return None

    @contextmanager
    def call(self, walk: Callable[[], Sequence[nn.Module]], name: str, timeout: float) -> Iterator[Gathered | None]:
        """Context of a call with whole parameters; yields None where none were gathered.

        All processes gather, or none does: `Gathering.refused` then says why. What follows is each one's own. Only
        the entry communicates, and is watched for peers that fail. Other threads' calls wait for the end of this one.

        Args:
            walk: Finds the model's modules.
            name: The model's, for errors.
            timeout: Seconds after a peer's last sign of life until it counts as failed.

        Raises:
            ValueError: Processes divide the model's parameters differently.
            PeerFailedError: Another process failed before or while parameters were gathered.
        """
        if not _has_group() or (self.of(walk()) is None and self._kept is None):
            yield None
            return
        with self._turn, ExitStack() as stack:
            gathering = self.of(walk())
            yield None if gathering is None else _enter(gathering, stack, name, timeout)


def _has_group() -> bool:
    """Whether this process has a default group: if of itself alone, parameters may be on the CPU between passes."""
    return dist.is_available() and dist.is_initialized()


def _same(these: tuple[Any, ...], those: tuple[Any, ...]) -> bool:
    """Whether units are the same objects, or tuples of the same ones."""
    return len(these) == len(those) and all(
        one is other or (isinstance(one, tuple) and one == other) for one, other in zip(these, those, strict=True)
    )


def _enter(gathering: Gathering, stack: ExitStack, name: str, timeout: float) -> Gathered | None:
    """Gather on all processes of the group, or on none, with `refused` set."""
    if (group := gathering.group) is None:
        gathering.refused = Unsupported(gathering.what, gathering.remedy)
        return None
    watchdog = watchdog_of([group])
    ranks = Together(group, gathering.device, watchdog, name)
    stack.callback(gathering.release)
    with watchdog.call("a gather of parameters", timeout):
        try:
            with ranks.together() as offer:
                gathering.reserve()
                fields = {"bytes of gathered parameters": gathering.nbytes}
                offer.compare(lambda: fields, "parameters are divided differently")
        except (Unsupported, NoRoomError) as error:
            remedy = error.remedy if isinstance(error, Unsupported) else None
            gathering.refused = Unsupported(f"{gathering.what}: {error}", None if remedy else gathering.remedy)
            return None
        began = perf_counter()
        with watchdog.running_pass(timeout):
            stack.enter_context(gathering.gathered())
            if gathering.device.type == "cuda":
                torch.cuda.synchronize(gathering.device)
    return Gathered(gathering.nbytes, perf_counter() - began)
