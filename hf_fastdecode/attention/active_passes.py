"""Forward passes over a shared-context cache: configs name our functions in them, and their longest row is known.

`interface` registers the functions of that name with transformers. Under `torch.autocast` this package casts by
itself: autocast casts inputs of PyTorch's public functions, but neither those of ``torch.ops.aten`` operators and of
kernels, nor keys and values that a cache stores.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .._compat import ATTENTION_FIELD, setting
from ..instance_methods import Change, Switch
from .own_code import own_code_of

ATTENTION_NAME = "hf_fastdecode"
"""Name of the two functions in transformers' registries."""


@dataclass
class RowLengths:
    """Length of the longest row in the forward passes inside `active`, which decides whether windows hide tokens.

    Attributes:
        longest: Tokens of the longest row at the end of the pass. Windows of at least this size hide nothing and are
            dropped: layers then attend without a window.
        same_up_to: The smallest window that was dropped; None if none was. Rows of up to this length get the same
            computation, longer ones need the window (a captured step checks that).
        tables: Made by overrides for rows of that length, by their keys, see `interface.kept_for_capture`.
    """

    longest: int
    same_up_to: int | None = None
    tables: dict[Hashable, Tensor] = field(default_factory=dict)

    def serve(self, longest: int) -> bool:
        """Whether rows of up to this length get the same computation."""
        return self.same_up_to is None or longest <= self.same_up_to

    def keep_if_binding(self, window: int | None) -> int | None:
        """The window if it hides any token of the longest row; else None, with the window noted in `same_up_to`."""
        if window is None or self.longest > window:
            return window
        self.same_up_to = min(window, self.same_up_to or window)
        return None


# Of the current forward pass; None outside `active`, hence in other threads.
_lengths: ContextVar[RowLengths | None] = ContextVar("hf_fastdecode_lengths", default=None)


lengths_of_pass = _lengths.get
"""Returns the lengths of this thread's forward pass; None outside `active`."""


class _NameOfPasses(str):
    """`ATTENTION_NAME`, which stock passes of other threads also find equal to what their config named before."""

    before: str | None

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (_lengths.get() is None and self.before == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


_configs = Switch(replaces=True)


def stock_attention(config: PreTrainedConfig) -> str:
    """The attention implementation that a config names when no pass has switched it, ``sdpa`` by default."""
    name: str | None = _configs.otherwise(config, ATTENTION_FIELD)
    return name if name and name != ATTENTION_NAME else "sdpa"


def _name_in(config: PreTrainedConfig) -> str:
    own = own_code_of(type(config))
    if own is None or not own.compares_name:
        return ATTENTION_NAME
    name = _NameOfPasses(ATTENTION_NAME)
    name.before = _configs.otherwise(config, ATTENTION_FIELD)
    return name


@contextmanager
def active(configs: Iterable[PreTrainedConfig], lengths: RowLengths) -> Iterator[None]:
    """Make these configs name our attention and mask function inside the context; restores them on exit.

    They are the distinct config objects that the model's attention layers and mask creation read.
    """
    token = _lengths.set(lengths)
    try:
        with _configs.on([Change(config, ATTENTION_FIELD, _name_in(config)) for config in configs]):
            yield
    finally:
        _lengths.reset(token)


def as_stock() -> AbstractContextManager[None]:
    """Context within `active` for modules that read no cache: their attention and masks are transformers' own."""
    return setting(_lengths, None)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on this device; None where it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def cast(tensor: Tensor) -> Tensor:
    """Cast queries, keys or values as autocast casts inputs of PyTorch's attention: all but float64."""
    dtype = autocast_dtype(tensor.device)
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turn autocast off, so that operators compute in their inputs' dtype."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)
