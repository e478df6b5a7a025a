"""What a model computes with: its weights and adapters, as they were when they filled a cache or were captured."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_SAMPLES = 4
"""Numbers remembered of each parameter, spread over it."""

_ADAPTER_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""By which PEFT's layers say, on the host, which adapters they apply and how strongly."""


class Fingerprint:
    """Whether keys and values that a model computed before are those that it would compute now.

    A parameter that was written to in place is noticed by PyTorch's version counter (optimizers, ``load_state_dict``,
    any in-place operation), one whose tensor was replaced by its address. What goes around both, writing to
    ``parameter.data`` in place, is noticed only where it changes one of a few numbers of each parameter, by which
    copies of a model or of a cache are compared too.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module):
        self._adapters = adapter_state(model)
        self._contents = {(seen := _look(parameter)).number: seen.content for parameter in _plain_parameters(model)}
        self._samples = _samples(model)

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_contents": {}}  # objects of this process

    def __deepcopy__(self, memo: dict[int, object]) -> Fingerprint:
        return self  # never written to, and about the same model

    def difference(self, model: nn.Module) -> str | None:
        """Which of ``weights`` and ``adapters`` are others now, or None; a model moved as a whole is not compared."""
        if self._adapters != adapter_state(model):
            return "adapters"
        for seen in map(_look, _plain_parameters(model)):
            if self._contents.get(seen.number, seen.content) != seen.content:
                return "weights"
        now, then = _samples(model), self._samples
        if now.keys().isdisjoint(then):
            return None
        alike = now.keys() == then.keys() and all(torch.equal(now[kind], then[kind]) for kind in now)
        return None if alike else "weights"


def adapter_state(model: nn.Module) -> Hashable:
    """Which adapters the model's layers apply, by the layers' names."""
    return tuple(
        (path, *((name, str(vars(module)[name])) for name in _ADAPTER_SWITCHES if name in vars(module)))
        for path, module in model.named_modules()
        if any(name in vars(module) for name in _ADAPTER_SWITCHES)
    )


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Where tensors lie."""
    return tuple(tensor.data_ptr() for tensor in tensors)


class _Seen(NamedTuple):
    """A parameter when it was last looked at.

    Attributes:
        number: Its own.
        state: Version and address of its memory.
        content: A number that is another whenever the state was.
    """

    number: int
    state: tuple[int, int]
    content: int


_seen: WeakIdKeyDictionary = WeakIdKeyDictionary()
_numbers = count()


def _look(parameter: Tensor) -> _Seen:
    state = -1 if parameter.is_inference() else parameter._version, parameter.data_ptr()
    seen: _Seen | None = _seen.get(parameter)
    if seen is None or seen.state != state:
        seen = _Seen(next(_numbers) if seen is None else seen.number, state, next(_numbers))
        _seen[parameter] = seen
    return seen


@contextmanager
def same_contents(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Within, parameters are moved to other addresses with what they hold."""
    before = [(parameter, _look(parameter)) for parameter in parameters]
    yield
    for parameter, seen in before:
        _seen[parameter] = _look(parameter)._replace(content=seen.content)


def _plain_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that hold their own numbers, here: offloaded ones come and go as other objects."""
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.device.type != "meta" and parameter.numel():
            yield parameter


@torch.no_grad()
def _samples(model: nn.Module) -> dict[tuple[torch.device, torch.dtype], Tensor]:
    """A few numbers of each parameter, by where and what they are."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in _plain_parameters(model):
        flat = parameter.detach().reshape(-1)
        numbers = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].clone(memory_format=torch.contiguous_format)
        as_bytes = numbers.view(torch.uint8)  # NaN equals itself, and types that cannot be concatenated can
        found.setdefault((parameter.device, parameter.dtype), []).append(as_bytes)
    return {kind: torch.cat(parts) for kind, parts in found.items()}
