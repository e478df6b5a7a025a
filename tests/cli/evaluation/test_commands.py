"""The commands of ``hf-fastdecode eval``."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path

import pytest

from hf_fastdecode.evals.sandbox import SandboxError, choose

from .. import command_line

MBPP = [
    {
        "task_id": 11,
        "text": "Write a function to double a number.",
        "code": "def twice(x):\r\n    return 2 * x",
        "test_setup_code": "",
        "test_list": ["assert twice(2) == 4", "assert twice(-1) == -2"],
        "challenge_test_list": [],
    },
    {
        "task_id": 12,
        "text": "Write a function to halve a number.",
        "code": "def half(x):\n    return x",
        "test_setup_code": "",
        "test_list": ["assert half(2) == 1"],
        "challenge_test_list": [],
    },
]


run, ran, refusal = (partial(one, "eval") for one in (command_line.run, command_line.ran, command_line.refusal))


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def sandboxed() -> None:
    try:
        choose("auto")
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture
def mbpp(tmp_path: Path) -> Path:
    path = tmp_path / "mbpp.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in MBPP))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, sandboxed: None) -> Path:
    """A run with all of its steps."""
    place = tmp_path_factory.mktemp("runs") / "small"
    done = ran("run", "--limit", 3, "--n", "1,4", "--shots", 1, "--latency", 1, "--max-new-tokens", 40, "--out", place)
    assert "12 samples drawn" in done.stderr
    return place


def test_a_run_draws_times_scores_and_reports(folder: Path) -> None:
    verdicts = [json.loads(line) for line in (folder / "verdicts.jsonl").read_text().splitlines()]
    assert len(verdicts) == 12
    assert all(line["passed"] == (line["status"] == "pass") for line in verdicts)
    assert {line["passed"] for line in verdicts} == {True, False}
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["settings"]["run"]["task"] == "embedded"
    assert len((folder / "latency.csv").read_text().splitlines()) == 1 + 2 * 2
    assert (folder / "accuracy-latency.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (folder / "report.html").read_text()


def test_the_same_command_again_keeps_everything(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".jsonl", ".csv", ".json")}
    again = ran(
        *("run", "--limit", 3, "--n", "1,4", "--shots", 1, "--latency", 1, "--max-new-tokens", 40, "--out", folder)
    )
    assert "0 samples drawn" in again.stderr
    assert "4 of 4 rows are those of an earlier run" in again.stderr
    after = {name: (folder / name).read_bytes() for name in before}
    assert after == before


def test_another_run_in_its_folder_is_refused(folder: Path) -> None:
    words = ("--limit", 2, "--n", 4, "--shots", 1, "--max-new-tokens", 40, "--out", folder)
    assert "holds a run with another digest of the tasks and prompts" in refusal("generate", *words)


def test_latency_of_something_else_is_not_mixed_in(folder: Path) -> None:
    before = (folder / "latency.csv").read_bytes()
    words = ("latency", "--n", 1, "--shots", 1, "--out", folder, "--max-new-tokens")
    assert "has rows of another new tokens (40, now 41); name another --out" in refusal(*words, 41, "--prompts", 1)
    assert (folder / "latency.csv").read_bytes() == before
    kept = (folder / "latency.csv").rename(folder / "kept.csv")
    assert "holds a run with another temperature (0.8, now 0.5)" in refusal(*words, 40, "--temperature", 0.5)
    kept.rename(folder / "latency.csv")


def test_latency_of_several_modes(tmp_path: Path) -> None:
    ran(
        *("latency", "--n", "2", "--mode", "auto,eager", "--shots", 1, "--limit", 1, "--max-new-tokens", 8),
        *("--prompts", 1, "--out", tmp_path),
    )
    with (tmp_path / "latency.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["way"], row["mode"], row["status"]) for row in rows] == [
        ("shared", "eager", "ok"),
        ("shared:eager", "eager", "ok"),
        ("stock", "eager", "ok"),
    ]
    assert all(row["commit"] and row["command"] and row["model"] == "embedded" for row in rows)


def test_a_part_of_a_run_is_scored_and_said_to_be_one(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "settings.json").write_bytes((folder / "settings.json").read_bytes())
    lines = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "samples.jsonl").write_bytes(b"".join(lines[:8]))
    done = run("score", copy, "--n", "1,3")
    assert "holds 8 of 12 samples; the others are not drawn yet" in done.stderr
    assert sorted((line["task_id"], line["index"]) for line in lines_of(copy / "verdicts.jsonl")) == [
        (task_id, index) for task_id in ("101", "102") for index in range(3)
    ]
    assert "knows its tasks; leave out --task" in refusal("score", copy, "--limit", 1)


def test_tasks_that_have_changed_are_not_scored(mbpp: Path, tmp_path: Path, sandboxed: None) -> None:
    place = tmp_path / "run"
    options = ("--task", "mbpp", "--data", mbpp, "--n", "1", "--shots", 0, "--max-new-tokens", 4)
    ran("generate", *options, "--out", place)
    mbpp.write_text(mbpp.read_text().replace("twice(2) == 4", "twice(2) == 5"))
    refused = run("score", place)
    assert refused.exit_code == 2
    assert "are no longer those that" in refused.stderr
    assert not (place / "verdicts.jsonl").exists()


def test_samples_for_other_tools(folder: Path, tmp_path: Path, sandboxed: None) -> None:
    out = tmp_path / "samples.jsonl"
    ran("export", folder, "--form", "evalplus", "--out", out)
    assert {line["task_id"] for line in lines_of(out)} == {"Mbpp/101", "Mbpp/102", "Mbpp/103"}
    again = run("score", out, "--task", "embedded", "--limit", 2)
    assert "8 samples of 2 tasks" in again.stdout
    verdicts = {(line["task_id"], line["index"]): line["passed"] for line in lines_of(folder / "verdicts.jsonl")}
    scored = {(line["task_id"], line["index"]): line["passed"] for line in lines_of(Path(f"{out}.results.jsonl"))}
    assert scored == {place: passed for place, passed in verdicts.items() if place[0] != "103"}


def test_processed_log_probabilities(folder: Path, tmp_path: Path) -> None:
    options = ("--limit", 3, "--n", "1,4", "--shots", 1, "--max-new-tokens", 40)
    ran("generate", *options, "--processed", "--out", tmp_path)
    kept = lines_of(tmp_path / "samples.jsonl")
    assert all(line["sum_processed_logp"] <= 0 for line in kept)
    assert any(line["sum_logp"] != line["sum_processed_logp"] for line in kept)
    assert [line["completion"] for line in kept] == [line["completion"] for line in lines_of(folder / "samples.jsonl")]


def test_a_run_is_scored_anew_where_it_was_interrupted(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("settings.json", "samples.jsonl"):
        (copy / name).write_bytes((folder / name).read_bytes())
    whole = (folder / "verdicts.jsonl").read_bytes()
    (copy / "verdicts.jsonl").write_bytes(whole[: len(whole) // 2])
    ran("score", copy)
    found = {json.dumps(json.loads(line)) for line in (copy / "verdicts.jsonl").read_text().splitlines()}
    assert found == {json.dumps(json.loads(line)) for line in whole.decode().splitlines()}


def test_samples_of_another_tool_are_scored(mbpp: Path, tmp_path: Path, sandboxed: None) -> None:
    samples, results = tmp_path / "samples.jsonl", tmp_path / "results.jsonl"
    solutions = {11: "def twice(x):\n    return x + x\n", 12: "def half(x):\n    return x / 2\n"}
    lines = [{"task_id": f"Mbpp/{number}", "solution": text} for number, text in solutions.items()]
    lines.append({"task_id": 12, "completion": "def half(x)\n    return x"})
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = ran("score", samples, "--task", "mbpp", "--data", mbpp, "--out", results)
    assert "2 of 3 samples of 2 tasks pass; pass@1 75.0 %" in done.stdout
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted((line["task_id"], line["index"], line["passed"], line["status"]) for line in found) == [
        ("11", 0, True, "pass"),
        ("12", 0, True, "pass"),
        ("12", 1, False, "compile"),
    ]


@pytest.mark.parametrize("content", [None, '[["def twice(x): return 2 * x"]]', '[{"task_id": 11}]'])
def test_results_do_not_go_into_files_of_something_else(
    content: str | None, mbpp: Path, tmp_path: Path, sandboxed: None
) -> None:
    samples, other = tmp_path / "samples.jsonl", tmp_path / "other.json"
    samples.write_text(json.dumps({"task_id": 11, "completion": "def twice(x):\n    return 3"}) + "\n")
    out = samples if content is None else other
    if content is not None:
        other.write_text(content)
    before = out.read_bytes()
    refused = run("score", samples, "--task", "mbpp", "--data", mbpp, "--out", out)
    assert refused.exit_code == 2
    assert "name another" in refused.stderr
    assert out.read_bytes() == before


def test_changed_samples_are_scored_again(mbpp: Path, tmp_path: Path, sandboxed: None) -> None:
    samples, results = tmp_path / "samples.jsonl", tmp_path / "results.jsonl"
    for body, passing in (("return 3", 0), ("return 2 * x", 1)):
        samples.write_text(json.dumps({"task_id": 11, "completion": f"def twice(x):\n    {body}"}) + "\n")
        done = run("score", samples, "--task", "mbpp", "--data", mbpp, "--out", results)
        assert f"{passing} of 1 samples" in done.stdout


def test_reference_solutions_are_checked(mbpp: Path, sandboxed: None) -> None:
    done = run("check", "--task", "mbpp", "--data", mbpp)
    assert done.exit_code == 1
    assert "12: fail" in done.stdout
    assert "1 of 2 reference solutions pass (50.0 %)" in done.stdout
    ran("check", "--limit", 3)


def test_tests_that_cannot_be_run_and_paths_that_cannot_be(mbpp: Path, tmp_path: Path, sandboxed: None) -> None:
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"task_id": 11, "completion": "x = 1"}) + "\n")
    refused = run("score", samples, "--task", "mbpp", "--data", mbpp, "--out", samples / "x.jsonl")
    assert refused.exit_code == 2
    assert refused.stderr.splitlines()[-1].startswith(f"hf-fastdecode: {samples}: ")
    mbpp.write_text(mbpp.read_text().replace("assert half(2) == 1", "assert half(2) =="))
    refused = run("check", "--task", "mbpp", "--data", mbpp)
    assert refused.exit_code == 2
    assert "leave the task out with --task-ids" in refused.stderr.splitlines()[-1]


def test_a_report_without_ranks_and_with_its_own_n(folder: Path) -> None:
    done = ran("report", folder, "--no-rank", "--n", "1,3")
    assert "Samples were not ranked" in done.stdout
    run("report", folder)  # as it was


def test_samples_are_rescored(folder: Path, tmp_path: Path) -> None:
    """By a file with the run's options, and by the folder, which knows them."""
    scored = tmp_path / "scored.jsonl"
    ran("rescore", folder / "samples.jsonl", "--shots", 1, "--out", scored)
    before = {(line["task_id"], line["index"]): line for line in lines_of(folder / "samples.jsonl")}
    after = lines_of(scored)
    assert len(after) == 12
    pairs = [(one, before[one["task_id"], one["index"]]) for one in after]
    alike = [(one, other) for one, other in pairs if one["tokens"] == other["tokens"] > 0]
    assert len(alike) >= 8  # others were drawn as other tokens than their text has
    close = [abs(one["sum_logp"] - other["sum_logp"]) / one["tokens"] < 1e-4 for one, other in alike]
    assert sum(close) >= len(close) - 2  # as many tokens need not be the same
    ran("rescore", folder, "--out", tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == scored.read_bytes()
    refused = refusal("rescore", folder, "--shots", 2, "--out", tmp_path / "other.jsonl")
    assert "knows its prompts; leave out --format, --shots and --chat" in refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--n", "0"], "--n must be whole numbers of at least 1 with commas between, got '0'"),
        (["generate", "--n", "1,x"], "got 'x'"),
        (["generate", "--temperature", "0"], "greedy samples of a task are all equal, got --n up to 32"),
        (["generate", "--temperature", "-1"], "--temperature must be 0 (greedy) or at least 1e-6"),
        (["generate", "--temperature", "nan"], "--temperature must be 0 (greedy) or at least 1e-6"),
        (["generate", "--top-p", "0"], "--top-p must be above 0 and at most 1, got 0"),
        (["generate", "--rows", "0"], "Invalid value for '--rows'"),
        (["generate", "--seed", "-1"], "--seed must be at least 0"),
        (["generate", "--stock", "--mode", "graph"], "--mode graph is for hf_fastdecode"),
        (["generate", "--model", "/nowhere"], "there is no file or folder /nowhere"),
        (["generate", "--task", "nothing"], "there are no tasks 'nothing'; choose one of embedded, mbpp"),
        (["generate", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["generate", "--task-ids", "9999"], "there is no task 9999"),
        (["generate", "--format", "haiku"], "there is no prompt format 'haiku'"),
        (["generate", "--chat-template-kwargs", "{}"], "add --chat"),
        (["generate", "--chat", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs must be a JSON object such"),
        (["generate", "--shots", "39", "--max-new-tokens", "4000"], "positions of this model; lower --shots"),
        (["generate", "--dtype", "int3"], "int3"),
        (["run", "--task", "prompts.jsonl"], "task 1 is a prompt without tests, which cannot be scored; draw its"),
        (["run", "--latency", "-1"], "Invalid value for '--latency'"),
        (["check", "--sandbox", "nothing"], "--sandbox must be auto, bwrap"),
        (["check", "--sandbox", "none"], "add --allow-unsafe-code to permit it"),
        (["run", "--deduplicate", "tokens"], "--deduplicate must be one of text, ast, got 'tokens'"),
        (["generate", "--processed", "--sampler", "fast"], "leave out --sampler fast"),
        (["latency", "--mode", "graph,fast"], "--mode must be one of"),
        (["export", ".", "--form", "csv", "--out", "x"], "--form must be one of own, human-eval"),
        (["score", "/nowhere"], "/nowhere"),
        (["report", "/"], "has neither verdicts.jsonl nor latency.csv"),
        (["score", "/"], "/ is not the folder of a run"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], words: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}')
    assert words in refusal(*arguments)
    assert not any(tmp_path.rglob("samples*.jsonl"))


@pytest.mark.parametrize("step", ["generate", "score"])
def test_ctrl_c_says_that_the_same_command_goes_on(step: str, folder: Path, tmp_path: Path, monkeypatch) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    if step == "generate":
        monkeypatch.setattr("hf_fastdecode.evals.generation.generate_samples", interrupt)
        words, place = ("generate", "--limit", 1, "--n", 1, "--out", tmp_path), tmp_path
    else:
        monkeypatch.setattr("hf_fastdecode.evals.scoring.judge", interrupt)
        words, place = ("score", folder, "--out", tmp_path / "verdicts.jsonl"), tmp_path / "verdicts.jsonl"
    done = run(*words)
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1] == (
        f"interrupted: what is done is in {place}; run the same command again to go on where it stopped"
    )


def test_a_run_says_first_what_it_scores_with(tmp_path: Path, sandboxed: None, monkeypatch) -> None:
    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_fastdecode.evals.generation.generate_samples", stop)
    done = run("run", "--limit", 2, "--n", "1,4", "--out", tmp_path / "run")
    first = done.stderr.splitlines()[0]
    assert first == (
        f"scores 8 samples, 4 of each of 2 tasks (embedded, python), in the sandbox {choose('auto').name}; samples go "
        f"to {tmp_path / 'run'}"
    )
