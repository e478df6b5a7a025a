"""A pass over one packed row of distinct tokens: what its layers attend to, also when checkpoints recompute them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

from ..attention.kv import Scoring, SharedKV
from ..attention.overrides import RowLengths, active, lengths_of_pass
from ..errors import Unsupported
from ..generation.fused.modules import FusedModules
from ..generation.structure import Structure
from ..instance_methods import Change, Switch
from .attention import attend
from .reuse import Layers
from .trie import Tree

_CHECKPOINTS: Final = "_gradient_checkpointing_func", "checkpoint_fn"
"""Attributes with the function that checkpoints: of transformers' modules, and of PyTorch's `CheckpointWrapper`."""

_checkpoints = Switch(replaces=True)


@dataclass
class PackedPass(RowLengths):
    """A pass over the distinct tokens of a tree, in the place of rows."""

    tree: Tree = field(default_factory=lambda: Tree(()))  # the tokens' nodes
    # Keys and values of the tree's first tokens in each layer, which are not in the row.
    kept: Layers = field(default_factory=dict)
    keeps: bool = False  # whether `stored` gets what layers attend to
    # Keys and values of each layer by its index, [1, kv_heads, tokens, head_dim].
    stored: Layers = field(default_factory=dict)
    layers: int = 0  # attention layers that have run

    def attends_to(self, module: nn.Module, keys: Any, values: Any) -> SharedKV:
        index = getattr(module, "layer_idx", None)
        if self.keeps:
            if not isinstance(index, int):
                raise Unsupported(f"{type(module).__name__} does not say which layer it is", "pass use_cache=False")
            if self.kept:
                keys, values = (torch.cat(pair, 2) for pair in zip(self.kept[index], (keys, values), strict=True))
            self.stored.setdefault(index, (keys, values))
        self.layers += 1
        return _PackedKV(self.tree, keys, values)

    @contextmanager
    def running(self, structure: Structure) -> Iterator[None]:
        """Context of the pass, into which checkpointed layers return when they are computed again for gradients."""
        inside = partial(_inside, configs=structure.configs, fused=structure.fused)
        with inside(self), recomputed_inside(structure.walk.modules, lengths_of_pass, inside):
            yield


@contextmanager
def _inside(packed: RowLengths, *, configs: list[PreTrainedConfig], fused: FusedModules | None) -> Iterator[None]:
    """Context in which layers attend as in the pass, and modules run as kernels."""
    with active(configs, packed), nullcontext() if fused is None else fused.installed():
        yield


class _PackedKV(SharedKV):
    """Keys and values of a packed row, ``[1, kv_heads, tokens, head_dim]`` each."""

    def __init__(self, tree: Tree, keys: Tensor, values: Tensor):
        self._tree, self._keys, self._values, self.device = tree, keys, values, keys.device

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        # Views whose gradients are views, too, as those of an index are not.
        keys, values = self._keys.to(query.dtype), self._values.to(query.dtype)
        query, keys, values = (part.squeeze(0).transpose(0, 1) for part in (query, keys, values))
        return attend(query, keys, values, self._tree, scoring).unsqueeze(0)


def recomputed_inside(
    modules: Iterable[nn.Module], current: Callable[[], Any], inside: Callable[[Any], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Context of a pass in which functions that these modules checkpoint run `inside` the `current` pass again."""
    changes = [
        Change(module, name, partial(_checkpointed, current, inside, checkpoint))
        for module in (modules if torch.is_grad_enabled() else ())
        for name in _CHECKPOINTS
        if (checkpoint := vars(module).get(name)) is not None
    ]
    return _checkpoints.on(changes)


def _checkpointed(
    current: Callable[[], Any],
    inside: Callable[[Any], AbstractContextManager[None]],
    checkpoint: Callable[..., Any],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if (this := current()) is None:  # a stock pass of another thread
        return checkpoint(function, *args, **kwargs)

    def in_pass(*again: Any, **named: Any) -> Any:
        with nullcontext() if current() is this else inside(this):
            return function(*again, **named)

    return checkpoint(in_pass, *args, **kwargs)


_OF_CACHES: Final = frozenset(vars(DynamicCache()))


class CacheOfRows(DynamicCache):
    """transformers' cache of a pass over a packed row, filled when it is first used, by `fill`."""

    def __init__(self, config: PreTrainedConfig, fill: Callable[[CacheOfRows], None]):
        self._made_by = config, fill, torch.is_grad_enabled()

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_CACHES or (made_by := self.__dict__.pop("_made_by", None)) is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        config, fill, with_gradients = made_by
        super().__init__(config=config)
        with torch.set_grad_enabled(with_gradients):
            fill(self)
        return getattr(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies are filled: neither the pass nor the model is copied."""
        self.layers  # noqa: B018
        return super().__reduce_ex__(protocol)


def fill(stored: Layers, index: Tensor, cache: CacheOfRows) -> None:
    """Fill a cache with keys and values of a packed row.

    Args:
        stored: Those of each layer, ``[1, kv_heads, tokens, head_dim]``.
        index: ``[rows, width]`` int64: which of these tokens each place has; ``tokens`` for padding, which gets any.
    """
    for layer, parts in sorted(stored.items()):
        index = index.clamp(max=parts[0].shape[2] - 1).to(parts[0].device)
        keys, values = (part[0][:, index].transpose(0, 1) for part in parts)
        cache.update(keys, values, layer)


_SUMMED_IN_PLACE: Final = 3072
"""Most places of which PyTorch's embedding on a GPU sums gradients in their own dtype; on a CPU it always does."""


def to_rows(hidden: Tensor, index: Tensor) -> Tensor:
    """Hidden states ``[1, tokens, hidden_size]`` of distinct tokens, at each place of ``[rows, width]``.

    Places with the index ``tokens`` are padding: 0, and without a gradient. The gradient of a token is the sum of
    those of its places, summed in fp32 at least.
    """
    tokens, dtype = hidden.shape[1], hidden.dtype
    padded = torch.nn.functional.pad(hidden[0], (0, 0, 0, 1))
    if hidden.device.type == "cpu" or index.numel() <= _SUMMED_IN_PLACE:
        padded = padded.to(torch.promote_types(dtype, torch.float32))
    return torch.nn.functional.embedding(index.to(hidden.device), padded, padding_idx=tokens).to(dtype)
