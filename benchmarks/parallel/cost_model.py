"""Predicts attention of a decode step over many GPUs, by the cost model of Tree Attention (section 5.3).

A cluster has two levels: links within a node, and slower ones between nodes. A message takes the latency of its link,
and its bytes over the bandwidth; attention the bytes of keys and values over the bandwidth of a GPU's memory, and the
time of its launches. `fitted` fits a node's rates to rows of 2, 4 and 8 GPUs; what is between nodes was not measured.

- *ring*: every GPU attends to all `p` parts, each received from its neighbour while it attends to the one before:
  ``t_attend + (p - 1) max(t_attend, t_pass)``, paced by the slowest link.
- *tree*: every GPU attends to its part; three all-reduces (algorithm 3) merge a maximum, a numerator and a
  denominator, each a ring within the nodes and a tree between them (section 5.3).
- *one all-gather*: one collective gives every GPU all partials, as this package does: a ring within the nodes, then
  nodes double what they know, all partials through each GPU's link.

Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from hf_fastdecode.files import read_rows
from hf_fastdecode.measurement.rows import Measurement

from .. import RESULTS

PAPER_CONTEXTS = (80_000, 640_000, 5_120_000)
"""Contexts within the paper's range; at the last one it has its largest speed-up, on 128 GPUs."""

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)

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
        return self.latency_s + size / self.bytes_per_s

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:,.0f} GB/s and {_us(self.latency_s)}"


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs. `measured_cluster` has one whose nodes are measured.

    `gather_s`, `reduce_s` and `pass_s` are what an all-gather, an all-reduce, and keys and values passed on take
    besides their messages within a node: launches, and the merge of what was found.
    """

    memory: Link  # its latency is that of the launches of attention
    within: Link  # its latency is what a small collective takes for each further GPU
    gather_s: float = 0.0
    reduce_s: float = 0.0
    pass_s: float = 0.0
    between: Link = Link(50e9, 5e-6)  # 400 Gb/s InfiniBand a GPU, as in the paper
    gpus_of_node: int = 8

    def all_reduce_s(self, gpus: int, size: float) -> float:
        """A ring within each node, and a tree between the nodes: up and down, each GPU's share over its own link."""
        here, nodes = min(gpus, self.gpus_of_node), -(-gpus // self.gpus_of_node)
        seconds = self.reduce_s + (here - 1) * self.within.seconds(2 * size / here)
        return seconds + 2 * math.ceil(math.log2(nodes)) * self.between.seconds(size / here)

    def all_gather_s(self, gpus: int, size: float) -> float:
        """A ring within each node, then nodes double what they know over the links of all their GPUs."""
        here, nodes = min(gpus, self.gpus_of_node), -(-gpus // self.gpus_of_node)
        seconds = self.gather_s + (here - 1) * self.within.latency_s
        seconds += (gpus - nodes) * size / self.within.bytes_per_s
        rounds = math.ceil(math.log2(nodes))
        return seconds + rounds * self.between.latency_s + (nodes - 1) * size / self.between.bytes_per_s

    def pass_on_s(self, gpus: int, size: float) -> float:
        """A pass of a ring through all GPUs, by its slowest link."""
        if gpus <= self.gpus_of_node:
            return self.pass_s + self.within.seconds(size)
        return self.between.seconds(size)

    def __str__(self) -> str:
        return (
            f"memory of {self.memory}; {self.gpus_of_node} GPUs a node, with links of {self.within}; besides, "
            f"{_us(self.gather_s)} an all-gather, {_us(self.reduce_s)} an all-reduce and {_us(self.pass_s)} a pass; "
            f"{self.between} a GPU between nodes"
        )


@dataclass(frozen=True)
class Heads:
    """The heads of one layer, whose numbers take 2 bytes."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads} heads over {self.kv_heads} KV heads of {self.head_dim}"

    def kv_bytes(self, tokens: float) -> float:
        return 4 * tokens * self.kv_heads * self.head_dim


PAPER_HEADS = Heads(16, 16, 128)
"""The attention block that the paper measures (section 6.1)."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of one layer and row."""

    context: int
    gpus: int
    attend_s: float  # to one GPU's part
    ring_s: float
    tree_s: float
    one_gather_s: float


def predict(cluster: Cluster, heads: Heads, context: int, gpus: int) -> Prediction:
    """One layer of one row's decode step, with the context divided between so many GPUs."""
    part = heads.kv_bytes(context / gpus)
    attend = cluster.memory.seconds(part)
    ring = attend + (gpus - 1) * max(attend, cluster.pass_on_s(gpus, part))
    small = _PARTIAL * heads.heads  # a denominator, a maximum, or a partial's log-sum-exp
    large = small * heads.head_dim  # a numerator
    tree = attend + sum(cluster.all_reduce_s(gpus, size) for size in (small, large, small))
    gather = attend + cluster.all_gather_s(gpus, large + small)
    return Prediction(context, gpus, attend, ring, tree, gather)


def predictions(
    cluster: Cluster, heads: Heads, contexts: Iterable[int], gpus: Sequence[int] = GPUS
) -> list[Prediction]:
    return [predict(cluster, heads, context, count) for context in contexts for count in gpus]


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} us"


DEVICE = "NVIDIA H200"
"""The GPU whose rows are fitted."""


def measured_cluster() -> Cluster:
    """Nodes as the committed rows have them; what is between nodes was not measured."""
    return fitted(row for path in sorted(RESULTS.glob("parallel-attention*.csv")) for row in read_rows(path))


def fitted(rows: Iterable[Measurement]) -> Cluster:
    """The cluster fitted to rows of attention over two numbers of GPUs or more, by least squares of relative errors:

    - memory: the time of *one-gpu* against the bytes of keys and values. Other ways take more time for
      communication, and for launches that go with it.
    - a link's bandwidth, and a pass's own time: a pass of *ring* against the bytes of keys and values that it sends.
    - a link's latency, and an all-gather's own time: the remaining time of *tree* against the number of further GPUs.
    - an all-reduce's own time: a third of what *three-all-reduces* then takes longer, on average.
    """
    right = [row for row in rows if row["device"] == DEVICE and row["status"] == "ok" and row["rows"] == "1"]

    def of(way: str) -> list[Measurement]:
        return [row for row in right if row["way"] == way]

    memory = _line((_part_bytes(row, gpus=1), _seconds(row)) for row in of("one-gpu"))
    # A pass of a ring; the last attention is after all of them.
    parts = [(row, _part_bytes(row, _gpus(row))) for row in of("ring")]
    passes = _line((part, (_seconds(row) - memory.seconds(part)) / (_gpus(row) - 1)) for row, part in parts)
    cluster = Cluster(memory, Link(passes.bytes_per_s, latency_s=0.0))
    latency, gather_s = _weighted_line(
        (_seconds(row), _gpus(row) - 1, _seconds(row) - predict_row(cluster, row).one_gather_s) for row in of("tree")
    )
    cluster = replace(cluster, within=Link(passes.bytes_per_s, latency), gather_s=gather_s)
    reduces = of("three-all-reduces")
    reduce_s = fmean(
        [(_seconds(row) - predict_row(cluster, row).tree_s) / 3 for row in reduces],
        weights=[_seconds(row) ** -2 for row in reduces],
    )
    return replace(cluster, reduce_s=reduce_s, pass_s=passes.latency_s - latency)


def predict_row(cluster: Cluster, row: Measurement) -> Prediction:
    """The prediction for a row's layer and context."""
    return predict(cluster, _heads(row), int(row["context"]), _gpus(row))


def _line(points: Iterable[tuple[float, float]]) -> Link:
    """The line through bytes and seconds as a link."""
    per_byte, latency_s = _weighted_line((seconds, size, seconds) for size, seconds in points)
    return Link(1 / per_byte, latency_s)


def _weighted_line(points: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Slope and intercept through points of measured seconds, one over which is the weight, a place and a height.

    So errors are relative and all sizes count alike: a hundredth of a long context's time is more than all that its
    communication takes.
    """
    seconds, places, heights = map(np.array, zip(*points))
    slope, intercept = np.polyfit(places, heights, 1, w=1 / seconds)
    return float(slope), float(intercept)


def _heads(row: Measurement) -> Heads:
    return Heads(int(row["heads"]), int(row["kv_heads"]), int(row["head_dim"]))


def _part_bytes(row: Measurement, gpus: int) -> float:
    return _heads(row).kv_bytes(int(row["context"]) / gpus)


def _gpus(row: Measurement) -> int:
    return int(row["ranks"])


def _seconds(row: Measurement) -> float:
    return 1e-6 * float(row["us_p50"])
