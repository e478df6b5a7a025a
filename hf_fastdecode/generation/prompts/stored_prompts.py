"""The tokens of a cache's rows in sorted order, in which the longest match of a new prompt is found by bisection."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...attention.forest import Path
from ...cache.shared import SharedContextCache

_ITEM = 8  # bytes of an int64 id


class StoredPrompts:
    """The distinct paths of a cache's rows, and the tokens on them.

    Args:
        cache: Of which no row holds a suffix.

    Attributes:
        next_segment: Number of the segment that the cache will store next.
    """

    def __init__(self, cache: SharedContextCache):
        self.next_segment = len(cache.segment_tokens)
        self._paths = list(dict.fromkeys(cache.forest.paths))
        # Bytes are sorted by memcmp. Any order does in which texts that begin alike are neighbours.
        texts = [_bytes(cache.path_tokens(path)) for path in self._paths]
        self._numbers = sorted(range(len(texts)), key=texts.__getitem__)
        self._texts = [texts[number] for number in self._numbers]
        self._first: dict[tuple[int, int], int] = {}

    def longest_match(self, tokens: Tensor) -> tuple[Path, int]:
        """The path that begins with most of these tokens, of several the cache's first one, and with how many."""
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
        """For each prompt, how many of its tokens a path begins with."""
        return [self._longest(_bytes(tokens)) for tokens in prompts]

    def covers(self, other: StoredPrompts) -> bool:
        """Whether each of the other cache's prompts begins one of these."""
        return all(any(near.startswith(text) for near in self._neighbours(text)) for text in other._texts)

    def _longest(self, text: bytes) -> int:
        """The most tokens of a text that a path begins with."""
        ids = np.frombuffer(text, np.int64)
        return max((common_prefix(ids, np.frombuffer(near, np.int64)) for near in self._neighbours(text)), default=0)

    def _neighbours(self, text: bytes) -> list[bytes]:
        """The texts before and after this one in sorted order, of which one has the longest common prefix with it."""
        place = bisect_left(self._texts, text)
        return self._texts[max(0, place - 1) : place + 1]


def _bytes(tokens: Tensor) -> bytes:
    return tokens.long().numpy().tobytes()


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many numbers two arrays both begin with."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    place = int(different.argmax()) if length else 0
    return place if length and different[place] else length
