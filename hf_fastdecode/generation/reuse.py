"""The nodes of a model's last calls, kept so that later prompts that begin alike prefill only what is new."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.autocast import autocast_dtype
from ..attention.forest import Forest
from ..cache.consolidate import consolidate
from ..cache.fingerprint import Fingerprint
from ..cache.shared import SharedContextCache
from .prompts import PromptGroup, known_prefixes

_MOST_LEVELS = 8
"""A prompt that grows from call to call gets a node in each; from so many on they are merged, which copies them."""


class ReusedPrefixes:
    """What the last calls of a model prefilled, up to a number of bytes; the oldest call's goes first.

    All of it is dropped once the model's weights, adapters, autocast or `forward` are others.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: deque[SharedContextCache] = deque()
        self._fingerprint: Fingerprint | None = None
        self._ways: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ReusedPrefixes:
        return ReusedPrefixes()  # a copy of the model has other weights

    def find(self, model: PreTrainedModel, groups: list[PromptGroup], *, least: int) -> SharedContextCache | None:
        """The kept cache that holds most of the prompts' tokens, or None where none holds `least` tokens of one."""
        with self._lock:
            self._drop_what_is_outdated(model)
            best, most = None, 0
            for cache in self._kept:
                lengths = [length for _, length in known_prefixes(groups, cache)]
                if max(lengths) >= least and sum(lengths) > most:
                    best, most = cache, sum(lengths)
            if best is not None:  # the last one used is dropped last
                self._kept.remove(best)
                self._kept.append(best)
            return best

    def keep(self, model: PreTrainedModel, cache: SharedContextCache, max_bytes: int) -> int:
        """Keep the nodes of a call's cache, each prompt once.

        Args:
            model: The model.
            cache: Planted, with nothing in its suffixes but what was fed again.
            max_bytes: Most bytes of all that is kept.

        Returns:
            The bytes kept now.
        """
        twin = cache.nodes_only(Forest.from_paths(list(dict.fromkeys(cache.forest.paths))))
        # Calls share what they have in common; merging would store it once for each of them.
        twin.lent_segments = len(twin.segment_tokens) if len(twin.forest.levels) < _MOST_LEVELS else 0
        consolidate(twin)
        with self._lock:
            self._drop_what_is_outdated(model)
            if self._fingerprint is None:
                self._fingerprint, self._ways = Fingerprint(model), _ways(model)
            self._kept.append(twin)
            while self._kept and self._nbytes() > max_bytes:
                self._kept.popleft()
            return self._nbytes()

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._kept.clear()
            self._fingerprint = None

    def _drop_what_is_outdated(self, model: PreTrainedModel) -> None:
        if self._fingerprint is None:
            return
        if self._ways != _ways(model) or self._fingerprint.difference(model) is not None:
            self._kept.clear()
            self._fingerprint = None

    def _nbytes(self) -> int:
        """Bytes of the storage that the kept caches refer to, each once."""
        parts: list[Tensor] = [
            part
            for cache in self._kept
            for layer in cache.layers
            for segment in layer.segments.values()
            for part in segment
        ]
        return sum({(part.device, part.data_ptr()): part.untyped_storage().nbytes() for part in parts}.values())


def _ways(model: PreTrainedModel) -> tuple[torch.dtype | None, Any]:
    """By what a model computes otherwise with the same weights: autocast around it, or in a `forward` of its own."""
    return autocast_dtype(model.device), vars(model).get("forward")
