"""The protocol of libraries that divide parameters between processes, and gathered parameters in the modules' places.

A trainer that divides a model (FSDP, ZeRO-3) gathers each layer's parameters when the layer runs, and frees them after
it: a decoding loop gathers all of them for every token. Here they are gathered once for a call. Its modules then have
whole parameters and none of the library's hooks, as in one process, so that every process runs the passes of its own
prompts. Nothing of the library's own state changes: what it has registered on modules is replaced for the call, and
put back by the same objects at the same places, which takes no communication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor, nn

from ..._compat import STORED, all_gather_vectors
from ...errors import Unsupported
from ...kernels.device import free_memory
from .memory import Memory, memory_on

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ALIGNMENT: Final = 512
"""Bytes to a multiple of which parts begin, as those of PyTorch's allocator."""

MOST_OF_FREE: Final = 0.8
"""Share of a device's free memory that gathered parameters may take; keys and values need the rest."""

MORE_MEMORY: Final = (
    "free some (optimizer states on the CPU, more GPUs, passes in half precision), or sample with a copy of the model "
    "on another GPU"
)
"""What to do where a device's memory does not hold whole parameters."""


@dataclass
class Part:
    """Parameters that are gathered by one collective.

    Attributes:
        send: This process's part, a vector on the device in the dtype of passes; all processes' are as long.
        numel: Elements of all parts together.
        dtype: That of passes.
        place: Where views of the whole vector go.
        is_whole: Whether this process has all of them, in other memory or another dtype, so that they are copied.
    """

    send: Callable[[], Tensor]
    numel: int
    dtype: torch.dtype
    place: Callable[[Tensor], Sequence[Place]]
    is_whole: bool = False

    @classmethod
    def of_whole(
        cls, parameter: Tensor, names: Sequence[tuple[nn.Module, str]], stored: Tensor, dtype: torch.dtype
    ) -> Part:
        """A parameter that this process has whole, to be copied or cast; see `Place` for the others."""

        def place(whole: Tensor) -> list[Place]:
            return [Place(names, whole.view(parameter.shape), stored)]

        return cls(lambda: parameter.data.view(-1), parameter.numel(), dtype, place, is_whole=True)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class Place:
    """A parameter: the modules and names that have it, its whole tensor, and what is trained (`_compat.stored_of`)."""

    names: Sequence[tuple[nn.Module, str]]
    whole: Tensor
    stored: Tensor


class Gathering(ABC):
    """A library that divides the parameters of one model, and gathers them in each pass.

    Its parts are gathered by collectives of this package, in memory of its own: parameters of a call are the same
    objects in each call, at the same addresses where memory allows (`memory`), so that captured passes stay valid.

    One object is kept from call to call while the same `units`, which `find` found, divide the model. Its methods are
    called in the order `reserve`, `gathered`, `release`, by one thread at a time. Where `reserve` fails on one
    process, `release` follows on all.

    Attributes:
        what, remedy: What is the matter with passes of the model as it is, for reports, and what else to do about it.
        group: The processes between which parameters are divided; None where they cannot be gathered for a call.
        replicas: The processes of other groups that have the same parts, if there are any (HSDP).
        device: Where passes run, and parameters are gathered.
        refused: Why calls run stock while passes gather.
    """

    what: ClassVar[str]
    remedy: ClassVar[str]
    group: ProcessGroup | None = None
    replicas: ProcessGroup | None = None
    device: torch.device

    def __init__(self, units: tuple[Any, ...]):
        self.units = units
        self.refused = Unsupported(self.what, self.remedy)
        self._parts: list[Part] = []
        self._memory: Memory | None = None
        self._made: list[_Whole] = []

    @classmethod
    @abstractmethod
    def find(cls, modules: Sequence[nn.Module]) -> tuple[Any, ...]:
        """The library's objects that divide parameters of these modules in passes; empty where none does."""

    @abstractmethod
    def parts(self) -> list[Part]:
        """The parts as they are divided now; raises `Unsupported`."""

    @staticmethod
    def is_hook(hook: Any) -> bool:
        """Whether a forward hook is the library's."""
        return False

    @classmethod
    def hooks(cls, module: nn.Module) -> list[tuple[dict[int, Any], int]]:
        """The library's forward hooks on a module: the dict that each is in, and its key."""
        both = (module._forward_pre_hooks, module._forward_hooks)
        return [(hooks, key) for hooks in both for key, hook in hooks.items() if cls.is_hook(hook)]

    def put(self, swaps: Swaps) -> None:
        """Take the library's code off the modules."""
        for module in self.units:
            for hooks, key in self.hooks(module) if isinstance(module, nn.Module) else ():
                swaps.take(hooks, key)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameters that `gathered` gathers on each process, or copies; known after `reserve`."""
        return sum(part.nbytes for part in self._parts)

    @property
    def received(self) -> int:
        """Those that it gathers, as many on each process."""
        return sum(part.nbytes for part in self._parts if not part.is_whole)

    def reserve(self) -> None:
        """Prepare the memory of a call, without communication.

        Raises Unsupported where memory does not hold them, or parameters cannot be gathered as they are divided;
        torch.OutOfMemoryError where memory ran out.
        """
        self._parts = self.parts()
        _check_room(self.nbytes, self.device)
        with torch.inference_mode(False):  # whose tensors later calls could not write to
            if self._memory is not None and self._fits():
                self._memory.take()
                return
            self._memory, self._made = None, []
            ends = [0, *accumulate(-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in self._parts)]
            if ends[-1]:
                self._memory = memory_on(self.device, ends[-1])
                bytes_of_all = self._memory.vector
                self._made = [
                    _Whole(bytes_of_all[begin : begin + part.nbytes].view(part.dtype))
                    for begin, part in zip(ends, self._parts, strict=False)
                ]

    def _fits(self) -> bool:
        return [(part.numel, part.dtype) for part in self._parts] == [
            (whole.vector.numel(), whole.vector.dtype) for whole in self._made
        ]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which the modules have whole parameters, and no code that gathers them; collective on entry."""
        swaps = Swaps()
        try:
            with torch.no_grad():
                for part, whole in zip(self._parts, self._made, strict=True):
                    if part.is_whole:
                        whole.vector.copy_(part.send())
                    else:
                        all_gather_vectors(whole.vector, part.send(), self.group)
                    whole.register(part, swaps)
            self.put(swaps)
            yield
        finally:
            swaps.undo()

    def release(self) -> None:
        self._parts = []
        if self._memory is not None:
            self._memory.free()


class _Whole:
    """The vector of one part, and parameters that are views of it."""

    def __init__(self, vector: Tensor):
        self.vector = vector
        self._parameters: list[nn.Parameter] = []

    def register(self, part: Part, swaps: Swaps) -> None:
        places = part.place(self.vector)
        if len(self._parameters) != len(places):
            with torch.inference_mode(False):
                self._parameters = [nn.Parameter(place.whole, requires_grad=False) for place in places]
        for place, parameter in zip(places, self._parameters, strict=True):
            setattr(parameter, STORED, place.stored)
            for module, name in place.names:
                swaps.put(module._parameters, name, parameter)
                if name in vars(module):  # where FSDP 1 leaves tensors that are no parameters
                    swaps.put(vars(module), name, parameter)


def _check_room(nbytes: int, device: torch.device) -> None:
    """Raise `Unsupported` if a GPU's free memory does not hold gathered parameters; other memory is not measured."""
    if device.type == "cuda" and nbytes > MOST_OF_FREE * (free := free_memory(device)):
        raise Unsupported(
            f"all of its parameters take {nbytes / 2**30:.1f} GiB, more than {MOST_OF_FREE:.0%} of the "
            f"{free / 2**30:.1f} GiB that are free on {device}",
            MORE_MEMORY,
        )


_MISSING: Final = object()


@dataclass
class Swaps:
    """Entries of modules' dicts that are other ones for a call, and come back to their old places."""

    _before: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    _orders: dict[int, tuple[dict[Any, Any], list[Any]]] = field(default_factory=dict)

    def put(self, entries: dict[Any, Any], key: Any, value: Any) -> None:
        self._before.append((entries, key, entries.get(key, _MISSING)))
        entries[key] = value

    def take(self, entries: dict[Any, Any], key: Any) -> None:
        self._orders.setdefault(id(entries), (entries, list(entries)))
        self._before.append((entries, key, entries[key]))
        del entries[key]

    def undo(self) -> None:
        while self._before:
            entries, key, value = self._before[-1]
            if value is _MISSING:
                entries.pop(key, None)
            else:
                entries[key] = value
            self._before.pop()
        for entries, order in self._orders.values():  # entries of others may have come or gone meanwhile
            ordered = {key: entries[key] for key in order if key in entries} | entries
            entries.clear()
            entries.update(ordered)
        self._orders.clear()
