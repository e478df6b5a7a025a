"""latency.csv: what is measured is read, and what is not as described is refused."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest

from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.records import Latency
from hf_fastdecode.evals.report import read_latency

from .runs import write_latency

ROW = Latency("shared", "graph", 4, 'H200, "x"', 0.1, 2.0, 2.5, 1.0, 1.5, 2.0, 1.1, 1.6, 2.2, 1 << 33, 5)
HEAD = "way,mode,n,device,last_sample_s\n"


def plain(row):
    return ["unknown" if value != value else value for value in astuple(row)]


def test_rows_come_back_sorted(tmp_path):
    path = tmp_path / "new" / "latency.csv"
    failed = Latency("stock", "eager", 16, "H200", status="out of memory")
    sparse = Latency("stock", "eager", 2, "H200", last_sample_s=0.1)
    fast = Latency("stock", "eager", 8, "H200", last_sample_s=0.2)
    write_latency(path, [failed, fast, sparse, ROW], commit="abc", torch="2")
    assert [plain(row) for row in read_latency(path)] == [plain(row) for row in (sparse, fast, failed, ROW)]


def test_of_two_ways_that_ran_in_the_same_mode_the_later_with_numbers_counts(tmp_path):
    path = tmp_path / "latency.csv"
    head = HEAD.replace("\n", ",status\n")
    lines = ["shared,graph,1,CPU,1.5,ok", "shared:graph,graph,1,CPU,1.25,ok", "shared:eager,eager,1,CPU,2,ok"]
    path.write_text(head + "\n".join([*lines, "shared,eager,1,CPU,,out of memory"]) + "\n")
    assert [(row.way, row.mode, row.last_sample_s) for row in read_latency(path)] == [
        ("shared", "eager", 2.0),
        ("shared", "graph", 1.25),
    ]


def test_a_file_in_another_encoding(tmp_path):
    path = tmp_path / "latency.csv"
    path.write_bytes(HEAD.encode("utf-16"))
    with pytest.raises(InputError, match="is no UTF-8 text"):
        read_latency(path)


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
        (HEAD + "shared,eager,1,CPU,1\n" * 2, "two rows of shared, eager, n = 1 on CPU; remove one"),
        (
            HEAD[:-1] + ",model\nshared,eager,1,CPU,1,a\nstock,eager,1,CPU,1,b\n",
            "rows are of model a and b",
        ),
    ],
)
def test_errors_name_line_value_and_bound(tmp_path, text, message):
    path = tmp_path / "latency.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_latency(path)
