"""Prefix reuse across calls: stores the nodes of recent calls, so that later prompts prefill only new tokens.

Without the option, calls whose prompts begin like earlier ones are noticed, to advise it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import tensor_version
from ...attention.forest import Forest
from ...cache.forest_cache import consolidate
from ...cache.layout import ModelLayout
from ...cache.shared import SharedContextCache
from ...parallel.groups import local_part
from ..fingerprint import Fingerprint
from ..options import Options
from ..snapshot import pass_settings
from ..structure import Structure
from .prompt_plan import PromptGroup, StoredPrompts

_MOST_CALLS = 64
"""Kept calls; every new prompt is compared with all of them."""

_MOST_LEVELS = 8
"""Depth from which the nodes of a prompt that grows from call to call are merged, which copies them."""


@dataclass
class _Kept:
    """The nodes of a call, one row per prompt, and the prompts' tokens."""

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
        self._lock = Lock()
        self._kept: deque[_Kept] = deque()
        self._fingerprint: Fingerprint | None = None
        self._settings: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixStore:
        return PrefixStore()  # a copy of the model has other weights

    def find(
        self, model: PreTrainedModel, groups: list[PromptGroup], structure: Structure, *, least: int
    ) -> tuple[SharedContextCache | None, Fingerprint | None]:
        """Return the kept cache with most of the prompts' tokens, or None if the longest match is under `least`.

        With it, the fingerprint that the model has by all that the host can tell, if there is one; for `keep`, and to
        compare the model's numbers with before the cache's are used.
        """
        with self._lock:
            self._drop_if_outdated(model, structure)
            best, most = None, 0
            prompts = [group.tokens for group in groups]
            for kept in self._kept:
                lengths = kept.prompts.match_lengths(prompts)
                if max(lengths) >= least and sum(lengths) > most:
                    best, most = kept, sum(lengths)
            if best is None:
                return None, self._fingerprint
            self._kept.remove(best)
            self._kept.append(best)
            return best.cache, self._fingerprint

    def keep(
        self,
        model: PreTrainedModel,
        cache: SharedContextCache,
        max_bytes: int,
        structure: Structure,
        *,
        found: Fingerprint | None = None,
    ) -> int:
        """Keep the nodes of a call's cache, with one row per distinct prompt; returns the bytes kept over all calls.

        `found` is the fingerprint that `find` has compared the model with in this call, which is not done again.

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
            if found is None or found is not self._fingerprint:
                self._drop_if_outdated(model, structure, sampled=True)
            if self._fingerprint is None:
                self._fingerprint, self._settings = Fingerprint(model, structure.walk), _settings(model, structure)
            if not any(kept.prompts.covers(prompts) for kept in self._kept):
                self._kept = deque(kept for kept in self._kept if not prompts.covers(kept.prompts))
                self._kept.append(_Kept(twin, prompts))
            while len(self._kept) > _MOST_CALLS or (self._kept and self._nbytes() > max_bytes):
                self._kept.popleft()
            return self._nbytes()

    def clear(self) -> None:
        """Drop all kept caches."""
        with self._lock:
            self._kept.clear()
            self._fingerprint = None

    def _drop_if_outdated(self, model: PreTrainedModel, structure: Structure, *, sampled: bool = False) -> None:
        if (fingerprint := self._fingerprint) is None:
            return
        walk = structure.walk
        if (
            self._settings != _settings(model, structure)
            or fingerprint.host_difference(model, walk, structure.known) is not None
            or (sampled and fingerprint.sampled_difference(walk) is not None)
        ):
            self._kept.clear()
            self._fingerprint = None

    def _nbytes(self) -> int:
        """Bytes of the kept caches' storage, shared storage counted once."""
        storages: dict[tuple[torch.device, int], int] = {}
        for kept in self._kept:
            storages |= kept.storages
        return sum(storages.values())


def _settings(model: PreTrainedModel, structure: Structure) -> tuple[Any, ...]:
    """What kept nodes depend on beyond the model's weights and modules."""
    return *pass_settings(model, structure.configs), structure.parallel


_CALLS_TO_TELL = 3
_RECENT = 8  # prompts that a new one is compared with
_LONGEST = 1024  # tokens by which prompts are compared


class RepeatedPrompts:
    """Counts calls whose first prompt begins like one of the last few, for the same weights."""

    def __init__(self) -> None:
        self._recent: deque[list[int]] = deque(maxlen=_RECENT)
        self._weights: object = None
        self._repeated = 0
        self._lock = Lock()  # calls of several threads are counted together

    def __deepcopy__(self, memo: dict[int, Any]) -> RepeatedPrompts:
        return RepeatedPrompts()

    def advice(self, model: PreTrainedModel, prompt: Tensor, *, least: int) -> str | None:
        """Take note of a call's prompt, and say what would help once it is the third that begins like an earlier one.

        Prompts begin alike by their first `least` tokens. After a training step they must be computed again, so that
        counting begins anew.
        """
        if not len(prompt) >= least <= _LONGEST:
            return None
        weight = next(model.parameters())
        weights = (local_part(weight).data_ptr(), tensor_version(weight))
        beginning = prompt[:least].tolist()
        with self._lock:
            if weights != self._weights:
                self._weights, self._repeated = weights, 0
                self._recent.clear()
            self._repeated += beginning in self._recent
            self._recent.append(beginning)
            repeated = self._repeated
        if repeated != _CALLS_TO_TELL:
            return None
        return (
            f"{repeated} calls had a prompt that begins like an earlier call's; "
            "hf_fastdecode.enable(model, reuse_prefix=True) keeps prompts, so that later calls prefill new tokens only"
        )
