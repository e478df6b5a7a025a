"""The commands of the workloads from the outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.workloads import measure as hier
from benchmarks.workloads import measure as longqa
from hf_fastdecode.files import read_rows

from . import command_line

ROOT = Path(__file__).parents[3]
HIER = "hier --shots 1 --points 2x2 --new-tokens 2 --repeats 1 --device cpu"
LONGQA = "longqa --shots 1 --tokens 300 --questions 1,3 --new-tokens 2 --repeats 1 --device cpu"


def run(words, *more):
    return command_line.run("workloads", *words.split(), *more)


def test_levels_are_measured_drawn_and_kept(tmp_path, monkeypatch):
    out = tmp_path / "new" / "hier.csv"
    first = run(HIER, "--out", out)
    assert first.exit_code == 0, first.stderr
    rows = read_rows(out)
    assert [row["way"] for row in rows] == ["none", "few-shot", "problem", "two-level"]
    for row in rows:
        assert row["status"] == "ok"
        assert (row["problems"], row["samples"], row["new_tokens"], row["task"]) == ("2", "2", "2", "embedded")
        assert all(row[name] for name in ("device", "torch", "transformers", "commit", "command", "prefill_s"))
    prefilled = [int(row["prefilled_tokens"]) for row in rows]
    assert prefilled[0] > prefilled[2] > prefilled[3]
    assert first.stdout.startswith("| problems x samples | shared | a call | prefill | a step | tokens prefilled |")
    assert f"rows: {out}\npicture: {out.with_suffix('.png')}\n" in first.stdout
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(hier.HierBench, "measure", pytest.fail)
    again = run(HIER, "--out", out)
    assert again.exit_code == 0, again.stderr
    assert read_rows(out) == rows
    assert "4 of 4 rows are those of an earlier run" in again.stderr
    assert again.stdout == first.stdout


def test_questions_are_measured_and_answers_counted(tmp_path):
    out = tmp_path / "longqa.csv"
    done = run(LONGQA, "--out", out)
    assert done.exit_code == 0, done.stderr
    rows = read_rows(out)
    assert [(int(row["questions"]), row["way"], row["status"]) for row in rows] == [
        (questions, way, "ok") for questions in (1, 3) for way in ("shared", "stock")
    ]
    assert all(0 <= int(row["correct"]) <= int(row["questions"]) for row in rows)
    assert f"3 questions, stock: {rows[3]['correct']} right" in done.stdout
    assert all(240 < int(row["prefix_tokens"]) <= 300 for row in rows)
    assert out.with_suffix(".png").is_file()


def test_memory_that_runs_out_is_shown_and_drawn(tmp_path, monkeypatch):
    drawn = []
    finish = figures._finish_workload
    monkeypatch.setattr(
        figures, "_finish_workload", lambda figure, *args: drawn.append(figure) or finish(figure, *args)
    )
    measure = longqa.QuestionsBench.measure

    def measured(bench, case, way):
        if (case.questions, way) == (3, "stock"):
            return {"status": "out of memory"}
        # one step in a busy machine's noise can come out at no time at all, which a logarithmic axis leaves out
        return measure(bench, case, way) | {"decode_s": 0.1, "total_s": 0.2}

    monkeypatch.setattr(longqa.QuestionsBench, "measure", measured)
    done = run(LONGQA, "--out", tmp_path / "rows.csv")
    assert done.exit_code == 0, done.stderr
    assert "3 questions, stock: out of memory\n" in done.stdout
    for axis in drawn[0].axes:
        lines = {line.get_label(): line.get_xdata().tolist() for line in axis.lines}
        assert lines["hf_fastdecode"] == [1, 3]
        assert lines["stock transformers"] == [1]
        assert lines["stock transformers: out of memory"] == [3]


def test_bars_are_as_high_as_the_rows_say(tmp_path):
    case = {"problems": "2", "samples": "8", "task": "embedded", "shots": "3", "shared_tokens": "5"}
    case |= {"prompt_tokens": "9", "new_tokens": "4", "model": "m", "dtype": "float32", "device": "d"}
    measured = {"status": "ok", "prefill_s": "1.5", "kv_bytes": str(3 * 2**20)}
    rows = [
        case | {"way": "none", "status": "out of memory: 9 GiB"},
        case | {"way": "problem", **measured, "decode_s": "0.5"},
        case | {"way": "two-level", **measured, "decode_s": "0.25"},
    ]
    found = []

    def keep(figure, title, path):
        found.append(figure)
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_finish_workload", keep)
        figures.draw_levels(rows, tmp_path / "picture.png")
    time, memory = found[0].axes
    assert [(bar.get_y(), bar.get_height()) for bar in time.patches] == [(0, 1.5), (1.5, 0.5), (0, 1.5), (1.5, 0.25)]
    assert [bar.get_height() for bar in memory.patches] == [3.0, 3.0]
    assert [text.get_text().strip() for text in time.texts] == ["out of memory"]


def test_nothing_is_reported_when_tokens_are_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(hier.HierBench, "measure", lambda *_: {"status": "wrong: other greedy tokens than stock"})
    done = run(HIER, "--out", tmp_path / "rows.csv")
    assert done.exit_code == 1
    assert "4 rows of " in done.stderr and "are not right: none: wrong: other greedy tokens than stock" in done.stderr
    assert done.stdout == ""
