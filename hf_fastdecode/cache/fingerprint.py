"""What a model computes with: its weights, adapters and modules, when they filled a cache or were captured."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator

import torch
from torch import Tensor, nn

_SAMPLES = 4
"""Numbers remembered of each parameter, spread over it."""

_ADAPTER_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""By which PEFT's layers say, on the host, which adapters they apply and how strongly."""

_BAKED_IN = (bool, int, float, str, type(None), Tensor)
"""Types of a module's own values that decide what it computes."""

_NOT_IN_KEYS = ("training", "gradient_checkpointing")
"""Flags under which keys and values are the same: dropout in training mode does not share."""


class Fingerprint:
    """Whether keys and values that a model computed before are those that it would compute now.

    A tensor that was written to in place is noticed by PyTorch's version counter (optimizers, ``load_state_dict``, any
    in-place operation), a replaced one by its address or identity, a replaced module or setting by itself. What goes
    around these, such as writing to ``parameter.data`` in place, is noticed only where it changes one of a few numbers
    of each parameter, by which copies of a model or of a cache are compared too.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module):
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        self._own = _own_state(model)
        self._adapters = adapter_state(model)
        self._samples = _samples(model)

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_model": None, "_own": None}  # of this process

    def __deepcopy__(self, memo: dict[int, object]) -> Fingerprint:
        return self  # never written to, and about the same model

    def difference(self, model: nn.Module) -> str | None:
        """What is other than it was, ``weights``, ``adapters`` or ``modules``, or None."""
        if self._adapters != adapter_state(model):
            return "adapters"
        if self._model is not None and self._model() is model:
            tensors, modules = _own_state(model)
            if self._own != (tensors, modules):
                return "weights" if self._own[0] != tensors else "modules"
        now, then = _samples(model), self._samples
        if now.keys().isdisjoint(then):  # moved or converted as a whole
            return None
        alike = now.keys() == then.keys() and all(torch.equal(now[kind], then[kind]) for kind in now)
        return None if alike else "weights"


def adapter_state(model: nn.Module) -> Hashable:
    """Which adapters the model's layers apply, by the layers' names."""
    found = []
    for path, module in model.named_modules():
        switches = {name: value for name in _ADAPTER_SWITCHES if (value := vars(module).get(name)) is not None}
        if not isinstance(switches.get("scaling"), dict):  # by adapter; a number is something else's
            switches.pop("scaling", None)
        if switches:
            found.append((path, *((name, str(value)) for name, value in switches.items())))
    return tuple(found)


def module_state(model: nn.Module, *, without: Collection[str] = ()) -> Hashable:
    """What modules read on the host: their own numbers, words and tensors, and a `forward` of an inner instance.

    Args:
        model: The model; a `forward` of its own is the caller's to compare, since `enable` puts one there.
        without: Names of values to leave out. Private ones are taken for bookkeeping.
    """
    return tuple(
        (
            id(module),
            None if module is model else id(_function(vars(module).get("forward"))),
            *(
                (name, value.data_ptr() if isinstance(value, Tensor) else str(value))
                for name, value in vars(module).items()
                if type(value) in _BAKED_IN and not name.startswith("_") and name not in without
            ),
        )
        for module in model.modules()
    )


def _function(method: object) -> object:
    return getattr(method, "__func__", method)


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Where tensors lie."""
    return tuple(tensor.data_ptr() for tensor in tensors)


def _tensor_state(tensor: Tensor) -> tuple[int, int, int]:
    """Identity, version and address of a tensor."""
    return id(tensor), -1 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _own_state(model: nn.Module) -> tuple[Hashable, Hashable]:
    """Tensors and modules of a model, comparable with those of the same object only."""
    buffers = (buffer for buffer in model.buffers() if type(buffer) is Tensor and buffer.device.type != "meta")
    tensors = tuple(map(_tensor_state, (*_plain_parameters(model), *buffers)))
    return tensors, module_state(model, without=_NOT_IN_KEYS)


def _plain_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Materialized plain parameters; offloaded ones, which come and go as other objects, are left out."""
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
