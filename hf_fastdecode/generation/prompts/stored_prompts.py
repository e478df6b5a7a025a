"""Longest-prefix lookup over a cache's rows, by bisection of their sorted tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...attention.forest import Path
from ...cache.shared import SharedContextCache

_ITEM = 8  # bytes of an int64 id


class StoredPrompts:
    """Sorted tokens of the distinct paths of a cache's rows.

    Args:
        cache: A cache with empty suffixes.

    Attributes:
        next_segment: Number of the cache's next segment.
    """

    def __init__(self, cache: SharedContextCache):
        self.next_segment = len(cache.segment_tokens)
        self._paths = list(dict.fromkeys(cache.forest.paths))
        # Sorted as bytes by memcmp; any order works that makes texts with a common prefix neighbours.
        texts = [_bytes(cache.path_tokens(path)) for path in self._paths]
        self._numbers = sorted(range(len(texts)), key=texts.__getitem__)
        self._texts = [texts[number] for number in self._numbers]
        self._first: dict[tuple[int, int], int] = {}

    def longest_match(self, tokens: Tensor) -> tuple[Path, int]:
        """The cache's first path with the longest common prefix, and the length of that prefix."""
        text = _bytes(tokens)
        length = self._longest(text)
        if length == 0:
            return (), 0
        size = length * _ITEM
        head = text[:size]
        alike = (
            bisect_left(self._texts, head),
            bisect_right(self._texts, head, key=lambda other: other[:size]),
        )
        if alike not in self._first:
            self._first[alike] = min(self._numbers[slice(*alike)])
        return self._paths[self._first[alike]], length

    def match_lengths(self, prompts: Sequence[Tensor]) -> list[int]:
        """Longest common prefix of each prompt with any path."""
        return [self._longest(_bytes(tokens)) for tokens in prompts]

    def covers(self, other: StoredPrompts) -> bool:
        """Whether every prompt of `other` is a prefix of a prompt here."""
        return all(any(near.startswith(text) for near in self._neighbours(text)) for text in other._texts)

    def _longest(self, text: bytes) -> int:
        """Longest common prefix of a text with any path, in tokens."""
        ids = np.frombuffer(text, np.int64)
        return max((common_prefix(ids, np.frombuffer(near, np.int64)) for near in self._neighbours(text)), default=0)

    def _neighbours(self, text: bytes) -> list[bytes]:
        """The sorted texts before and after this one; one of them has the longest common prefix."""
        place = bisect_left(self._texts, text)
        return self._texts[max(0, place - 1) : place + 1]


def _bytes(tokens: Tensor) -> bytes:
    return tokens.long().numpy().tobytes()


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the common prefix of two arrays."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    place = int(different.argmax()) if length else 0
    return place if length and different[place] else length
