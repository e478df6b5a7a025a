"""Which samples a call draws, from which seed, in which process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.generation.samples_file import Shard, units_of

SIZES = st.integers(1, 40)


@given(tasks=SIZES, n=SIZES, rows=SIZES)
def test_every_sample_is_drawn_once_in_calls_that_fit(tasks, n, rows):
    units = units_of(tasks, n, rows)
    drawn = [place for unit in units for place in unit.places([str(task) for task in range(tasks)])]
    assert drawn == [(str(task), index) for task in range(tasks) for index in range(n)]
    assert all(unit.count * len(unit.tasks) <= rows for unit in units)
    assert len(units) <= -(-tasks // max(1, rows // n)) * -(-n // rows)  # no call could be left out


@given(tasks=SIZES, n=SIZES, rows=SIZES, count=st.integers(1, 7))
def test_shards_share_all_units(tasks, n, rows, count):
    units = units_of(tasks, n, rows)
    parts = [Shard(number, count).own(units) for number in range(1, count + 1)]
    drawn = [(unit.tasks, unit.first) for part in parts for unit in part]
    assert sorted(drawn) == [(unit.tasks, unit.first) for unit in units]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_seeds_differ_by_run_tasks_and_chunk():
    ids = ["1", "2", "3", "4"]
    seeds = [unit.seed(run, ids) for run in (0, 1) for unit in [*units_of(4, 2, 4), *units_of(4, 8, 4)]]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_does_not_depend_on_other_units():
    assert units_of(4, 2, 4)[0].seed(7, list("abcd")) == units_of(2, 2, 4)[0].seed(7, list("ab"))


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "1/0", "a/b", "-1/4", "1/4/2", "٣/4"])
def test_shards_that_are_none(text):
    with pytest.raises(InputError, match="`shard` must be i/N with i from 1 to N"):
        Shard.parse(text)


def test_file_names():
    assert Shard.parse("1/1").file_name == "samples.jsonl"
    assert Shard.parse("2/4").file_name == "samples-2-of-4.jsonl"
