"""A stopping criterion that ends each row by its own stop rule."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import StoppingCriteria

from hf_fastdecode.measurement.calls import ANCHOR, continuation

from ..prompts import StopRule

_ROWS_OF_A_STEP = 128
"""Rows whose tokens are decoded to text in half a millisecond."""


class RowStopping(StoppingCriteria):
    """Ends each row by its own stop rule, once nothing that may follow belongs to the completion.

    Text is decoded after every step; with ``k * 128`` rows after every ``k``-th one, because decoding makes the host
    wait for the device. A row then ends some tokens late, which does not change its completion. `prompts` are
    ``[rows, width]``; `end_tokens` count for `finished_at`: when each row finished, by `time.perf_counter`. With
    `special`, rules read the text of special tokens too. A tokenizer without a Rust backend decodes a row's whole text
    each time.
    """

    def __init__(
        self,
        tokenizer: Any,
        rules: Sequence[StopRule],
        prompts: Tensor,
        end_tokens: Sequence[int],
        *,
        special: bool = False,
    ):
        self.finished_at: list[float | None] = [None] * len(rules)
        self._tokenizer = tokenizer
        self._rules, self._width = list(rules), prompts.shape[1]
        self._anchors = prompts[:, -ANCHOR:].tolist()
        self._special = special
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # None without Rust: rows are decoded anew
        self._streams: list[DecodeStream | None] = [
            None if self._backend is None else DecodeStream(ids=ids, skip_special_tokens=not special)
            for ids in self._anchors
        ]
        self._texts = [""] * len(rules)
        self._end_tokens = set(end_tokens)
        self._ended = torch.zeros(len(rules), dtype=torch.bool)
        self._seen = 0
        self._steps_between = max(1, len(rules) // _ROWS_OF_A_STEP)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Bool ``[rows]``: which rows have finished, given ``[rows, length]`` tokens."""
        if input_ids.shape[1] - self._width < self._seen + self._steps_between:
            return self._ended.to(input_ids.device)
        drawn = input_ids[:, self._width + self._seen :].tolist()
        self._seen = input_ids.shape[1] - self._width
        for row in (~self._ended).nonzero().flatten().tolist():
            if self._ends(row, drawn[row], input_ids):
                self._ended[row] = True
                self.finished_at[row] = time.perf_counter()
        return self._ended.to(input_ids.device)

    def _ends(self, row: int, tokens: list[int], input_ids: Tensor) -> bool:
        if not self._end_tokens.isdisjoint(tokens):
            return True
        before = len(self._texts[row])
        stream = self._streams[row]
        if stream is not None:
            try:
                self._texts[row] += stream.step(self._backend, tokens) or ""
            except Exception:  # its only kind: the text of more tokens does not begin with that of fewer
                stream = self._streams[row] = None
        if stream is None:
            ids = input_ids[row, self._width :].tolist()
            text = continuation(self._tokenizer, self._anchors[row], ids, special=self._special)
            self._texts[row] = text.removesuffix(
                "\N{REPLACEMENT CHARACTER}"
            )  # a character whose last bytes may follow
        return len(self._texts[row]) != before and self._rules[row].finished(self._texts[row])
