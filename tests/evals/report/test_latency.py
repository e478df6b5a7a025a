"""latency.csv: what is written is read, and what is not as described is refused."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields

import pytest

from hf_fastdecode.command_errors import CommandError
from hf_fastdecode.evals.report import Latency, read_latency, write_latency

ROW = Latency("shared", "graph", 4, 'H200, "x"', 0.1, 2.0, 2.5, 1.0, 1.5, 2.0, 1.1, 1.6, 2.2, 1 << 33, 5)
HEAD = "way,mode,n,device,last_sample_s\n"


@dataclass(frozen=True)
class _Wider(Latency):
    """A row with a column that the file has not."""

    further: int = 1


def plain(row):
    return ["unknown" if value != value else value for value in astuple(row)]


def test_rows_come_back_sorted(tmp_path):
    path = tmp_path / "new" / "latency.csv"
    failed = Latency("stock", "eager", 16, "H200", status="out of memory")
    sparse = Latency("stock", "eager", 2, "H200", last_sample_s=0.1)
    fast = Latency("stock", "eager", 8, "H200", last_sample_s=0.2)
    write_latency(path, [failed, fast, sparse, ROW], {"commit": "abc", "torch": "2"})
    assert [plain(row) for row in read_latency(path)] == [plain(row) for row in (sparse, fast, failed, ROW)]
    lines = path.read_text().splitlines()
    assert lines[0].split(",") == [*(field.name for field in fields(Latency)), "commit", "torch"]
    assert "nan" not in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["latency.csv"]


def test_few_columns_are_enough(tmp_path):
    path = tmp_path / "latency.csv"
    path.write_text(HEAD + "shared,eager,1,CPU,1.5\n")
    (row,) = read_latency(path)
    assert (row.last_sample_s, row.runs, row.peak_bytes, row.status) == (1.5, 0, None, "ok")
    assert math.isnan(row.prefill_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("way,mode,n\n", "must have the columns .*, got none named 'device'"),
        ("", "got none named 'way'"),
        (HEAD + "ours,eager,1,CPU,1.5\n", "line 2: way must be one of shared, stock, got 'ours'"),
        (HEAD + "shared,fast,1,CPU,1.5\n", "mode must be one of eager, graph, compile, got 'fast'"),
        (HEAD + "shared,eager,x,CPU,1.5\n", "n must be a whole number, got 'x'"),
        (HEAD + "shared,eager,0,CPU,1.5\n", "n must be a whole number of at least 1, got '0'"),
        (HEAD + "shared,eager,,CPU,1.5\n", "n must be a whole number of at least 1, got ''"),
        (HEAD + "shared,eager,1,CPU,soon\n", "last_sample_s must be a number, got 'soon'"),
        (HEAD + "shared,eager,1,CPU,\n", "last_sample_s must be above 0 seconds where the status is ok, got ''"),
        (HEAD + "shared,eager,1,CPU,0\n", "above 0 seconds"),
        (HEAD + "shared,eager,1,CPU,nan\n", "above 0 seconds"),
        (HEAD + "shared,eager,1,CPU,inf\n", "above 0 seconds"),
        (HEAD + "shared,eager,1,CPU,1\n" * 2, "two rows of shared, eager, n = 1 on CPU; keep one model"),
    ],
)
def test_errors_name_line_value_and_bound(tmp_path, text, message):
    path = tmp_path / "latency.csv"
    path.write_text(text)
    with pytest.raises(CommandError, match=message):
        read_latency(path)


def test_an_interruption_leaves_the_old_file(tmp_path):
    path = tmp_path / "latency.csv"
    write_latency(path, [ROW])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="dict contains fields not in fieldnames"):
        write_latency(path, [ROW, _Wider(*astuple(ROW))])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
