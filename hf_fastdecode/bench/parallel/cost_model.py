"""Predicts attention of a decode step over many GPUs, by the cost model of Tree Attention (section 5.3).

A cluster has two levels: links within a node, and slower ones between nodes. A message takes the latency of its link,
and its bytes over the bandwidth. Attention takes the bytes of the keys and values that a GPU reads over the bandwidth
of its memory. Launches, and what a kernel takes at least, are left out: these are floors, and ratios of them say what
communication alone makes of a way. (The paper measured tree 8 times as fast as ring at most, on 128 GPUs over 5.12M
tokens, in programs that have these costs too.)

- *ring*: every GPU attends to all `p` parts, each of which it receives from its neighbour while it attends to the one
  before. The slowest link paces all of them: ``t_attend + (p - 1) max(t_attend, t_link)``.
- *tree*: every GPU attends to its part; three all-reduces (algorithm 3) merge a maximum, a numerator and a
  denominator. As section 5.3 says of NCCL, each is a ring within the nodes and a tree between them.
- *one all-gather*: the same with one collective that gives every GPU all partials, as this package does: GPUs of a
  node exchange theirs at once, then nodes double what they know, all partials through each GPU's link.

Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

PAPER_CONTEXTS = (80_000, 640_000, 5_120_000)
"""Contexts within the paper's range; at the last one it has its largest speed-up, on 128 GPUs."""

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of GPUs that are predicted."""

_PARTIAL = 4  # bytes of a partial's element


@dataclass(frozen=True)
class Link:
    """A link between two GPUs: bytes a second in each direction, and seconds until a message begins to arrive."""

    bytes_per_s: float
    latency_s: float

    @classmethod
    def parse(cls, name: str, text: str) -> Link:
        """The link of ``GB/s,microseconds``; ValueError for others."""
        try:
            rate, latency = map(float, text.split(","))
        except ValueError:
            rate = latency = math.nan
        if not (0 < rate < math.inf and 0 <= latency < math.inf):
            raise ValueError(
                f"--{name} must be GB/s above 0 and microseconds of at least 0 with a comma between, got {text!r}; "
                "give such as 450,1"
            )
        return cls(1e9 * rate, 1e-6 * latency)

    def seconds(self, size: float) -> float:
        """Of a message of so many bytes."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs; by default 8 H100 each, as in the paper: NVLink 4, 400 Gb/s InfiniBand for each GPU."""

    within: Link = Link(450e9, 1e-6)
    between: Link = Link(50e9, 5e-6)
    gpus_of_node: int = 8
    memory_bytes_per_s: float = 3.35e12

    def all_reduce_s(self, gpus: int, size: float) -> float:
        """A ring within each node, and a tree between the nodes: up and down, each GPU's share over its own link."""
        here, nodes = min(gpus, self.gpus_of_node), -(-gpus // self.gpus_of_node)
        seconds = 2 * (here - 1) * self.within.seconds(size / here)
        return seconds + 2 * math.ceil(math.log2(nodes)) * self.between.seconds(size / here)

    def all_gather_s(self, gpus: int, size: float) -> float:
        """All to all within each node, then nodes double what they know over the links of all their GPUs."""
        nodes = -(-gpus // self.gpus_of_node)
        seconds = self.within.latency_s + (gpus - nodes) * size / self.within.bytes_per_s
        rounds = math.ceil(math.log2(nodes))
        return seconds + rounds * self.between.latency_s + (nodes - 1) * size / self.between.bytes_per_s

    def ring_link(self, gpus: int) -> Link:
        """The slowest link of a ring through all GPUs."""
        return self.within if gpus <= self.gpus_of_node else self.between


@dataclass(frozen=True)
class Heads:
    """The heads of one layer, whose numbers take 2 bytes."""

    heads: int
    kv_heads: int
    head_dim: int

    def kv_bytes(self, tokens: float) -> float:
        """Keys and values of so many tokens."""
        return 4 * tokens * self.kv_heads * self.head_dim

    @property
    def numerator_bytes(self) -> int:
        """A numerator, or a partial's output, of one row."""
        return _PARTIAL * self.heads * self.head_dim

    @property
    def denominator_bytes(self) -> int:
        """A denominator, a maximum, or a partial's log-sum-exp, of one row."""
        return _PARTIAL * self.heads


PAPER_HEADS = Heads(16, 16, 128)
"""The attention block that the paper measures (section 6.1)."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of one layer and row.

    Attributes:
        attend_s: Attention to one GPU's part.
        one_gather_s: One all-gather of what the GPUs found, on top of that.
    """

    context: int
    gpus: int
    attend_s: float
    ring_s: float
    tree_s: float
    one_gather_s: float


def predict(cluster: Cluster, heads: Heads, context: int, gpus: int) -> Prediction:
    """One layer of one row's decode step, with the context divided between so many GPUs."""
    part = heads.kv_bytes(context / gpus)
    attend = part / cluster.memory_bytes_per_s
    passing = cluster.ring_link(gpus).seconds(part)
    ring = attend + (gpus - 1) * max(attend, passing)
    small, large = heads.denominator_bytes, heads.numerator_bytes
    tree = attend + sum(cluster.all_reduce_s(gpus, size) for size in (small, large, small))
    gather = attend + cluster.all_gather_s(gpus, large + small)
    return Prediction(context, gpus, attend, ring, tree, gather)


def predictions(
    cluster: Cluster, heads: Heads, contexts: Iterable[int], gpus: Iterable[int] = GPUS
) -> list[Prediction]:
    """For each context, every number of GPUs."""
    numbers = list(gpus)
    return [predict(cluster, heads, context, count) for context in contexts for count in numbers]
