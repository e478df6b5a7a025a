"""The files, pictures, page and terminal tables of a report."""

from __future__ import annotations

import base64
import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from hf_fastdecode.evals import report_figures
from hf_fastdecode.evals.report import report
from hf_fastdecode.evals.report_files import curve_rows, growth_lines, page, report_text, write_report

from .run_folders import CPU, full_run, latency, samples, verdicts, write_run


@pytest.fixture
def found(tmp_path):
    return report(full_run(tmp_path / "run"))


@pytest.fixture
def drawn(monkeypatch):
    """Figures in place of files, with their axes by title."""
    kept = []

    def keep(figure, path):
        kept.append({axis.get_title(): axis for axis in figure.axes if axis.get_visible()})
        return path

    monkeypatch.setattr("hf_fastdecode.measurement.figures.save", keep)
    return kept


def lines_of(axis):
    return {line.get_label(): [*zip(*line.get_data())] for line in axis.lines if not line.get_label().startswith("_")}


def test_from_a_folder_to_everything(tmp_path):
    folder = full_run(tmp_path / "run")
    written = write_report(report(folder), folder)
    assert [path.name for path in written] == [
        "metrics.json",
        "curve.csv",
        "accuracy-latency.png",
        "accuracy-n.png",
        "report.html",
    ]
    assert all(path.parent == folder and path.stat().st_size for path in written)
    given = {"samples.jsonl", "verdicts.jsonl", "latency.csv", "settings.json"}
    assert {path.name for path in folder.iterdir()} == given | {path.name for path in written}
    first = {path: path.read_bytes() for path in written}
    assert [first[path][:4] for path in written[2:4]] == [b"\x89PNG"] * 2
    write_report(report(folder), folder)
    assert {path: path.read_bytes() for path in written} == first

    metrics = json.loads(first[written[0]])
    assert metrics["settings"]["run"]["model"] == "m & <i>n</i>"
    assert metrics["accuracy"]["n"] == [1, 2, 4]
    assert metrics["accuracy"]["curves"]["mean_logp"]["label"] == "pass@top3, mean log-p"
    assert len(metrics["latency"]) == 8
    assert {(own["way"], own["ranker"]) for own in metrics["accuracy_within"]} == {
        *(("shared", "oracle"), ("shared", "mean_logp")),
        *(("stock", "oracle"), ("stock", "mean_logp")),
    }

    rows = list(csv.DictReader(first[written[1]].decode().splitlines()))
    assert [row["n"] for row in rows] == ["1", "2", "4", "8"]
    assert [row["shared_last_sample_s"] for row in rows] == ["1.05", "1.1", "1.2", "1.4"]
    assert [row["stock_last_sample_s"] for row in rows[2:]] == ["3.2", ""]
    assert [bool(row["pass@n"]) for row in rows] == [True, True, True, False]
    assert float(rows[2]["pass@n"]) == pytest.approx(2 / 3)
    assert set(rows[0]) > {"device", "pass@top3", "pass@top3_low", "pass@top3_high", "pass@n_low", "stock_mode"}


def test_a_picture_that_has_no_data_any_more_is_removed(tmp_path):
    folder = full_run(tmp_path / "run")
    write_report(report(folder), folder)
    (folder / "latency.csv").unlink()
    assert "accuracy-latency.png" not in {path.name for path in write_report(report(folder), folder)}
    assert not (folder / "accuracy-latency.png").exists()
    assert "against latency" not in (folder / "report.html").read_text()


class Tags(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, text):
        super().__init__()
        self.names, self.values = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.values += [(name, value) for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]


def test_the_page_needs_nothing_else(found):
    picture = b"\x89PNG..."
    text = page(found, {'<"against" latency>': picture})
    tags = Tags(text)
    assert "script" not in tags.names
    assert "link" not in tags.names
    assert tags.values == [("src", f"data:image/png;base64,{base64.b64encode(picture).decode()}")]
    assert not re.search(r"https?://|//\w|url\(|@import", text)
    assert "default-src 'none'" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "model m &amp; &lt;i&gt;n&lt;/i&gt;; task mbpp" in text
    assert "<i>" not in text
    assert "&lt;&quot;against&quot; latency&gt;" in text
    for heading in ("accuracy, with", f"latency on {CPU}", "\ntasks", "settings: {"):
        assert heading in re.sub("<[^>]*>", "", text)


def test_notes_and_devices_are_escaped(tmp_path):
    rows = [replace(row, device="<b>CPU</b>", status="<b>red</b>") for row in latency((8,))]
    text = page(report(write_run(tmp_path, latency=[*rows, *latency((1, 2), device="<u>")])), {})
    assert not {"b", "u"} & set(Tags(text).names)
    assert "&lt;b&gt;CPU&lt;/b&gt;: &lt;b&gt;red&lt;/b&gt; at n = 8" in text


def test_no_column_of_the_page_is_cut(found):
    accuracy = found.accuracy
    tasks = [replace(accuracy.tasks[0], task_id="T" * 300), *accuracy.tasks[1:]]
    settings = {**found.settings, "command": "a " * 200}
    found = replace(found, accuracy=replace(accuracy, tasks=tasks), settings=settings)
    lines = re.sub("<[^>]*>", "", page(found, {})).splitlines()
    task = tasks[0]
    numbers = [task.samples, task.passed, task.distinct, task.distinct_passed]
    assert ["T" * 300, *map(str, numbers)] in map(str.split, lines)
    assert any("a " * 200 in line for line in lines)


def test_what_the_panels_show(found, drawn, tmp_path):
    report_figures.draw_against_latency(found, tmp_path / "a.png")
    (axes,) = drawn
    assert list(axes) == [
        "pass@n against latency",
        "pass@top3 against latency",
        "accuracy within a time budget",
        "latency against n",
    ]
    for name, ranker in (("pass@n", "oracle"), ("pass@top3", "mean_logp")):
        axis = axes[f"{name} against latency"]
        values = found.accuracy.curves[ranker].values
        drawn_lines = lines_of(axis)
        assert list(drawn_lines) == ["hf_fastdecode, eager", "transformers, eager"]
        for points, seconds in zip(drawn_lines.values(), ((1.05, 1.1, 1.2), (1.55, 2.1, 3.2))):
            assert [x for x, _ in points] == pytest.approx([1000 * value for value in seconds])
            assert [y for _, y in points] == list(values)
        assert axis.get_xlabel() == "latency until the last of n samples, ms"
        assert {text.get_text() for text in axis.texts} >= {"n = 1", "n = 4"}
    steps = axes["accuracy within a time budget"].lines
    assert [step.get_linestyle() for step in steps[:4]] == ["-", "--", "-", "--"]
    assert list(steps[2].get_xdata()) == pytest.approx([1550, 2100, 3200, 6400])
    latency_axis = axes["latency against n"]
    assert [x for x, _ in lines_of(latency_axis)["hf_fastdecode, eager"]] == [1, 2, 4, 8]
    assert latency_axis.get_ylabel() == "until the last sample, ms (p50, shaded to p90)"
    assert CPU in next(iter(axes.values())).figure.get_suptitle()


def test_no_number_covers_another(tmp_path, drawn):
    ns = range(1, 17)
    tasks = {"1": [(f"x{n}", -float(n), True) for n in ns]}
    rows = [
        replace(row, last_sample_s=(1 + 0.03 * row.n) * (1 if row.way == "shared" else 3), status="ok")
        for row in latency(ns)
    ]
    found = report(write_run(tmp_path, samples=samples(tasks), verdicts=verdicts(tasks), latency=rows))
    report_figures.draw_against_latency(found, tmp_path / "a.png")
    for name in ("pass@n against latency", "pass@top3 against latency"):
        texts = drawn[0][name].texts
        boxes = [text.get_window_extent() for text in texts]
        assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])
        assert {"n = 1", "n = 16"} <= {text.get_text() for text in texts}
        assert 6 < len(texts) < 2 * len(ns)


def test_shares_are_labelled_exactly(tmp_path, drawn):
    # Values between 95 % and 98.75 %, where ticks in quarters of 10 % would be rounded.
    tasks = {str(task): [(f"x{n}", -float(n), task % 20 > 0 or n == 1) for n in range(2)] for task in range(80)}
    report_figures.draw_against_n(
        report(write_run(tmp_path, samples=samples(tasks), verdicts=verdicts(tasks))), tmp_path
    )
    (axis,) = drawn[0].values()
    axis.figure.draw_without_rendering()
    low, high = axis.get_ylim()
    shown = [(tick, label.get_text()) for tick, label in zip(axis.get_yticks(), axis.get_yticklabels())]
    shown = [(tick, text) for tick, text in shown if low <= tick <= high]
    assert len(shown) >= 3
    assert [float(text.rstrip("%")) / 100 for _, text in shown] == pytest.approx([tick for tick, _ in shown], abs=1e-9)


def test_rankers_against_n(found, drawn, tmp_path):
    report_figures.draw_against_n(found, tmp_path / "a.png")
    (axis,) = drawn[0].values()
    assert list(lines_of(axis)) == [
        "pass@n",
        "pass@top3, mean log-p",
        "pass@top3, sum log-p",
        "majority vote, top 3",
        "first 3 distinct, unranked",
    ]
    assert [y for _, y in lines_of(axis)["pass@n"]] == list(found.accuracy.curves["oracle"].values)


def test_each_device_has_its_panels(tmp_path, drawn):
    rows = [*latency(), *latency(device="H200", modes=("eager", "graph"))]
    found = report(write_run(tmp_path, samples=samples(), verdicts=verdicts(), latency=rows))
    report_figures.draw_against_latency(found, tmp_path / "a.png")
    assert len(drawn[0]) == 8
    assert set(lines_of(drawn[0]["latency against n on H200"])) == {
        "hf_fastdecode, eager",
        "hf_fastdecode, graph",
        "transformers, eager",
    }
    assert set(lines_of(drawn[0][f"latency against n on {CPU}"])) == {"hf_fastdecode, eager", "transformers, eager"}


def test_latency_alone(tmp_path, drawn):
    found = report(write_run(tmp_path, latency=latency()))
    report_figures.draw_against_latency(found, tmp_path / "a.png")
    assert list(drawn[0]) == ["latency against n", "time of a step against n"]
    assert lines_of(drawn[0]["time of a step against n"])["transformers, eager"] == [(1, 20.0), (2, 40.0), (4, 80.0)]
    assert report_figures.draw_against_n(found, tmp_path / "b.png") is None
    assert [row["n"] for row in curve_rows(found)] == [1, 2, 4, 8]


@pytest.mark.parametrize("case", ["failed", "no n in common", "steps unknown", "one n", "one task", "unranked"])
def test_sparse_runs_are_written(tmp_path, case):
    accuracy = {"samples": samples(), "verdicts": verdicts()}
    options = {}
    match case:
        case "failed":
            files = {"latency": latency((8,))[1:]}
        case "no n in common":
            files, options = accuracy | {"latency": latency((2,))}, {"ks": [1]}
        case "steps unknown":
            files = {"latency": [replace(row, ms_per_step_p50=float("nan")) for row in latency()]}
        case "one n":
            files = {"latency": latency((1,))} | accuracy
        case "one task":
            files = {name: [own for own in rows if own.task_id == "MBPP/2"] for name, rows in accuracy.items()}
            files |= {"latency": latency()}
        case "unranked":
            files, options = accuracy | {"latency": latency()}, {"m": None}
    found = report(write_run(tmp_path, **files), **options)
    written = {path.name for path in write_report(found, tmp_path)}
    assert written >= {"metrics.json", "curve.csv", "report.html"}
    assert ("accuracy-latency.png" in written) == (case != "failed")
    Console(file=(out := StringIO())).print(report_text(found))
    assert "pass@topNone" not in out.getvalue() + (tmp_path / "report.html").read_text()


def test_tables_fit_a_terminal(found):
    console = Console(width=80, record=True, file=StringIO())
    console.print(report_text(found))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[0] == "model m & <i>n</i>; task mbpp; 3 tasks, 4 samples of each"
    assert not any("…" in line for line in lines)
    at_four = next(line for line in lines if re.match(r" *4 +\d+\.\d%", line))
    assert re.match(r" *4 66\.7% \[\d+, \d+\] +66\.7% \[", at_four)
    shared = next(line for line in lines if re.match(r" *shared +eager +4 ", line))
    assert shared.split() == ["shared", "eager", "4", "0.250", "40.0", "1.20", "2.7x"]
    assert f"hf_fastdecode, eager on {CPU}: 8 samples within twice the latency of one" in " ".join(lines)
    assert f"note: stock, eager on {CPU}: out of memory at n = 8" in lines


def test_one_sample_is_no_plural(tmp_path):
    lines = growth_lines(report(write_run(tmp_path, latency=latency((1,)))))
    assert lines[0] == f"hf_fastdecode, eager on {CPU}: 1 sample within twice the latency of one"


def test_markup_in_names_is_text(tmp_path):
    run = write_run(tmp_path, latency=latency((1,), device="[red]GPU[/red]"), settings={"model": "[bold]x"})
    console = Console(width=120, record=True, file=StringIO())
    console.print(report_text(report(run)))
    assert "latency on [red]GPU[/red], medians" in (text := console.export_text())
    assert text.startswith("model [bold]x")


def test_importing_the_report_imports_no_torch_and_draws_nothing(tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    read = "import sys, hf_fastdecode.evals.report_files"
    code = f"{read}\nprint({{'torch', 'matplotlib', 'evaluate'}} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
