"""How many tokens a pass may have at once by the memory of its tensors.

In PyTorch, scans of several tokens keep products of all pairs of a token and an entry of the state: of Nemotron-H in
transformers 5.17 some 9 MB per token. And some images have many more patches than tokens. What a pass takes is counted
once per model and dtype, over a few tokens or over the first prompt with an image, and compared with free memory
before each prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from ..._compat import keeps_logits, uncompiled_call
from ..decoding.decisions import usable_memory
from ..forward_pass import input_device

_COUNTED = 256
"""Tokens of the pass that is counted: a chunk of most scans."""

_FEW = 1024
"""Tokens that fit anyway."""

_EMPTY = (torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_strided)

_USED_SHARE = 0.5
"""Share of free memory that these tensors may take: PyTorch's allocator keeps blocks of other sizes for a while."""

_bytes_per_token: WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, float]] = WeakKeyDictionary()

_bytes_with_images: WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, float]] = WeakKeyDictionary()


def tokens_that_fit(model: PreTrainedModel, tokens: int) -> int:
    """Of so many tokens, how many a pass may have at once: all, or a multiple of `_COUNTED`."""
    device = input_device(model)
    if tokens <= _FEW or (usable := usable_memory(device)) is None:
        return tokens
    known = _bytes_per_token.setdefault(model, {})
    if (needed := known.get(model.dtype)) is None:
        needed = known[model.dtype] = most_bytes(model, _COUNTED) / _COUNTED
    fit = int(_USED_SHARE * usable / max(needed, 1.0))
    return tokens if fit >= tokens else max(1, fit // _COUNTED) * _COUNTED


class ImagePasses:
    """How many positions passes over prompts with images may have; the first, of one prompt, is counted.

    Args:
        max_tokens: The most, whatever memory is free.
        positions: Of all prompts, padding included.
    """

    def __init__(self, model: PreTrainedModel, max_tokens: int, positions: int):
        self._max_tokens, self._dtype = max_tokens, model.dtype
        self._known = _bytes_with_images.setdefault(model, {})
        self._usable = None if positions <= _FEW else usable_memory(input_device(model))

    @property
    def settled(self) -> bool:
        """Whether the number is known before the first pass."""
        return self._usable is None or self._dtype in self._known

    def most(self) -> int:
        """The number, 1 before it is known: a pass has one prompt at least."""
        if self._usable is None:
            return self._max_tokens
        needed = self._known.get(self._dtype)
        return 1 if needed is None else min(self._max_tokens, int(_USED_SHARE * self._usable / needed))

    @contextmanager
    def counting(self, positions: int) -> Iterator[None]:
        """Context of a pass of so many positions."""
        if self.settled:
            yield
            return
        with _Counted() as counted:
            yield
        self._known[self._dtype] = max(1.0, counted.most / positions)


@torch.no_grad()
def most_bytes(model: PreTrainedModel, tokens: int) -> int:
    """The most bytes that tensors of a pass over so many tokens of a row take at a time, without its cache."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=input_device(model))
    arguments = {"logits_to_keep": 1} if keeps_logits(model) else {}
    with _Counted() as counted:
        uncompiled_call(model, input_ids=ids, use_cache=False, **arguments)
    return counted.most


class _Counted(TorchDispatchMode):
    """Counts the bytes of tensors that operators make, but for empty ones, which caches keep.

    Attributes:
        most: The most at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self._held = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_iter(found) if getattr(func, "overloadpacket", None) not in _EMPTY else ():
            storage = one.untyped_storage() if isinstance(one, Tensor) else None
            if storage is not None and storage._cdata not in given | self._known:  # no view
                self._known.add(storage._cdata)
                self._held += storage.nbytes()
                finalize(storage, self._release, storage._cdata, storage.nbytes())
        self.most = max(self.most, self._held)
        return found

    def _release(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self._held -= size
