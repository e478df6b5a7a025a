"""A node's memory, links and collectives, fitted to the committed rows of attention over 2, 4 and 8 GPUs.

Lines by least squares of relative errors, through rows whose contexts one row of queries reads:

- memory: the time of *one-gpu* against the bytes of keys and values. Other ways take the rest of their time for
  communication, and for launches that go with it.
- a link's bandwidth, and a pass's own time: a pass of *ring* against the bytes of keys and values that it sends.
- a link's latency, and an all-gather's own time: the rest of *tree* against the number of further GPUs.
- an all-reduce's own time: what *three-all-reduces* then takes longer, a third of it, on average.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean

from hf_fastdecode.files import read_rows
from hf_fastdecode.measurement.rows import Measurement

from .. import RESULTS
from .cost_model import Cluster, Heads, Link, Prediction, predict

DEVICE = "NVIDIA H200"
"""The GPU whose rows are fitted."""


def measured_cluster() -> Cluster:
    """Nodes as the committed rows have them; what is between nodes was not measured."""
    return fitted(row for path in sorted(RESULTS.glob("parallel-attention*.csv")) for row in read_rows(path))


def fitted(rows: Iterable[Measurement]) -> Cluster:
    """The cluster of rows of attention in all ways, over two numbers of GPUs or more."""
    right = [row for row in rows if row["device"] == DEVICE and row["status"] == "ok" and row["rows"] == "1"]

    def of(way: str) -> list[Measurement]:
        return [row for row in right if row["way"] == way]

    memory = _line((_part_bytes(row, gpus=1), _seconds(row)) for row in of("one-gpu"))
    passes = _line((_part_bytes(row, _gpus(row)), _pass_s(row, memory)) for row in of("ring"))
    cluster = Cluster(memory, Link(passes.bytes_per_s, latency_s=0.0))
    latency, gather_s = _weighted_line(
        (_seconds(row) ** -2, _gpus(row) - 1, _seconds(row) - predict_row(cluster, row).one_gather_s)
        for row in of("tree")
    )
    cluster = replace(cluster, within=Link(passes.bytes_per_s, latency), gather_s=gather_s)
    reduces = of("three-all-reduces")
    reduce_s = fmean(
        [(_seconds(row) - predict_row(cluster, row).tree_s) / 3 for row in reduces],
        weights=[_seconds(row) ** -2 for row in reduces],
    )
    return replace(cluster, reduce_s=reduce_s, pass_s=passes.latency_s - latency)


def predict_row(cluster: Cluster, row: Measurement) -> Prediction:
    """What the cluster takes for a row's layer and context."""
    return predict(cluster, _heads(row), int(row["context"]), _gpus(row))


def _line(points: Iterable[tuple[float, float]]) -> Link:
    """The line through bytes and seconds as a link."""
    per_byte, latency_s = _weighted_line((seconds**-2, size, seconds) for size, seconds in points)
    return Link(1 / per_byte, latency_s)


def _weighted_line(points: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Slope and intercept through points of a weight, a place and a height.

    A weight is one over the square of the measured seconds, so that errors are relative and all sizes count alike:
    a hundredth of a long context's time is more than all that its communication takes.
    """
    weighted = list(points)
    total = sum(weight for weight, _, _ in weighted)
    middle = sum(weight * place for weight, place, _ in weighted) / total
    level = sum(weight * height for weight, _, height in weighted) / total
    rise = sum(weight * (place - middle) * (height - level) for weight, place, height in weighted)
    slope = rise / sum(weight * (place - middle) ** 2 for weight, place, _ in weighted)
    return slope, level - slope * middle


def _heads(row: Measurement) -> Heads:
    return Heads(int(row["heads"]), int(row["kv_heads"]), int(row["head_dim"]))


def _part_bytes(row: Measurement, gpus: int) -> float:
    return _heads(row).kv_bytes(int(row["context"]) / gpus)


def _pass_s(row: Measurement, memory: Link) -> float:
    """A pass of a ring, which ends with attention to the last part."""
    gpus = _gpus(row)
    return (_seconds(row) - memory.seconds(_part_bytes(row, gpus))) / (gpus - 1)


def _gpus(row: Measurement) -> int:
    return int(row["ranks"])


def _seconds(row: Measurement) -> float:
    return 1e-6 * float(row["us_p50"])
