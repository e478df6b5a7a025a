"""The corpus as tokens, and training rows packed from it: fresh random documents of many examples each."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from tqdm import tqdm

from hf_fastdecode.assets import SEPARATOR

from .corpus import BLOCK, training_block

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_OVERLAP: Final = 512  # longest example that a row start may have to skip, in tokens


@dataclass(frozen=True)
class Corpus:
    """Examples laid end to end, each followed by the separator. All on one device.

    Attributes:
        tokens: ``[total]`` int32.
        starts: ``[examples]`` int64, where each example begins.
        lengths: ``[examples]`` int64.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor


def separator_ids(tokenizer: Tokenizer) -> list[int]:
    """The separator as it is tokenized between two examples (at the end of a text it would merge)."""
    ids: list[int] = tokenizer.encode(SEPARATOR + "You").ids[:-1]
    return ids


def _encode_block(index: int, seed: int, path: str) -> tuple[np.ndarray, np.ndarray]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tail = separator_ids(tokenizer)
    rows = [
        encoding.ids + tail for encoding in tokenizer.encode_batch([e.as_text() for e in training_block(seed, index)])
    ]
    flat = np.fromiter((token for row in rows for token in row), dtype=np.uint16)
    return flat, np.array([len(row) for row in rows], dtype=np.int64)


def build_corpus(seed: int, examples: int, tokenizer_file: Path, workers: int | None = None) -> Corpus:
    """Generate and encode at least `examples` training examples on all cores; the result depends on the seed alone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes below are the parallelism
    blocks = -(-examples // BLOCK)
    encode = partial(_encode_block, seed=seed, path=str(tokenizer_file))
    with multiprocessing.get_context("spawn").Pool(workers or os.cpu_count()) as pool:
        parts = list(tqdm(pool.imap(encode, range(blocks)), total=blocks, desc="corpus", unit="block"))
    lengths = torch.from_numpy(np.concatenate([part[1] for part in parts]))
    tokens = torch.from_numpy(np.concatenate([part[0] for part in parts]).astype(np.int32))
    return Corpus(tokens, lengths.cumsum(0) - lengths, lengths)


class Packer:
    """Rows of packed examples. Row r of a step is a pure function of (seed, step), so training resumes anywhere."""

    def __init__(self, corpus: Corpus, seed: int, device: torch.device, tokens_per_step: int) -> None:
        self.corpus = Corpus(corpus.tokens.to(device), corpus.starts.to(device), corpus.lengths.to(device))
        self.tokens_per_step = tokens_per_step
        self.seed, self.device = seed, device
        self.total = int(corpus.lengths.sum())
        usable = self.total - tokens_per_step - _OVERLAP
        if usable < tokens_per_step:
            raise ValueError(
                f"a corpus of {self.total} tokens is less than two steps of {tokens_per_step}; ask for more examples"
            )
        self.steps_per_epoch = usable // tokens_per_step
        self._epoch = -1

    def _shuffle(self, epoch: int) -> None:
        """Lay the examples end to end in a new order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.corpus.lengths), generator=generator).to(self.device)
        lengths = self.corpus.lengths[order]
        self._bounds = lengths.cumsum(0) - lengths
        shift = (self.corpus.starts[order] - self._bounds).repeat_interleave(lengths)
        self._stream = self.corpus.tokens[shift + torch.arange(self.total, device=self.device)]
        self._epoch = epoch

    def rows(self, step: int, length: int) -> torch.Tensor:
        """``[tokens_per_step // length, length + 1]`` int64 tokens; every row starts with a whole example."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._shuffle(epoch)
        count = self.tokens_per_step // length
        wanted = position * self.tokens_per_step + torch.arange(count, device=self.device) * length
        first = self._bounds[torch.searchsorted(self._bounds, wanted)]
        return self._stream[first[:, None] + torch.arange(length + 1, device=self.device)].long()
