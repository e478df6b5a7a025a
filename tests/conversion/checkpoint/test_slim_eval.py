"""The table of docs/slim-measurements.md on the embedded tasks is that of the committed rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hf_fastdecode.files import read_rows
from tools.slim_eval import PAGE, ROWS, compare, read_run, replace_rows, table


def test_the_page_shows_the_rows() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition("<!-- table of tools.slim_eval -->\n")[2]
    assert shown.partition("<!-- end of the table -->")[0] == table(read_rows(ROWS))


def save_run(folder: Path, passed: dict[str, int]) -> Path:
    """32 samples a task, all distinct, of which the last so many pass; the later, the likelier."""
    folder.mkdir()
    (folder / "settings.json").write_text("{}")
    at = [(task, index) for task in passed for index in range(32)]
    samples, verdicts = [], []
    for task, index in at:
        right = index >= 32 - passed[task]
        text, score = f"{right} {index}", float(index - 40)
        samples.append({"task_id": task, "index": index, "completion": text, "tokens": 1, "sum_logp": score})
        verdicts.append({"task_id": task, "index": index, "status": "pass" if right else "fail", "detail": ""})
    for name, lines in (("samples", samples), ("verdicts", verdicts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_changes_are_paired(tmp_path: Path) -> None:
    base = read_run(save_run(tmp_path / "base", {"d": 4, "b": 8, "a": 0, "c": 32}))
    found = compare(read_run(save_run(tmp_path / "slim", {"a": 0, "b": 16, "c": 32})), base)
    assert found["same_samples"] == pytest.approx(1 - 8 / 96)
    assert found["pass@1"] == pytest.approx(0.5)
    assert found["pass@1 error"] == pytest.approx(np.std([0, 0.5, 1], ddof=1) / 3**0.5)
    assert found["pass@1 change"] == pytest.approx(0.25 / 3)
    assert found["pass@1 change error"] == pytest.approx(np.std([0, 0.25, 0], ddof=1) / 3**0.5)
    assert found["pass@32"] == found["pass@top3"] == pytest.approx(2 / 3)
    assert found["pass@32 change"] == found["pass@32 change error"] == 0


def test_rows_of_the_same_case_are_replaced_in_their_places() -> None:
    def row(model: str, dtype: str, way: str, value: str) -> dict[str, str]:
        return {"model": model, "dtype": dtype, "way": way, "pass@1": value}

    known = [
        row("a", "bfloat16", "shared", "0"),
        row("a", "float32", "shared", "1"),
        row("b", "bfloat16", "stock", "2"),
    ]
    found = [
        row("b", "bfloat16", "stock", "3"),
        row("b", "bfloat16", "shared", "4"),
        row("a", "bfloat16", "shared", "5"),
    ]
    assert replace_rows(known, found) == [found[2], known[1], found[0], found[1]]
