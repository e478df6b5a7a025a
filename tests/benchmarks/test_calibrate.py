"""Constants of the cost model from rows: what is recovered, what is left out, and what the report says."""

import sys
from dataclasses import astuple, replace

import pytest

from benchmarks.ops.cases import OP_SETS
from benchmarks.ops.inputs import make_forest
from hf_fastdecode.attention.launch.dispatch import KERNELS, LIBRARY, PLAIN, Candidate, Costs, Heads, predict
from hf_fastdecode.files import write_rows
from tools.calibrate import fit, literal, main, measured, report

KNOWN = Costs(
    kernels=Candidate(launch=6e-6, bandwidth=3.1e12, suffix_bandwidth=4.2e12, rate=3.5e14),
    library=Candidate(launch=15e-6, bandwidth=2.2e12, suffix_bandwidth=3.1e12, rate=6.1e14),
    plain=Candidate(launch=5e-6, bandwidth=4.1e12, suffix_bandwidth=4.1e12),
    beside_bandwidth=5e10,
    portable_rate=3e14,
    matmul_rate=7e14,
    multiprocessors=132,
    l2_bytes=5e7,
)
WAYS = {KERNELS: ("ours", "kernels"), LIBRARY: ("recipe", "cudnn"), PLAIN: ("plain", "flash")}
CASES = [*(case for case in OP_SETS["grid"][::5] if case.rows <= 128), OP_SETS["two-level"][0], *OP_SETS["ragged"]]


def rows_of(costs, cases=CASES, noise=0.0):
    for index, case in enumerate(cases):
        heads = Heads(case.heads, case.kv_heads, case.head_dim)
        seconds = predict(make_forest(case.rows, case.nodes), case.suffix, heads, costs)
        for offset, (name, (way, variant)) in enumerate(WAYS.items()):
            factor = 1 + noise * ((index + offset) % 3 - 1)
            row = {"device": "d", **case.columns(), "way": way, "variant": variant, "status": "ok"}
            yield {key: str(value) for key, value in (row | {"us_p50": 1e6 * seconds[name] * factor}).items()}


@pytest.fixture(scope="module")
def points():
    return measured(list(rows_of(KNOWN)))


def assert_close(found, expected, within):
    for name in WAYS:
        for constant in ("launch", "bandwidth", "suffix_bandwidth", "rate"):
            ours, theirs = (getattr(getattr(costs, name), constant) for costs in (found, expected))
            assert ours == pytest.approx(theirs, rel=within), (name, constant)


def test_known_constants_are_recovered(points):
    assert len(points) == 3 * len(CASES)
    assert_close(fit(points), KNOWN, 0.02)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_from_a_start_far_away(points, factor):
    def moved(candidate):
        return Candidate(*(factor * value for value in astuple(candidate)))

    start = replace(KNOWN, **{name: moved(getattr(KNOWN, name)) for name in WAYS})
    assert_close(fit(points, start), KNOWN, 0.02)


def test_noise_moves_them_little():
    assert_close(fit(measured(list(rows_of(KNOWN, noise=0.03)))), KNOWN, 0.06)


def test_the_rows_forests_are_the_cases(points):
    forests = {point.case: point.forest for point in points}
    for case in CASES:
        assert forests[f"{case.name} {case.dtype}"].nodes == make_forest(case.rows, case.nodes).nodes


def test_uneven_levels_are_refused():
    row = next(rows_of(KNOWN)) | {"rows": "10", "nodes": "1x100+3x20"}
    with pytest.raises(ValueError, match=r"nodes '1x100\+3x20' do not divide 10 rows evenly at depth 1"):
        measured([row])


def test_what_is_no_time_of_a_candidate_is_left_out():
    (row, *_) = rows_of(KNOWN, CASES[:1])
    others = ({"way": "hydragen"}, {"way": "ours-prefix"}, {"variant": "operators"}, {"status": "does not fit"})
    assert measured([row | other for other in others]) == []
    (point,) = measured([row])
    assert point.candidate == KERNELS
    assert point.ratio(KNOWN) == pytest.approx(1)


def test_too_few_rows_leave_a_candidate_as_it_was(points):
    some = [point for point in points if point.candidate != LIBRARY] + points[1:7:3]
    assert [point.candidate for point in some[-2:]] == [LIBRARY] * 2
    start = replace(KNOWN, kernels=replace(KNOWN.kernels, launch=9e-6))
    found = fit(some, start)
    assert found.library == start.library
    assert found.kernels.launch == pytest.approx(6e-6, rel=0.02)
    assert "library: 2 rows, too few for 4 constants: not fitted" in report(some, found)


def test_the_report_by_hand(points):
    case = points[0].case
    kernels, library = (point for point in points if point.case == case and point.candidate != PLAIN)
    seconds = predict(kernels.forest, kernels.suffix, kernels.heads, KNOWN)
    slow = replace(kernels, seconds=4 * seconds[LIBRARY])  # the model thinks that it wins
    assert seconds[KERNELS] < seconds[LIBRARY]
    lines = report([slow, library], KNOWN).splitlines()
    ratio = seconds[KERNELS] / (4 * seconds[LIBRARY])
    assert lines[0] == (
        "kernels: 1 rows, too few for 4 constants: not fitted; "
        f"predicted over measured: median {ratio:.2f}, worst {ratio:.2f} ({case})"
    )
    assert lines[2] == "plain: no rows, not fitted"
    assert lines[3] == (
        f"the predicted winner is the measured one in 0 of 1 cases; "
        f"the worst choice takes 4.00x the best one's time ({case})"
    )
    assert " in 1 of 1 cases; the worst choice takes 1.00x " in report([kernels, library], KNOWN)


def test_the_literal_is_the_costs():
    assert eval(literal(KNOWN), {"Costs": Costs, "Candidate": Candidate}) == KNOWN


def test_without_scipy_the_remedy_is_named(points, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match="fitting needs scipy, which the dev extra brings; `pip install scipy`"):
        fit(points)


def test_the_command(tmp_path, capsys):
    write_rows(tmp_path / "ops.csv", list(rows_of(KNOWN, CASES[::4])))
    main(tmp_path / "ops.csv")
    text = capsys.readouterr().out
    assert text.startswith("# d\nCosts(\n    kernels=Candidate(launch=6.")
    assert "with the constants in use for an H200:" in text
