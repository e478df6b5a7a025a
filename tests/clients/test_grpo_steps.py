"""The program that measures steps of GRPO, with tiny numbers."""

from __future__ import annotations

import pytest

from hf_fastdecode.files import read_rows

from .grpo_step_on_gpu import main

TINY = {"samples": 2, "prompts": 1, "new_tokens": 6, "shots": 0, "passes": 1, "rollouts": 2, "device": "cpu"}


def test_rows_say_how_log_probabilities_agree(tmp_path):
    """Also of LoRA under autocast, and of routing that is replayed; an earlier run's rows are kept."""
    out, steps, trainer = tmp_path / "rows.csv", "log-probs of steps", "log-probs of trainer"
    lora = {"precision": ["bf16 autocast"], "weights": ["LoRA"]}
    main(out, way=[steps, trainer], shape="tiny-qwen3", **lora, **TINY)
    main(out, way=[f"{trainer}, replayed"], shape="tiny-qwen3-moe", precision=["fp32"], weights=["all"], **TINY)
    rows = read_rows(out)
    assert [(row["model"], row["way"]) for row in rows] == [
        ("tiny-qwen3", steps),
        ("tiny-qwen3", trainer),
        ("tiny-qwen3-moe", f"{trainer}, replayed"),
    ]
    for row in rows:
        counts = {name: int(count) for name, count in row.items() if name.startswith("from ")}
        assert 0 < int(row["tokens"]) == sum(counts.values()) <= 2 * 2 * 6
        assert counts["from 0"] == pytest.approx(float(row["same_bits"]) * int(row["tokens"]))
    rounding, *same = (float(row["largest_difference"]) for row in rows)
    assert max(same) < 1e-5 < rounding
