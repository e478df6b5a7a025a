"""Runs that go on after an interruption, in one process or several."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch

from hf_fastdecode.errors import InputError
from hf_fastdecode.evals import generation as run
from hf_fastdecode.evals.generation import generate_samples
from hf_fastdecode.evals.run_folder import Drawing, merged_samples, open_samples, sample_files, units_of

IDS = ["101", "102", "103"]


def generate(small, folder, settings=None, **options):
    return generate_samples(
        small.model,
        small.tokenizer,
        small.tasks,
        small.form,
        settings or small.settings,
        folder,
        **options,
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
    draw, calls = run.draw_rows, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return draw(*args, **kwargs)

    monkeypatch.setattr(run, "draw_rows", interrupted)
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
    with pytest.raises(InputError, match="hold 8 of 12 samples; draw the rest first"):
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

    monkeypatch.setattr(run, "draw_rows", exhausted)
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
