"""A watch over what is shared: every operator that reads it is counted, and none may spread or copy it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Reads(TorchDispatchMode):
    """Counts the operators that read each watched tensor's storage, and fails one that spreads or copies it.

    To spread is to make more numbers of it than it has, even as a view; `may_copy` allows one copy, as wide as that.
    """

    def __init__(self, watched: Sequence[Tensor], may_copy: bool = False):
        super().__init__()
        self.limit = {_storage(tensor): tensor.numel() for tensor in watched}
        self.count = dict.fromkeys(self.limit, 0)
        self.may_copy = may_copy
        self.copies: list[Tensor] = []  # kept alive, so that nothing else takes their address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} & set(self.limit)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.numel()]
        for storage in read:
            for tensor in made:
                assert tensor.numel() <= self.limit[storage], f"{func} spreads shared keys or values: {tensor.shape}"
                if _storage(tensor) != storage and tensor.numel() == self.limit[storage]:
                    assert self.may_copy, f"{func} copies shared keys or values: {tensor.shape}"
                    self.copies.append(tensor)
                    self.limit[_storage(tensor)] = tensor.numel()
            if storage in self.count:
                self.count[storage] += not any(_storage(tensor) == storage for tensor in made)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
