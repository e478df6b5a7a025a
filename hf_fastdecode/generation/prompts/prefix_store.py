"""Prefix reuse across calls: stores the nodes of recent calls, so that later prompts prefill only new tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from threading import RLock
from typing import Any

import torch
from transformers import PreTrainedModel

from ...attention.forest import Forest
from ...cache.forest_cache import consolidate
from ...cache.layout import ModelLayout
from ...cache.shared import SharedContextCache
from ..fingerprint import ModelThen
from ..options import Options
from ..structure import Structure
from .prompt_plan import PromptGroup, StoredPrompts

_MOST_CALLS = 64
"""Kept calls; every new prompt is compared with all of them."""

_MOST_LEVELS = 8
"""Depth from which the nodes of a prompt that grows from call to call are merged, which copies them."""


@dataclass
class _Kept:
    cache: SharedContextCache
    prompts: StoredPrompts

    @cached_property
    def storages(self) -> dict[tuple[torch.device, int], int]:
        """Bytes of the nodes' storages, and of states at their ends, by device and address."""
        parts = [part for layer in self.cache.attention_layers for part in layer.storage.tensors()]
        parts += [one for layer in self.cache.state_layers for end in layer.ends.values() for one in end.tensors]
        stored = (part.untyped_storage() for part in parts)
        return {(one.device, one.data_ptr()): one.nbytes() for one in stored}


def require_room(model: PreTrainedModel, options: Options) -> None:
    """Raise ValueError if ``reuse_prefix`` is a number of bytes in which no token of the model can be kept."""
    if isinstance(options.reuse_prefix, bool) or not options.reuse_prefix:
        return
    numbers = sum(store.numbers for store in ModelLayout.from_config(model.config).per_token.values())
    if options.reuse_prefix < (needed := numbers * model.dtype.itemsize):
        raise ValueError(
            f"reuse_prefix={options.reuse_prefix} is a number of bytes, and one token of this {type(model).__name__} "
            f"takes {needed:,} bytes of keys and values; give the most bytes to keep, such as 2**30 for 1 GiB, or "
            "True for 2 GiB"
        )


class PrefixStore:
    """LRU store of nodes prefilled by a model's recent calls, bounded in bytes.

    It is cleared when the model's weights, adapters, modules, autocast or `forward` change, or the processes between
    which contexts are divided.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._kept: deque[_Kept] = deque()
        self._then: ModelThen | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixStore:
        return PrefixStore()  # a copy of the model has other weights

    def find(
        self, model: PreTrainedModel, structure: Structure, groups: list[PromptGroup], *, least: int
    ) -> tuple[SharedContextCache | None, ModelThen | None]:
        """Return the kept cache with most of the prompts' tokens; None if the longest match is under `least`.

        With it, what the model is still by all that the host can tell, if there is something: for `keep`, and to
        compare the model's weights with before the cache's are used.
        """
        with self._lock:
            self._drop_if_outdated(model, structure, sampled=False)
            best, most = None, 0
            prompts = [group.tokens for group in groups]
            for kept in self._kept:
                lengths = kept.prompts.match_lengths(prompts)
                if max(lengths) >= least and sum(lengths) > most:
                    best, most = kept, sum(lengths)
            if best is None:
                return None, self._then
            self._kept.remove(best)
            self._kept.append(best)
            return best.cache, self._then

    def keep(
        self,
        model: PreTrainedModel,
        structure: Structure,
        cache: SharedContextCache,
        max_bytes: int,
        *,
        found: ModelThen | None,
    ) -> int:
        """Keep the nodes of a call's cache, with one row per distinct prompt; returns the bytes kept over all calls.

        The model is not compared again with what `find` found for the call.

        Raises torch.OutOfMemoryError where memory does not suffice to merge a prompt's nodes; the store is then empty.
        """
        twin = cache.nodes_only(Forest.from_paths(list(dict.fromkeys(cache.forest.paths))))
        # Calls share the storage of common nodes; merging would copy it for each call.
        twin.protected_segments = len(twin.segment_tokens) if len(twin.forest.levels) < _MOST_LEVELS else 0
        try:
            consolidate(twin)
        except torch.OutOfMemoryError:
            self.clear()
            raise
        prompts = StoredPrompts(twin)
        with self._lock:
            if found is None or found is not self._then:
                self._drop_if_outdated(model, structure, sampled=True)
            self._then = self._then or ModelThen.of(model, structure)
            if not any(kept.prompts.covers(prompts) for kept in self._kept):
                self._kept = deque(kept for kept in self._kept if not prompts.covers(kept.prompts))
                self._kept.append(_Kept(twin, prompts))
            while len(self._kept) > _MOST_CALLS or (self._kept and self._nbytes() > max_bytes):
                self._kept.popleft()
            return self._nbytes()

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._then = None

    def _drop_if_outdated(self, model: PreTrainedModel, structure: Structure, *, sampled: bool) -> None:
        if self._then is not None and not self._then.is_now(model, structure, sampled=sampled):
            self.clear()

    def _nbytes(self) -> int:
        """Bytes of the kept caches' storage, shared storage counted once."""
        storages: dict[tuple[torch.device, int], int] = {}
        for kept in self._kept:
            storages |= kept.storages
        return sum(storages.values())
