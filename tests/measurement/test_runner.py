"""The runner: rows as they come, resumed where a run broke off, and where they say they come from."""

import subprocess
import sys
from dataclasses import asdict, dataclass

import pytest
import torch

from hf_fastdecode.files import read_rows, write_rows
from hf_fastdecode.measurement import rows as rows_module
from hf_fastdecode.measurement.rows import brief, device_name, failed, provenance, run

HERE = {"device": "d", "torch": "1", "transformers": "2", "commit": "abc", "command": "bench x"}


@dataclass(frozen=True)
class Case:
    size: int

    def columns(self):
        return asdict(self)


class Measure:
    """Counts what is measured, and breaks off before the call of this number."""

    def __init__(self, stop=None, status="ok"):
        self.asked, self.stop, self.status = [], stop, status

    def __call__(self, case, way):
        if len(self.asked) == self.stop:
            raise KeyboardInterrupt
        self.asked.append((case.size, way))
        return {"status": self.status, "seconds": 0.5 * case.size, "note": None}


CASES, WAYS = [Case(1), Case(2)], ["a", "b"]
ALL = [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_an_interrupted_run_goes_on_where_it_broke_off(tmp_path, capsys):
    out = tmp_path / "new" / "rows.csv"
    with pytest.raises(KeyboardInterrupt):
        run(CASES, WAYS, Measure(stop=3), provenance=HERE, out=out)
    assert len(read_rows(out)) == 3
    said = capsys.readouterr().err
    assert f"interrupted: 3 of 4 rows are in {out}; run the same command again to go on\n" in said
    assert "kept" not in said and "replaced" not in said
    with pytest.raises(KeyboardInterrupt):
        run(CASES, WAYS, Measure(stop=0), provenance=HERE, out=out)
    assert "interrupted: 3 of 4 rows are in " in capsys.readouterr().err
    assert [path.name for path in out.parent.iterdir()] == ["rows.csv"]
    with pytest.raises(KeyboardInterrupt):  # rows may lie in the file behind the one that was being measured
        run([CASES[0], Case(3), CASES[1]], WAYS, Measure(stop=0), provenance=HERE, out=out)
    assert "interrupted: 3 of 6 rows are in " in capsys.readouterr().err
    rest = Measure()
    rows = run(CASES, WAYS, rest, provenance=HERE, out=out)
    assert rest.asked == ALL[3:]
    assert f"3 of 4 rows are those of an earlier run, kept in {out}" in capsys.readouterr().err
    assert [(int(row["size"]), row["way"]) for row in rows] == ALL
    assert read_rows(out) == rows
    assert rows[0] == HERE | {"size": "1", "way": "a", "status": "ok", "seconds": "0.5", "note": ""}


@pytest.mark.parametrize("changed", ["commit", "command", "torch"])
def test_rows_of_another_commit_command_or_version_are_measured_again(tmp_path, changed, capsys):
    out = tmp_path / "rows.csv"
    run(CASES, WAYS, Measure(), provenance=HERE, out=out)
    again = Measure()
    capsys.readouterr()
    rows = run(CASES[:1], WAYS, again, provenance=HERE | {changed: "other"}, out=out)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        f"2 of 2 rows are in {out} from another commit, command or version and are replaced; "
        "name another file to keep them"
    )
    assert again.asked == ALL[:2]
    assert [row[changed] for row in rows] == ["other", "other"]
    assert [row[changed] for row in read_rows(out)] == ["other", "other", HERE[changed], HERE[changed]]


def test_a_device_without_a_name_is_not_called_a_cpu():
    assert device_name(torch.device("mps")) == "mps"
    assert device_name(torch.device("cpu")).endswith("threads")


def test_rows_of_another_device_stay(tmp_path):
    out = tmp_path / "rows.csv"
    run(CASES[:1], WAYS, Measure(), provenance=HERE, out=out)
    run(CASES[:1], WAYS, Measure(), provenance=HERE | {"device": "other"}, out=out)
    assert [row["device"] for row in read_rows(out)] == ["d", "d", "other", "other"]


@pytest.mark.parametrize(
    ("status", "again"), [("wrong: x", 4), ("failed: x", 4), ("does not fit", 0), ("not run: x", 0)]
)
def test_what_went_wrong_is_measured_again(tmp_path, status, again, capsys):
    out = tmp_path / "rows.csv"
    first = run(CASES, WAYS, Measure(status=status), provenance=HERE, out=out)
    assert len(failed(first)) == again
    measure = Measure()
    run(CASES, WAYS, measure, provenance=HERE, out=out)
    assert len(measure.asked) == again
    out.unlink()
    run(CASES, WAYS, Measure(status=status), provenance=HERE, out=out)
    run(CASES, WAYS, Measure(), provenance=HERE | {"commit": "other"}, out=out)
    assert ("4 of 4 rows are in " in capsys.readouterr().err) == (again == 0)  # what failed is no loss


def test_a_row_in_one_line():
    row = {"case": "n8", "way": "ours", "us_p50": "12.3456", "over_floor": "", "status": "ok"}
    assert brief(row) == "n8  ours  us_p50=12.35"
    assert brief(row | {"status": "does not fit", "us_p50": ""}) == "n8  ours  does not fit"


def test_the_command_leaves_out_where_rows_go(monkeypatch):
    monkeypatch.setenv("COMMIT", "abc")
    words = "prog ops --out a.csv --way ours --plot --out=b.csv --set grid".split()
    monkeypatch.setattr(sys, "argv", words)
    assert provenance("cpu")["command"].endswith(" ops --way ours --set grid")
    assert provenance("cpu")["commit"] == "abc"


def test_what_failed_is_not_in_the_file(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        run(CASES[:1], WAYS, Measure(stop=1, status="failed: x"), provenance=HERE, out=tmp_path / "rows.csv")
    assert "interrupted: 0 of 2 rows are in " in capsys.readouterr().err


def test_a_row_is_not_lost_when_its_writing_is_interrupted(tmp_path, monkeypatch, capsys):
    def interrupted(*args):
        monkeypatch.setattr(rows_module, "write_rows", write_rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(rows_module, "write_rows", interrupted)
    out = tmp_path / "rows.csv"
    with pytest.raises(KeyboardInterrupt):
        run(CASES[:1], WAYS, Measure(), provenance=HERE, out=out)
    assert "interrupted: 1 of 2 rows are in " in capsys.readouterr().err
    assert len(read_rows(out)) == 1


def test_a_backend_of_the_environment_stands_before_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prog", "generate"])
    command = provenance("cpu")["command"]
    assert provenance("cpu", backend="plain")["command"] == f"HF_FASTDECODE_BACKEND=plain {command}"


def test_a_changed_tree_names_its_files(monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    answers = {"status": " M x.py\n", "rev-parse": "0123456789ab\n"}
    monkeypatch.setattr(
        rows_module.subprocess,
        "run",
        lambda command, **options: subprocess.CompletedProcess(command, 0, stdout=answers[command[1]]),
    )
    commit = rows_module._commit()
    assert commit.startswith("0123456789ab+") and len(commit) == 13 + 8
    answers["status"] = ""
    assert rows_module._commit() == "0123456789ab"
    monkeypatch.setattr(rows_module.subprocess, "run", lambda *args, **options: (_ for _ in ()).throw(OSError))
    assert rows_module._commit().startswith("unknown+")
