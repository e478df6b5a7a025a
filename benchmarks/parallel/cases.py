"""Cases over several processes as data, without torch: attention of a layer stack, decode steps, collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_fastdecode.measurement.rows import Case

ATTENTION_WAYS: dict[str, str] = {
    "one-gpu": "the whole context on rank 0",
    "tree": "this package: kernels over each rank's part, one all-gather a layer, one merge",
    "three-all-reduces": "the same kernels, merged as in algorithm 3 of the paper: maximum, numerator, denominator",
    "ring": "keys and values passed round, double-buffered while the part before is attended to",
    "ring-partials": "partials passed round: what passing queries round comes to where every rank has them",
    "no-communication": "each rank's part alone, which is not the result: the time that communication adds to",
}

STEP_WAYS: dict[str, str] = {
    "one-gpu": "hf_fastdecode on rank 0 alone",
    "sequence": 'enable(model, sequence_parallel="auto"): the context divided, weights on every rank',
    "tensor": 'a model loaded with tp_plan="auto", enabled: heads and weights divided',
    "helix": "the context divided, and the weights of all but the attention heads (sequence_parallel_plan)",
    "stock-tensor": "the same by transformers alone",
}

COLLECTIVES: dict[str, str] = {
    "all-gather": "each rank gives so many bytes, and gets those of all",
    "all-reduce": "all_reduce of so many bytes in fp32",
    "send-receive": "each rank sends so many bytes to the next",
}
"""Collectives that are timed alone."""

FILLS = ("random", "prefill")
"""Where the keys and values of a context come from: drawn from a normal distribution, or computed."""

SUFFIX = 64
"""Tokens that each row of an attention case has of its own before the new one."""


@dataclass(frozen=True)
class AttentionCase(Case):
    """Attention of one decode step of a layer stack over one context that all rows share."""

    shape: str  # whose layers and heads these are
    context: int
    rows: int
    ranks: int  # processes that the context is divided between
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.context % self.ranks:
            raise ValueError(
                f"the context must be a multiple of the number of processes, {self.ranks}, so that the parts passed "
                f"round are equal, got {self.context}; give {self.context - self.context % self.ranks}"
            )

    @property
    def tokens_here(self) -> int:
        return self.context // self.ranks

    def stored_bytes(self, itemsize: int) -> int:
        """``2 t d``: keys and values of one rank's part in one layer (equation 11)."""
        return 2 * self.tokens_here * self.kv_heads * self.head_dim * itemsize

    def columns(self) -> dict[str, Any]:
        return {"case": f"attention-{self.shape}-m{self.context}-n{self.rows}"} | super().columns()


@dataclass(frozen=True)
class StepCase(Case):
    """Decode steps of a model over one context that all rows share."""

    shape: str
    context: int
    rows: int
    ranks: int
    new_tokens: int  # drawn for each row in a timed call
    fill: str  # one of `FILLS`
    dtype: str = "bfloat16"

    def columns(self) -> dict[str, Any]:
        return {"case": f"steps-{self.shape}-m{self.context}-n{self.rows}"} | super().columns()


@dataclass(frozen=True)
class CollectiveCase(Case):
    """A collective in which each rank gives so many bytes."""

    bytes: int
    ranks: int

    def columns(self) -> dict[str, Any]:
        return {"case": f"collective-{self.bytes}"} | super().columns()


def collective_cases(ranks: int, *, most: int = 4 << 20) -> list[CollectiveCase]:
    """From 16 KiB to `most` bytes, each four times the one before."""
    return [CollectiveCase(size, ranks) for size in (1 << bits for bits in range(14, 40, 2)) if size <= most]


_PARTIAL = 4  # bytes of a partial's element: fp32


def paper_bytes(case: AttentionCase, itemsize: int) -> dict[str, tuple[int, int]]:
    """Bytes that a rank sends and holds in one layer of ``ring`` and of ``tree``, by Tree Attention's equations.

    The paper counts elements, for multi-head attention with a context for each of `b` rows. Where KV heads are fewer,
    and rows share one context, keys and values are narrower and are there once: ``2 t d`` has the width of the KV
    heads here, and ``b`` stands with queries and partials alone. Sent: ``2 t d p`` (10), and ``2 (p - 1) / p (b d + 2
    b n_h)`` (14). Held: ``4 t d + 2 b d`` (8), and ``2 t d + 2 b d + 2 b n_h`` (9).
    """
    stored, queries = case.stored_bytes(itemsize), case.rows * case.heads * case.head_dim
    partials = (queries + 2 * case.rows * case.heads) * _PARTIAL
    return {
        "ring": (stored * case.ranks, 2 * stored + 2 * queries * itemsize),
        "tree": (2 * (case.ranks - 1) * partials // case.ranks, stored + queries * itemsize + partials),
    }
