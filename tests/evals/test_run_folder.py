"""Runs: units of samples, interrupted and shared runs, settings that keep runs separate, the queue of shared work."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_fastdecode.errors import InputError
from hf_fastdecode.evals import generation, scoring
from hf_fastdecode.evals.generation import generate_samples, model_digest, weights_digest
from hf_fastdecode.evals.records import Sample, Task
from hf_fastdecode.evals.run_folder import (
    Drawing,
    Lines,
    Queue,
    merged_samples,
    open_samples,
    part_files,
    prompts_digest,
    sample_files,
    units_of,
    work,
)
from hf_fastdecode.evals.scoring import Result
from hf_fastdecode.files import JsonlWriter, write_text

SIZES = st.integers(1, 40)


@given(tasks=SIZES, n=SIZES, rows=SIZES)
def test_every_sample_is_drawn_once_in_calls_that_fit(tasks, n, rows):
    units = units_of(tasks, n, rows)
    drawn = [key for unit in units for key in unit.keys([str(task) for task in range(tasks)])]
    assert drawn == [(str(task), index) for task in range(tasks) for index in range(n)]
    assert all(unit.count * len(unit.tasks) <= rows for unit in units)
    assert len(units) <= -(-tasks // max(1, rows // n)) * -(-n // rows)  # no call could be left out


def test_seeds_differ_by_run_tasks_and_chunk():
    ids = ["1", "2", "3", "4"]
    seeds = [unit.seed(run, ids) for run in (0, 1) for unit in [*units_of(4, 2, 4), *units_of(4, 8, 4)]]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_does_not_depend_on_other_units():
    assert units_of(4, 2, 4)[0].seed(7, list("abcd")) == units_of(2, 2, 4)[0].seed(7, list("ab"))


IDS = ["101", "102", "103"]


def generate(small, folder, settings=None, **options):
    return generate_samples(
        small.model, small.tokenizer, small.tasks, small.form, settings or small.settings, folder, **options
    )


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    """The folder of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("finished")
    assert generate(small, folder) == 12
    return folder


@pytest.fixture(scope="module")
def unbroken(finished):
    """The bytes of its samples."""
    return (finished / "samples.jsonl").read_bytes()


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of its folder."""
    return shutil.copytree(finished, tmp_path / "copied")


def test_every_sample_is_there(small, unbroken):
    lines = [json.loads(line) for line in unbroken.splitlines()]
    assert [(line["task_id"], line["index"]) for line in lines] == [
        (task.task_id, index) for task in small.tasks for index in range(4)
    ]
    assert all(line["sum_logp"] < 0 for line in lines if line["tokens"])


@pytest.mark.parametrize("share", [0.0, 0.37, 0.7, 0.999])
def test_a_file_cut_off_anywhere_is_completed_to_the_same_bytes(small, unbroken, copied, share):
    path = copied / "samples.jsonl"
    path.write_bytes(unbroken[: int(share * len(unbroken))])
    drawn = generate(small, copied)
    assert path.read_bytes() == unbroken
    assert drawn == (12 if share < 0.6 else 4)  # the calls hold 8 and 4 samples


def test_an_interrupt_loses_the_call_under_way_only(small, unbroken, tmp_path, monkeypatch):
    draw, calls = generation.draw_rows, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return draw(*args, **kwargs)

    monkeypatch.setattr(generation, "draw_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(small, tmp_path)
    assert (tmp_path / "samples.jsonl").read_bytes() == b"".join(unbroken.splitlines(keepends=True)[:8])
    assert generate(small, tmp_path) == 4
    assert (tmp_path / "samples.jsonl").read_bytes() == unbroken
    assert generate(small, tmp_path) == 0


def test_processes_that_share_a_run_merge_to_the_same_samples(small, unbroken, copied):
    (copied / "samples.jsonl").unlink()
    units = units_of(3, 4, 8)
    with open_samples(copied, units, IDS, shared=True) as (file, _, there):
        assert there == 0
        file.write([json.loads(line) for line in unbroken.splitlines()[8:]])  # the last call, by another process
        file.write([json.loads(unbroken.splitlines()[0])])  # and of the first a part, before it was killed
    assert generate(small, copied, shared=True) == 8
    assert [path.name for path in sample_files(copied)] == ["samples.part-1.jsonl"]
    assert generate(small, copied) == 0  # nothing is left for a single process
    merged = merged_samples(copied, IDS, 4)
    assert [vars(sample) for sample in merged] == [json.loads(line) for line in unbroken.splitlines()]
    assert [path.name for path in sample_files(copied)] == ["samples.jsonl"]
    assert (copied / "samples.jsonl").read_bytes() == unbroken
    assert merged_samples(copied, IDS, 4) == merged


def test_what_a_single_process_left_incomplete_is_drawn_by_others(small, unbroken, copied):
    lines = unbroken.splitlines(keepends=True)
    (copied / "samples.jsonl").write_bytes(b"".join(lines[:9]))
    assert generate(small, copied, shared=True) == 4
    assert (copied / "samples.jsonl").read_bytes() == b"".join(lines[:8])
    assert (copied / "samples.part-1.jsonl").read_bytes() == b"".join(lines[8:])


def test_shards_that_are_not_done(unbroken, tmp_path):
    (tmp_path / "samples.part-2.jsonl").write_bytes(b"".join(unbroken.splitlines(keepends=True)[:8]))
    with pytest.raises(InputError, match="hold 8 of 12 samples; draw the others first"):
        merged_samples(tmp_path, IDS, 4)
    assert [path.name for path in sample_files(tmp_path)] == ["samples.part-2.jsonl"]


def test_another_sample_of_the_same_number(unbroken, tmp_path):
    (tmp_path / "samples.jsonl").write_bytes(unbroken)
    (tmp_path / "samples.part-1.jsonl").write_bytes(unbroken)
    assert len(merged_samples(tmp_path, IDS, 4)) == 12  # a merge that was interrupted leaves equal ones
    (tmp_path / "samples.part-1.jsonl").write_bytes(unbroken.replace(b"return", b"yield", 1))
    with pytest.raises(InputError, match=r"holds two samples \d of task 10\d; remove one of the files samples"):
        merged_samples(tmp_path, IDS, 4)


def test_samples_of_no_run(tmp_path):
    with pytest.raises(InputError, match="has no samples; draw some with"):
        merged_samples(tmp_path, IDS, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, r"another seed \(0, now 1\)"),
        ({"n": 8}, r"another `n` \(4, now 8\)"),
        ({"rows": 4}, "another `rows`"),
        ({"drawing": Drawing(1.0, max_new_tokens=20)}, "another temperature"),
        ({"weights": "0"}, "another digest of weights, config and tokenizer"),
        ({"prompts": "0"}, r"another digest of the tasks and prompts \(`limit`, `task_ids`"),
    ],
)
def test_runs_are_not_mixed(small, unbroken, copied, change, words):
    with pytest.raises(InputError, match=f"holds a run with {words}.*name another `out`"):
        generate(small, copied, replace(small.settings, **change))
    assert (copied / "samples.jsonl").read_bytes() == unbroken


@pytest.mark.parametrize("content", ["{", "[]", "{}", "3"])
def test_a_folder_of_something_else(small, tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(InputError, match="is not the settings of a run; name another"):
        generate(small, tmp_path)


def test_memory_that_runs_out_names_the_remedy(small, tmp_path, monkeypatch):
    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(generation, "draw_rows", exhausted)
    with pytest.raises(InputError, match=r"up to 8 rows and 20 new tokens do not fit .*pass a smaller `rows`"):
        generate(small, tmp_path)


def test_weights_that_are_not_finite_are_named(small, tmp_path):
    model = copy.deepcopy(small.model)
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    with pytest.raises(InputError, match=r"logits are not finite: its weight model\.norm\.weight holds NaN"):
        generate(replace(small, model=model), tmp_path)


def test_repeated_and_missing_samples_are_drawn_once(small, unbroken, copied):
    """Two processes wrote to one file, and one of them was killed."""
    lines = unbroken.splitlines(keepends=True)
    (copied / "samples.jsonl").write_bytes(b"".join([*lines[8:], *lines[:8], *lines[:3], *lines[4:7]]))
    assert generate(small, copied) == 0
    assert (copied / "samples.jsonl").read_bytes() == b"".join([*lines[8:], *lines[:8]])
    (copied / "samples.jsonl").write_bytes(b"".join([*lines[8:], *lines[:7], *lines[:3]]))
    assert generate(small, copied) == 8
    assert (copied / "samples.jsonl").read_bytes() == b"".join([*lines[8:], *lines[:8]])


@pytest.mark.parametrize("name", ["samples.jsonl", "samples.part-1.jsonl", "verdicts.jsonl"])
def test_samples_of_no_known_run_are_neither_taken_nor_removed(small, tmp_path, name):
    (tmp_path / name).write_text('{"task_id": "101", "index": 0, "completion": "x"}\n')
    with pytest.raises(InputError, match=f"holds {name} of no known run; name another `out`"):
        generate(small, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [name]
    assert (tmp_path / name).stat().st_size


def test_two_processes_do_not_write_to_one_file(small, copied):
    units = units_of(3, 4, 8)
    with (
        open_samples(copied, units, IDS),
        pytest.raises(InputError, match=r"another process draws samples into .*samples\.jsonl; wait for it"),
    ):
        generate(small, copied)
    assert generate(small, copied) == 0


def test_another_seed_draws_other_samples(small, unbroken, tmp_path):
    generate(small, tmp_path, replace(small.settings, seed=1))
    assert (tmp_path / "samples.jsonl").read_bytes() != unbroken


def digest_of(**parameters):
    module = nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return weights_digest(module)


def test_weights_are_told_apart():
    weight = torch.arange(1000.0)
    changed = weight.clone()
    changed[613] += 1e-4
    swapped = weight.clone()
    swapped[:2] = weight[:2].flip(0)
    others = [
        digest_of(weight=changed),
        digest_of(weight=swapped),
        digest_of(other=weight),
        digest_of(weight=weight.reshape(10, 100)),
        digest_of(weight=weight.bfloat16()),
        digest_of(weight=weight, more=torch.ones(1)),
    ]
    assert digest_of(weight=weight) == digest_of(weight=weight.clone())
    assert len({digest_of(weight=weight), *others}) == 7


def test_weights_of_any_size():
    assert digest_of(weight=torch.ones(1).expand(2**24 + 3_000_001))  # more than float32 can count
    assert digest_of(weight=torch.ones(()), empty=torch.ones(0))


def test_configs_and_tokenizers_are_told_apart(small):
    model, before = small.model, model_digest(small.model, small.tokenizer)
    assert model_digest(model, small.tokenizer) == before
    for config, name, value in (
        (model.config, "rms_norm_eps", 0.5),
        (model.generation_config, "eos_token_id", 7),
        (model.config, "_name_or_path", "elsewhere"),
    ):
        kept = getattr(config, name)
        setattr(config, name, value)
        try:
            assert (model_digest(model, small.tokenizer) == before) == (name == "_name_or_path")
        finally:
            setattr(config, name, kept)
    other = copy.deepcopy(small.tokenizer)
    other.add_tokens(["something new"])
    assert model_digest(model, other) != before


def test_prompts_are_told_apart():
    assert prompts_digest(["1", "2"], [[1], [2]]) == prompts_digest(["1", "2"], [[1], [2]])
    assert (
        len({prompts_digest(ids, texts) for ids in (["1", "2"], ["2", "1"]) for texts in ([[1], [2]], [[1, 2], []])})
        == 4
    )


def started(work: Callable[[], None]) -> int:
    """A process that does some work."""
    if process := os.fork():
        return process
    try:
        work()
    finally:
        os._exit(0)


def done(folder: Path) -> list[int]:
    return [line["item"] for line in Lines(lambda: part_files(folder / "work.jsonl")).new()]


def do_all(folder: Path, count: int, begin: Callable[[], object]) -> None:
    whole, held = folder / "work.jsonl", InputError("held")
    with work(whole, count, lambda item: item in done(folder), shared=True, held=held) as (file, items):
        for item in items:
            begin()
            file.write([{"item": item, "by": os.getpid()}])


def meeting(count: int) -> Callable[[], None]:
    """Called for the first time in a process, it waits until so many processes have called it."""
    barrier, met = multiprocessing.get_context("fork").Barrier(count), []

    def meet() -> None:
        if not met:
            met.append(barrier.wait(60))

    return meet


def test_processes_share_all_items(tmp_path: Path) -> None:
    meet = meeting(3)
    processes = [started(lambda: do_all(tmp_path, 12, meet)) for _ in range(3)]
    for process in processes:
        os.waitpid(process, 0)
    assert sorted(done(tmp_path)) == list(range(12))
    assert len(part_files(tmp_path / "work.jsonl")) == 3


def test_what_a_killed_process_had_claimed_is_done_by_another(tmp_path: Path) -> None:
    claimed = tmp_path / "claimed"
    stuck = started(lambda: do_all(tmp_path, 3, lambda: (claimed.touch(), signal.pause())))
    while not claimed.exists():
        time.sleep(0.01)
    other = started(lambda: do_all(tmp_path, 3, lambda: None))
    while len(done(tmp_path)) < 2:
        time.sleep(0.01)
    assert sorted(done(tmp_path)) == [1, 2], "the first item is claimed"
    assert os.waitpid(other, os.WNOHANG)[0] == 0, "it waits"
    os.kill(stuck, signal.SIGKILL)
    for process in (stuck, other):
        os.waitpid(process, 0)
    assert sorted(done(tmp_path)) == [0, 1, 2]


def test_items_whose_results_do_not_count_for_others_end(tmp_path: Path) -> None:
    def try_all(name: str) -> None:
        tried: set[int] = set()
        with closing(Queue(tmp_path / "claims", 4)) as queue:
            for item in queue.numbers(tried.__contains__):  # nothing that another did counts
                time.sleep(0.02)
                tried.add(item)
                (tmp_path / f"{name}-{item}").touch()

    processes = [started(lambda name=name: try_all(name)) for name in "ab"]
    for process in processes:
        os.waitpid(process, 0)
    assert len(list(tmp_path.glob("?-?"))) == 8


def test_lines_are_those_that_were_added_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = Lines(lambda: [path, tmp_path / "none.jsonl"])
    with JsonlWriter(path) as file:
        file.write([{"x": 1}])
        assert list(lines.new()) == [{"x": 1}]
        file.write([{"x": 2}])
    with path.open("a") as torn:
        torn.write('{"x": 3')
    assert list(lines.new()) == [{"x": 2}]
    write_text(path, '{"x": 4}\n{"x": 5}\n{"x": 6}\n')
    assert list(lines.new()) == [{"x": 4}, {"x": 5}, {"x": 6}]
    assert list(lines.new()) == []


def test_processes_share_a_scoring(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(scoring, "_PROGRAMS_AT_ONCE", 2)
    tasks = [Task("a", "python", "", "", ("assert f() == 1",))]
    samples = [Sample("a", index, f"def f(): return {index % 5}") for index in range(20)]
    path, meet = tmp_path / "out.jsonl", meeting(2)

    def score_in_each(by_id, part, **options):
        from hf_fastdecode.evals.records import Verdict

        meet()
        (tmp_path / f"by-{os.getpid()}-{part[0].index}").touch()
        return [Verdict(one.task_id, one.index, "pass" if one.index % 5 == 1 else "fail") for one in part]

    monkeypatch.setattr(scoring, "score", score_in_each)
    processes = [
        started(lambda: scoring.judge(tasks, samples, path, sandbox=None, workers=1, shared=True)) for _ in range(2)
    ]
    for process in processes:
        os.waitpid(process, 0)
    assert len({one.name.split("-")[1] for one in tmp_path.glob("by-*")}) == 2, "both did some"
    assert len(list(tmp_path.glob("by-*"))) == 3, "none did the same"
    assert part_files(path) == []
    again = scoring.judge(tasks, samples, path, sandbox=None, workers=1)
    assert [one.index for one in again] == list(range(20))
    assert [one.status for one in again] == [Result("pass" if i % 5 == 1 else "fail").status for i in range(20)]
    assert len(path.read_text().splitlines()) == 20
    assert len(list(tmp_path.glob("by-*"))) == 3, "all is kept"
