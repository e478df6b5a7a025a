"""Decoding over two processes on the CPU: ways against the oracle, and a row of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ops.inputs import BOUND
from benchmarks.parallel.cases import ATTENTION_WAYS

from ...fresh_processes import run_fresh
from ...ports import place_of
from ...workers import made_once


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return made_once(tmp_path_factory, "measured", lambda: _seen(tmp_path_factory))


def _seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("seen")
    environment = place_of(2) | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    code = "import sys; from tests.benchmarks.parallel.two_processes import main; main(sys.argv[1])"
    done = run_fresh(code, str(out), **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("way", ATTENTION_WAYS)
def test_ways_against_the_oracle(seen, way):
    errors = [found["attention"][way][0] for found in seen if way in found["attention"]]
    if way == "no-communication":
        assert min(errors) > BOUND  # each part alone is not the result
    else:
        assert max(errors) <= BOUND
        assert len(errors) == (1 if way == "one-gpu" else 2)


def test_bytes_sent_are_counted(seen):
    sent = {way: bytes_of for way, (_, bytes_of) in seen[0]["attention"].items()}
    partial = 2 * 4 * (32 + 1) * 4  # rows, heads, an output and a log-sum-exp, fp32
    assert sent == {
        "one-gpu": 0,
        "tree": partial,
        "three-all-reduces": partial + 2 * 4 * 4,  # 2 (p - 1) / p = 1 of the output, the maximum and the denominator
        "ring": 2 * 2 * 32 * 32 * 4,  # keys and values: KV heads, half of the tokens, head_dim, fp32
        "ring-partials": partial,
        "no-communication": 0,
    }


def test_rows_of_each_kind(seen):
    rows = seen[0]["measured"]
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "ok")
    of_ours = [row for row in rows.values() if row.get("ran")]
    assert [row["ran"] for row in of_ours] == ["eager, sampler hf"] * 4
    bytes_of = [row["kv_bytes"] for row in of_ours]
    assert bytes_of[0] == 2 * 2 * 79 * 2 * 32 * 4  # keys and values, layers, tokens, KV heads, head_dim, fp32
    # Of 79 tokens rank 0 has 40; split heads are halves.
    assert bytes_of[1:] == [bytes_of[0] * 40 // 79, bytes_of[0] // 2, bytes_of[0] * 40 // 79]
