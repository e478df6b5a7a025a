"""What the pages on other programs show works, on the embedded model."""

from __future__ import annotations

import re
from pathlib import Path

import hf_fastdecode as fd

DOCS = Path(__file__).parents[2] / "docs"


def run_blocks(page: str) -> dict:
    """The names that a page's Python blocks leave, run one after another."""
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        exec(block, names)
    return names


def test_rollouts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = run_blocks("rl.md")["trainer"]
    assert fd.explain(trainer.model).last_call.path == "shared"
    assert all(step["reward_std"] > 0 for step in trainer.state.log_history if "reward_std" in step)


def test_evaluation_harnesses():
    names = run_blocks("evaluation-harnesses.md")
    assert fd.explain(names["decoder"].model).last_call.path == "shared"
    assert len(names["samples"]) == 8
    assert names["harness"].model is names["model"]
