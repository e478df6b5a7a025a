"""RMSNorm of each head of queries and keys, in the launch that rotates them.

A captured pass normalizes heads right before their rotary embedding, in modules that know nothing of it.
`WaitingHeadNorms` leaves such a norm undone until an operation reads or writes its memory: a rotation by kernel
takes those of its queries and keys along, for any other operation they are first computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...kernels.failures import KernelFailedError
from ...kernels.pointwise import reference
from ...kernels.pointwise.api import HeadNorms, NormForm, RotaryForm, rms_norm, rotate

_WITHOUT_MEMORY = frozenset(
    {
        *(Tensor.view, Tensor.transpose, torch.empty_like),
        *(Tensor.dim, Tensor.size, Tensor.stride, Tensor.numel, Tensor.is_contiguous),
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")),
    }
)
"""Views of all of a tensor, new memory like its own, and reads of attributes that do not lead to its memory."""


class _Norm(NamedTuple):
    """A norm that waits."""

    x: Tensor  # [batch, length, heads, head_dim], contiguous, or that with length and heads transposed
    weight: Tensor
    eps: float
    form: NormForm
    result: Tensor  # memory of the strides of `x`

    def compute(self) -> None:
        x, result = self.x, self.result
        if not x.is_contiguous():
            x, result = x.transpose(1, 2), result.transpose(1, 2)
        try:
            rms_norm(x, self.weight, self.eps, self.form, out=result)
        except (ValueError, KernelFailedError):
            result.copy_(reference.rms_norm(x, self.weight, self.eps, self.form))

    def has(self, heads: Tensor) -> bool:
        """Whether these are all of its result, heads along their last axis."""
        return (
            _memory(heads) == _memory(self.result)
            and heads.dtype == self.result.dtype
            and heads.numel() == self.result.numel()
            and heads.shape[-1] == self.result.shape[-1]
            and heads.stride(-1) == 1
        )

    def before(self, heads: Tensor) -> Tensor:
        """The elements of `x` in the places of those of a view of its result."""
        offset = self.x.storage_offset() + heads.storage_offset() - self.result.storage_offset()
        return self.x.as_strided(heads.shape, heads.stride(), offset)


class WaitingHeadNorms(TorchFunctionMode):
    """Context in which norms of heads wait, in this thread. Of several function modes, products must be entered first.

    A function mode sees every operation on tensors and every read of their attributes, so that none reads memory
    that is not written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[_Norm] = []

    def __enter__(self) -> Any:
        self._token = _active.set(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.reset(self._token)
        self._compute()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if self._waiting and function not in _WITHOUT_MEMORY:
            held = {_memory(part) for norm in self._waiting for part in (norm.x, norm.result)}
            if any(one is None or one in held for one in _memories((*args, *options.values()))):
                self._compute()
        return function(*args, **options)

    def _compute(self) -> None:
        waiting, self._waiting = self._waiting, []
        for norm in waiting:
            norm.compute()

    def wait(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        """The memory of a norm that waits, see `rms_norm`.

        Args:
            x: ``[batch, length, heads, head_dim]``, contiguous, or that with length and heads transposed.
        """
        result = torch.empty_like(x)
        self._waiting.append(_Norm(x, weight, eps, form, result))
        return result

    def rotate(
        self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm, *, halves: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Normalized and rotated queries and keys, see `rotate`; None where not both wait, or the kernel fails."""
        waiting, self._waiting = self._waiting, []  # so that a look at memory computes nothing
        taken: tuple[_Norm, ...] = ()
        try:
            both = [next((one for one in waiting if one.has(part)), None) for part in (queries, keys)]
            if (first := both[0]) is None or (second := both[1]) is None or first[2:4] != second[2:4]:
                return None
            norms = HeadNorms(first.weight, second.weight, first.eps, first.form, queries, keys)
            found = rotate(first.before(queries), second.before(keys), cos, sin, form, halves=halves, norms=norms)
            taken = first, second
            return found
        except (ValueError, KernelFailedError):
            return None
        finally:
            self._waiting = [one for one in waiting if not any(one is other for other in taken)]


# Of this thread's pass.
_active: ContextVar[WaitingHeadNorms | None] = ContextVar("hf_fastdecode_head_norms", default=None)


def waiting_head_norms() -> WaitingHeadNorms | None:
    """The context of this thread, if any."""
    return _active.get()


def _memory(tensor: Tensor) -> int | None:
    """Identifies the memory that a tensor shares with its views; None for tensors of other classes or layouts."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if plain else None


def _memories(values: Any) -> Iterator[int | None]:
    """Of all tensors among arguments."""
    for value in values:
        if isinstance(value, Tensor):
            yield _memory(value)
        elif isinstance(value, (list, tuple)):
            yield from _memories(value)
