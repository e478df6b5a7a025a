"""Passes over rows that begin alike as data, without torch: training steps and scoring, sets of them, their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_fastdecode.measurement.rows import Case, Measurement, by, markdown

from ..page_tables import cell

FORWARD_WAYS = {"stock": "transformers", "enabled": "hf_fastdecode.enable(model, share_forward=True)"}
"""Ways and what they are; `tests/clients/forward_peers.py` adds those of other programs."""


@dataclass(frozen=True)
class ForwardCase(Case):
    """A pass over `samples` completions of each of the prompts: log-probabilities of the completions' tokens.

    `work` is ``training`` (their mean and its gradient) or ``scoring`` (no gradient).
    """

    shape: str
    work: str
    prompts: int
    context: int  # tokens of a prompt
    samples: int
    completion: int
    checkpointing: bool = False
    layers: int = 0  # of the model, where not all: their gradients do not fit
    dtype: str = "bfloat16"

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    def columns(self) -> dict[str, Any]:
        sizes = [*([self.prompts] if self.prompts > 1 else []), self.context, self.samples, self.completion]
        return {"case": f"{self.shape}-{self.work}-{'x'.join(map(str, sizes))}"} | super().columns()


def _cases(shape: str, layers: int = 0) -> list[ForwardCase]:
    """The cases of a model, the most important ones first."""
    score = ForwardCase(shape, "scoring", 1, 4096, 16, 256)
    train = replace(score, work="training", context=1182, checkpointing=True, layers=layers)
    return [
        train,
        replace(score, context=2048, samples=4, completion=32),
        score,
        replace(train, context=4096),
        replace(train, context=512, completion=1024),
        replace(train, prompts=16, samples=1),  # nothing is shared
        replace(score, prompts=16, context=1182, samples=1),
        replace(train, checkpointing=False),
        replace(train, prompts=4),
    ]


_TINY = ForwardCase("tiny", "training", 2, 40, 3, 7, checkpointing=True, dtype="float32")

FORWARD_SETS: dict[str, list[ForwardCase]] = {
    "qwen3-4b": _cases("qwen3-4b"),
    "8b-gqa": _cases("8b-gqa")[:6],
    "7b-mha": _cases("7b-mha")[:6],
    "gpt-oss-20b": sorted(_cases("gpt-oss-20b", layers=12)[:4], key=lambda case: case.layers),
    "tiny": [_TINY, replace(_TINY, work="scoring", checkpointing=False)],
}
"""By name: a model with random weights each; of gpt-oss-20b, half the layers are trained. ``tiny`` is for a CPU."""


def forward_table(rows: Sequence[Measurement], *, brief: bool = False) -> str:
    """A line for each case, stock → enabled, and seconds of other ways; if `brief`, seconds alone."""
    compared = "stock", "enabled"
    peers = [] if brief else [way for way in dict.fromkeys(row["way"] for row in rows) if way not in compared]
    lines = []
    for ways in by(rows, "case", "checkpointing", "layers"):
        both = [ways[way] for way in compared if way in ways]
        first, gains = next(iter(ways.values())), len(both) == 2 and {row["status"] for row in both} == {"ok"}
        kept = ", no checkpointing" if first["work"] == "training" and first["checkpointing"] == "False" else ""
        line = {
            "model": first["shape"] + (f", {first['layers']} layers" if first["layers"] != "0" else ""),
            "pass": first["work"] + kept,
            "prompts": first["prompts"],
            "prompt x samples x completion": f"{first['context']} x {first['samples']} x {first['completion']}",
            "seconds": " → ".join(map(_seconds, both)),
            "speed-up": f"{float(both[0]['s_p50']) / float(both[1]['s_p50']):.1f}x" if gains else "",
        }
        if not brief:
            line["tokens computed"] = f"{int(both[0]['tokens']):,} → {int(both[1]['computed']):,}" if gains else ""
            line["peak GiB"] = " → ".join(cell(row, lambda one: _gib(one["peak_bytes"])) for row in both)
            line["first pass"] = " → ".join(cell(row, lambda one: f"{float(one['first_call_s']):.3f}") for row in both)
        lines.append(line | {way: _seconds(ways.get(way)) for way in peers})
    first = rows[0]
    where = f"{first['device']}, {first['dtype']}, torch {first['torch']}, transformers {first['transformers']}"
    note = "stock → `enable(model)`; medians; training with gradient checkpointing"
    note += "" if brief else "; memory with weights and gradients"
    return markdown([*lines[0]], [[*line.values()] for line in lines], f"{where}; {note}.")


def _seconds(row: Measurement | None) -> str:
    return cell(row, lambda one: f"{float(one['s_p50']):.3f}")


def _gib(size: str) -> str:
    return f"{float(size) / 2**30:.1f}" if size else "not known"
