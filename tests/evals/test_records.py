"""Samples and verdicts in files: what is appended is read, and what was cut off is not."""

from __future__ import annotations

import json

import pytest

from hf_fastdecode.evals.records import Sample, Verdict, read_samples, read_verdicts
from hf_fastdecode.files import JsonlWriter, read_jsonl

SAMPLES = [
    Sample("MBPP/1", 0, 'x = "\n\u2028é\ud83d"', 3, -1.25),
    Sample("<b>", 1, "", None, None),
]


def write(path, *records):
    with JsonlWriter(path) as writer:
        writer.write(records)


def test_records_come_back(tmp_path):
    path = tmp_path / "new" / "samples.jsonl"
    write(path, SAMPLES[0])
    write(path, SAMPLES[1])
    assert read_samples(path) == SAMPLES
    assert path.read_bytes().count(b"\n") == 2
    verdicts = [Verdict("1", 0, "pass"), Verdict("1", 1, "timeout", "10 s")]
    write(tmp_path / "verdicts.jsonl", *verdicts)
    assert read_verdicts(tmp_path / "verdicts.jsonl") == verdicts


def test_a_line_cut_anywhere_is_ignored_and_then_replaced(tmp_path):
    path = tmp_path / "samples.jsonl"
    write(path, SAMPLES[0])
    first = path.read_bytes()
    write(path, SAMPLES[1])
    whole = path.read_bytes()
    for cut in range(len(first), len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = SAMPLES if cut >= len(whole) - 1 else SAMPLES[:1]
        assert read_samples(path) == kept
        write(path, *SAMPLES[len(kept) :])
        assert path.read_bytes() == whole


def test_empty_lines_and_further_fields(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"task_id": "1", "index": 0, "completion": "x", "stop": "eos"})
    path.write_text(f"\n{line}\n  \n")
    assert read_samples(path) == [Sample("1", 0, "x")]
    assert [found["stop"] for found in read_jsonl(path)] == ["eos"]


@pytest.mark.parametrize(
    ("text", "read", "message"),
    [
        (
            "{}\nnot json\n{}\n",
            read_samples,
            "must have the field 'task_id', got only 'none'; mend or delete that line",
        ),
        ('{"index": 1, "completion": ""}\n', read_samples, "a sample must have the field 'task_id', got only 'compl"),
        ('{"task_id": "1", "index": 1}\n', read_verdicts, "a verdict must have the field 'status'"),
        ('{"task_id": "1", "index": 1, "status": "ok"}\n', read_verdicts, "got 'ok' for sample 1 of task '1'"),
        ('{"task_id": 1, "index": 0, "completion": ""}\n', read_samples, "task_id of a sample must be a text, got 1"),
        ('{"task_id": "1", "index": "0", "completion": ""}\n', read_samples, "index of a sample must be a whole numb"),
        ('{"task_id": "1", "index": 0, "completion": 5}\n', read_samples, "completion of a sample must be a text"),
        (
            '{"task_id": "1", "index": 0, "completion": "", "tokens": 1, "sum_logp": NaN}\n',
            read_samples,
            "sum_logp of a sample must be a finite number of at most 0, or null, got nan",
        ),
        ("[1]\n", read_samples, r"line 1: expected a JSON object, got '\[1\]'; mend or delete that line"),
        ('{"task_id": "1"\n\n', read_samples, "line 1: expected a JSON object"),
        (
            '{"task_id": "1", "index": 0, "completion": ""}\n{"completion": "%s' % ("x" * 900) + "\n",
            read_samples,
            r"line 2: expected a JSON object, got '\{\"completion\": \"x+ \.\.\.; mend or delete that line$",
        ),
        ('\n{"task_id": "1", "index": 0, "completion": 5}\n', read_samples, "line 2: completion .*; mend that line$"),
    ],
)
def test_errors_name_file_line_and_remedy(tmp_path, text, read, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)
