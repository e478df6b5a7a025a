"""Which samples a call draws, and from which seed."""

from hypothesis import given
from hypothesis import strategies as st

from hf_fastdecode.evals.run_folder import units_of

SIZES = st.integers(1, 40)


@given(tasks=SIZES, n=SIZES, rows=SIZES)
def test_every_sample_is_drawn_once_in_calls_that_fit(tasks, n, rows):
    units = units_of(tasks, n, rows)
    drawn = [place for unit in units for place in unit.places([str(task) for task in range(tasks)])]
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
