"""Pictures and tables of rows, from rows made up for the purpose."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks import RESULTS, programs_table, ratios, summary
from benchmarks.figures import plot
from benchmarks.generate import table as generate
from benchmarks.ops import table as ops
from benchmarks.ops.cases import OP_SETS
from benchmarks.ops.table import fixed_parts_table
from benchmarks.readme import draw_readme_figures, readme_rows, readme_table
from hf_fastdecode.files import read_rows, write_rows

SOME = {"device": "H200", "torch": "1", "transformers": "2", "dtype": "bfloat16", "status": "ok"}


def op_rows(set_name="grid"):
    for case, (way, times) in product(
        OP_SETS[set_name],
        (
            ("sketch-suffix", 3.5),
            ("ours", 2.0),
            ("recipe", 4.0),
            ("plain", 40.0),
            ("sketch", 5.0),
            ("ours-suffix", 3.0),
        ),
    ):
        floor = (case.suffix_only if way.endswith("-suffix") else case).bytes(2) / 4e6
        measured = {"us_p50": times * floor, "floor_us": floor, "over_floor": times, "error_ratio": 0.5}
        ceilings = {"copy_tb_per_s": 4.0, "matmul_tflop_per_s": 800.0}
        row = SOME | case.columns() | measured | ceilings | {"way": way}
        yield {name: str(value) for name, value in row.items()}


def generate_rows(finish=""):
    ways = (("stock", 20.0), ("graph", 8.0), ("graph-no-attention", 4.0))
    for context, samples, (way, ms) in product((2048, 8192), (16, 128), ways):
        row = SOME | {"shape": "7b-mha", "context": context, "samples": samples, "new_tokens": 65, "way": way}
        row |= {"ms_per_step": ms, "tokens_per_s": 1e3 * samples / ms, "finish": finish}
        if way == "stock" and context * samples > 2**18:
            row |= {"status": "out of memory", "ms_per_step": "", "tokens_per_s": ""}
        yield {name: str(value) for name, value in row.items()}


def test_table_of_trees():
    """A line for each tree, whose cells have ours, the floor, and another way's time over ours."""
    rows = []
    for case, (way, us) in product(OP_SETS["fasttree"], (("ours", 20.0), ("fasttree", 50.0))):
        measured = SOME | case.columns() | {"way": way, "us_p50": us, "floor_us": 10.0}
        measured |= {"copy_tb_per_s": 4.0, "matmul_tflop_per_s": 800.0}
        rows.append({name: str(value) for name, value in measured.items()})
    rows[-1] |= {"status": "wrong: it errs", "us_p50": ""}
    lines = ops.ops_trees_table(rows).splitlines()
    assert len(lines) == 2 + 15 + 2
    assert lines[2].startswith("| 1x8+2x256 | 64x32 | 20.0 (10.0) | 2.50x | 20.0 (10.0) | 2.50x |")
    assert lines[16].endswith("| 20.0 (10.0) | wrong |")
    assert lines[-1].endswith("fasttree over ours: 2.50x, least 2.50x, of 44.")
    refused = {"status": "not run: no parameters", "us_p50": ""}
    rows = [row | refused if (row["way"], row["kv_heads"]) == ("fasttree", "8") else row for row in rows]
    names, _, first, *_ = ops.ops_trees_table(rows).splitlines()
    assert names.endswith("| fasttree over ours | 32/8: ours (floor) | 32/32: ours (floor) | fasttree over ours |")
    assert first.endswith("| 20.0 (10.0) | 2.50x | 20.0 (10.0) | 20.0 (10.0) | 2.50x |")


def test_parts_are_not_drawn_as_cases(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("benchmarks.figures.save", lambda figure, path: drawn.append(figure) or path)
    plot(list(op_rows()), tmp_path / "ops")
    for axis in drawn[0].axes:
        names = [line.get_label() for line in axis.lines]
        assert len(names) == len(set(names)) == 5
        floor = axis.lines[-1].get_xdata()
        assert len(floor) == len(set(floor))


def test_what_the_panels_of_operators_show(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("benchmarks.figures.save", lambda figure, path: drawn.append(figure) or path)
    plot(list(op_rows()), tmp_path / "ops")
    against_context, against_n, floor = drawn
    titles = [axis.get_title() for axis in against_context.axes]
    assert titles[4:8] == [f"32 heads, 8 KV; n {n}" for n in ("1", "32", "128", "1,024")]
    assert "64 own tokens a row" in against_context.get_suptitle()
    lines = {line.get_label(): dict(zip(*line.get_data())) for line in against_n.axes[5].lines}
    cases = {
        case.rows: case for case in OP_SETS["grid"] if (case.kv_heads, case.suffix, case.context) == (8, 64, 8192)
    }
    floors = {n: case.bytes(2) / 4e6 for n, case in cases.items()}
    assert lines.pop("floor: bytes or arithmetic") == pytest.approx(floors)
    assert lines["hf_fastdecode"] == pytest.approx({n: 2 * value for n, value in floors.items()})
    assert len(lines) == 4
    assert {text.get_text() for axis in floor.axes for text in axis.texts} == {"50%"}


def test_no_line_no_picture(tmp_path):
    assert plot(list(op_rows("two-level")), tmp_path / "ops") == []
    assert plot([], tmp_path / "ops") == []
    assert list(tmp_path.iterdir()) == []


def test_table_of_operators():
    lines = ops.ops_table(list(op_rows("two-level"))).splitlines()
    assert (
        lines[0]
        == "| rows | context | suffix | heads | floor | ours | recipe | plain | sketch | ours-suffix | sketch-suffix "
        "| ours over floor |"
    )
    assert lines[2].startswith("| 1024 | 1x2400+8x512 | 64 | 32/8 | ")
    assert lines[2].endswith(" | 2.00x |")
    assert "4.00 TB/s and 800 TFLOP/s" in lines[-1]
    assert lines[-1].endswith("cold L2.")
    assert ops.ops_table([row | {"error_ratio": ""} for row in op_rows("two-level")]).endswith("; not all checked.\n")
    case = OP_SETS["two-level"][0]
    assert f" | {case.bytes(2) / 4e6:.1f} | {2 * case.bytes(2) / 4e6:.1f} | " in lines[2]


def test_digest_of_operators():
    rows = list(op_rows())
    lines = ops.ops_digest(rows).splitlines()
    assert lines[0].startswith(
        "| heads | n | over the floor | where that is 15 us or more | plain over ours (least) | "
    )
    assert [line.split(" | ")[:2] for line in lines[2:4]] == [["| 8/1", "1"], ["| 8/1", "8"]]
    assert lines[2].startswith("| 8/1 | 1 | 2.00x | (0 of ")
    every = next(line for line in lines if line.startswith("| all | all | "))
    ours = [row for row in rows if row["way"] == "ours" and row["nodes"] == f"1x{row['context']}"]
    counted = sum(float(row["floor_us"]) >= ops.LEAST_FLOOR_US for row in ours)
    assert f"| 2.00x | 2.00x ({counted} of {len(ours)}) |" in every


def test_table_of_generate():
    lines = generate.generate_table(list(generate_rows())).splitlines()
    assert lines[0].endswith("| n | new tokens | stock | graph | graph-no-attention | graph, of ceiling |")
    assert lines[2] == "| 7b-mha | 2,048 | 16 | 65 | 20.00 | 8.00 | 4.00 | 50% |"
    assert lines[5] == "| 7b-mha | 8,192 | 128 | 65 | out of memory | 8.00 | 4.00 | 50% |"
    assert lines[-1].endswith("; ms/step, medians.")


def test_table_of_rows_that_finish():
    whole, apart = list(generate_rows("65-65")), list(generate_rows("16-65"))
    for row in apart:
        if row["ms_per_step"]:
            row["ms_per_step"] = str(0.75 * float(row["ms_per_step"]))
    lines = generate.finish_table([*whole, *apart]).splitlines()
    assert lines[2] == "| 7b-mha | 2,048 | 16 | stock | 1.28 s | 0.96 s | 0.75 |"
    assert "| 7b-mha | 8,192 | 128 | stock |  |  |  |" in lines
    assert generate.finish_table(whole) == ""


def test_table_of_families():
    """Cases that both ran, by their kind; what took longer is bold, and the rest is left out."""
    made = {"context": "512", "samples": "128", "new_tokens": "65", "total_s": "0.5", "ran": "vLLM 0, V2"}
    rows = []
    for shape, way, first in (
        ("qwen3.5-4b tree 1+16x511x8", "vllm", "0.2"),
        ("qwen3.5-4b tree 1+16x511x8", "shared", "0.25"),
        ("8b-gqa", "vllm", "1.5"),
        ("8b-gqa", "shared", "1.5"),
        ("deepseek-v2-lite", "shared", "1.5"),
    ):
        rows.append(SOME | made | {"shape": shape, "way": way, "prefill_s": first})
    both = programs_table.beside_vllm(rows)
    assert both == rows[:2]
    _, _, *lines, _, note = programs_table.families_table(both).splitlines()
    what = "| qwen3.5-4b | layers with states | 16 of 512 | 8 | 65 | 0.200 → **0.250** | 0.500 → 0.500 |"
    assert lines == [what] and note.startswith("H200, bfloat16, torch 1, transformers 2; vLLM 0 → `enable(model)`")
    refused = rows[1] | {"status": "out of memory", "total_s": ""}
    for pair in (rows[:1], [rows[0], refused]):
        assert programs_table.families_table(programs_table.beside_vllm(pair)) == "Not measured beside vLLM.\n"


def test_table_of_readme():
    """Calls of one prompt; those that take longer than vLLM's are bold, where that ran."""
    made = {"new_tokens": "65", "kv_bytes": str(2**30), "ran": "vLLM 0, V2", "finish": ""}
    failed = {"status": "out of memory", "total_s": ""}
    rows = [
        SOME | made | {"shape": shape, "context": context, "samples": "16", "way": way} | found
        for shape, context, way, found in (
            ("8b-gqa", "2048", "shared", {"total_s": "0.4"}),
            ("8b-gqa", "2048", "vllm", {"total_s": "0.3"}),
            ("8b-gqa", "64", "shared", {"total_s": "9"}),
            ("gpt-oss-20b tree 1+16x511x8", "512", "shared", {"total_s": "8"}),
            ("gpt-oss-20b tree 1+16x511x8", "512", "vllm", {"total_s": "8"}),
            ("gpt-oss-20b", "512", "shared", {"total_s": "0.5"}),
            ("gpt-oss-20b", "512", "vllm", {"total_s": "0.6"}),
        )
    ]
    _, _, first, second, _, note = readme_table(readme_rows(rows)).splitlines()
    assert first == "| 8b-gqa | 2,048 tokens | 16 |  | 0.30 s | **0.40 s** | 1.00 GiB |"
    assert second == "| gpt-oss-20b | 512 tokens | 16 |  | 0.60 s | 0.50 s | 1.00 GiB |"
    assert "vLLM 0, 65 new tokens" in note
    lines = readme_table(readme_rows([rows[0], rows[1] | failed])).splitlines()
    assert lines[2] == "| 8b-gqa | 2,048 tokens | 16 |  | out of memory | 0.40 s | 1.00 GiB |"


def test_table_of_experts():
    row = SOME | {"shape": "qwen3-30b-a3b", "context": "2048", "samples": "16", "way": "shared", "ms_per_step": "5"}
    counted = row | {"experts": "70.25", "of_experts": "128", "weights_floor_ms": "4"}
    line = "| qwen3-30b-a3b | 2,048 | 16 | shared | 70.2 of 128 | 5.00 ms | 4.00 ms | 1.25x |"
    theirs = "| qwen3-30b-a3b | 2,048 | 16 | vllm | 70.2 of 128 | 5.00 ms |  |  |"
    rows = [row | {"experts": ""}, counted, counted | {"way": "vllm", "weights_floor_ms": ""}]
    assert generate.experts_table(generate.with_experts(rows)).splitlines()[2:4] == [line, theirs]


def test_table_of_grpo_steps():
    stock = {"program": "TRL GRPO step", "trl": "1", "model": "x", "rows": "64", "new_tokens": "256", "device": "H"}
    stock |= {"prompt_tokens": "1182", "torch": "1", "transformers": "2", "way": "stock", "ran": ""}
    stock |= {"step_s": "36", "rollout_s": "24.5", "logprobs_s": "2.5", "update_s": "9", "peak_bytes": str(2**35)}
    ours = stock | {"way": "enabled", "step_s": "3.5", "ran": "21,000 of 92,000 tokens computed"}
    _, _, first, second, _, note = programs_table.grpo_steps_table([stock, ours]).splitlines()
    assert first == "| stock | 36.00 s | 24.50 s | 2.50 s | 9.00 s | 32 GiB |  |"
    assert second.startswith("| `fd.enable(model)` | 3.50 s | ")
    assert note.startswith(
        "TRL GRPO step (TRL 1), x in bf16: 64 completions of 256 tokens, prompts of up to 1182; H, "
    )


def test_table_and_histograms_of_ratios(tmp_path, monkeypatch):
    steps = {
        "program": "TRL GRPO step",
        "trl": "1",
        "model": "x",
        "precision": "fp32",
        "weights": "all",
        "device": "H",
    }
    steps |= {"rows": "8", "passes": "2", "torch": "1", "transformers": "2", "way": "log-probs of steps"}
    steps |= {"tokens": "7", "same_bits": "0.25", "largest_difference": "0.25", "outside": "0.125"}
    steps |= {"from -1": "1", "from -1e-07": "2", "from 0": "3", "from 1e-30": "0", "from 1": "1"}
    again = steps | {"way": "log-probs of steps, replayed", "from -1": "0", "outside": "0.0"}
    trainer = steps | {"way": "log-probs of trainer", "from 0": "7", "outside": "0.0"}
    lora = steps | {"weights": "LoRA"}
    rows = [steps | {"way": "stock", "tokens": ""}, steps, again, trainer, lora]
    header, _, first, second, _, note = ratios.ratios_table(rows).splitlines()
    assert header.endswith('| trained | of steps | of steps, routing replayed | `"trainer"` |')
    assert first == "| x | fp32 | all | 25%, 2e-01 (12.5%) | 25%, 2e-01 | 25%, 2e-01 |"
    assert second == "| x | fp32 | LoRA | 25%, 2e-01 (12.5%) |  |  |"
    assert "At least 7 tokens" in note
    drawn = []
    monkeypatch.setattr("hf_fastdecode.measurement.figures.save", lambda figure, path: drawn.append(figure) or path)
    ratios.draw_ratios(rows, tmp_path / "x.png")
    before, after = drawn[0].axes
    assert [[bar.get_height() for bar in axis.patches[:5]] for axis in (before, after)] == [
        [1, 2, 3, 0, 1],
        [1, 2, 7, 0, 1],
    ]
    assert before.patches[-1].get_data().values.tolist() == [0, 2, 3, 0, 1]
    assert before.get_ylim() == after.get_ylim()


def test_tables_are_made_from_the_rows():
    texts = [page.read_text() for page in summary.PAGES]
    for text in texts:
        assert summary.refreshed(text) == text, "run python -m benchmarks summary"
    for path in RESULTS.glob("*.csv"):
        assert f"<!-- rows: {path.name}" in "".join(texts)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_every_row_says_where_it_comes_from(path):
    rows = read_rows(path)
    assert rows
    for row in rows:
        ours = not row["ran"].startswith("vLLM ") if "ran" in row else True  # another program names its own version
        for column in ("device", "torch", "command", *(("transformers", "hf_fastdecode", "commit") if ours else ())):
            assert row[column], (column, row)
        assert "unknown" not in row["commit"]


def test_a_table_names_what_did_not_fit(tmp_path):
    case = {"shape": "x", "context": 100, "samples": 4, "new_tokens": 10, "dtype": "float32", "device": "d"}
    case |= {"torch": "1", "transformers": "2"}
    stock = case | {"way": "stock", "status": "out of memory"}
    shared = case | {"way": "shared", "status": "ok", "prefill_s": 0.5, "ms_per_step": 2.0, "total_s": 0.52}
    shared |= {"kv_bytes": 2**30 * 140 / 44, "floor_kv_bytes": 2**30 * 140 / 44}
    write_rows(tmp_path / "rows.csv", [stock, shared])
    text = summary.table(read_rows(tmp_path / "rows.csv"))
    # Stock would hold 4 * 109 tokens, the shared cache holds 140: as many GiB as tokens / 44.
    assert "| x | 100 | 4 | out of memory → 0.50 s | out of memory → 2.0 ms |" in text
    assert "| out of memory → 0.52 s |  | 9.91 → 3.18 GiB |" in text
    fits = stock | {"status": "ok", "prefill_s": 1, "ms_per_step": 20, "total_s": 1.3, "kv_bytes": 2**30}
    write_rows(tmp_path / "rows.csv", [fits, shared])
    assert "| 1.30 s → 0.52 s | 2.5x | 1.00 → 3.18 GiB |" in summary.table(read_rows(tmp_path / "rows.csv"))
    vllm = fits | {"way": "vllm", "prefill_s": 0.25, "ms_per_step": 7.25, "total_s": 0.3}
    write_rows(tmp_path / "rows.csv", [fits, shared, vllm])
    text = summary.table(read_rows(tmp_path / "rows.csv"))
    assert "| KV cache | vLLM: first token; a step; whole call |" in text
    assert "| 1.00 → 3.18 GiB | 0.25 s; 7.2 ms; 0.30 s |" in text


@pytest.mark.parametrize(
    ("shape", "before"),
    [("x", "0.50"), ("qwen3.5-4b", "out of memory"), ("nemotron-h-8b tree 60+2x40x3", "out of memory")],
)
def test_caches_that_did_not_fit_are_counted_where_layers_store_keys_and_values_alone(shape, before):
    case = {"shape": shape, "context": "100", "samples": "4", "new_tokens": "10", "dtype": "float32", "device": "d"}
    case |= {"torch": "1", "transformers": "2"}
    times = {"prefill_s": "0.5", "ms_per_step": "2", "total_s": "0.6", "status": "ok", "kv_bytes": str(2**30)}
    floor = {"floor_kv_bytes": str((140 / 436) * 2**29)}
    shared = case | {"way": "shared"} | times | floor
    stock = case | {"way": "stock", "status": "out of memory"}
    assert f"| {before} → 1.00 GiB |" in summary.table([stock, shared])
    alone = shared | {"samples": "8"}
    lines = summary.table([stock, shared, alone]).splitlines()
    assert lines[3] == f"| {shape} | 100 | 8 | 0.50 s | 2.0 ms | 0.60 s |  | 1.00 GiB |"


@pytest.mark.parametrize(
    ("case", "stored"),
    [
        ({"shape": "x tree 60+2x40x3", "samples": 6}, 60 + 2 * 40 + 6 * 10),
        ({"shape": "x", "samples": 4, "finish": "4-10"}, 100 + 4 + 6 + 8 + 10),
    ],
)
def test_what_stock_would_hold(case, stored):
    stock = case | {"context": 100, "new_tokens": 10, "status": "out of memory"}
    assert generate.stock_kv_bytes(stock, {"floor_kv_bytes": 7 * stored}) == 7 * case["samples"] * 109


def operator_row(way: str, rows: int, context: int, us: float, **changes):
    row = {"way": way, "rows": rows, "heads": 8, "kv_heads": 2, "suffix": 64, "head_dim": 128, "context": context}
    row |= {"nodes": f"1x{context}", "status": "ok", "us_p50": us, "copy_tb_per_s": 4.0, "matmul_tflop_per_s": 700.0}
    return {name: str(value) for name, value in (row | changes).items()}


def test_what_does_not_grow_with_the_context():
    rows = [operator_row("ours", 1, 1024 * k, 5 + 0.5 * k) for k in (2, 8, 16)]
    rows += [operator_row("ours-prefix", 512, 1024 * k, 3 + 2 * k + (k == 8)) for k in (2, 8, 14)]
    rows += [operator_row("ours", 8, 1024 * k, 5 + k) for k in (2, 8, 16)]  # suffixes are in it
    rows += [operator_row("plain", 1, 1024 * k, 5 + k) for k in (2, 8, 16)]
    rows += [operator_row("ours", 1, 1024 * k, 5 + k, suffix=256) for k in (2, 8)]
    rows += [operator_row("ours", 1, 4096, 0, suffix=256, status="out of memory", us_p50="")]
    rows += [operator_row("ours", 1, 4096, 9, nodes="2x2048", suffix=128)]
    lines = fixed_parts_table(rows).splitlines()[2:]
    # A token's key and value are 4 * 2 * 128 bytes, and 4 * 512 * 8 * 128 operations of 512 rows.
    assert lines == [
        "| ours | 1 | 8/2 | 64 | 2,048 to 16,384 | 5.0 us | 0.50 us | 2.10 TB/s | 0% |",
        "| ours-prefix | 512 | 8/2 |  | 2,048 to 14,336 | 3.3 us | 2.00 us | 1074 TFLOP/s | 5% |",
    ]


def test_a_step_apart_from_its_attention():
    case = {"shape": "tiny", "context": "1000", "samples": "6", "new_tokens": "10", "status": "ok"}
    rows = [
        case | {"way": way, "ms_per_step": ms}
        for way, ms in (("graph", "3.5"), ("shared", "2"), ("graph-no-attention", "3"), ("stock", "9"))
    ]
    lines = generate.steps_apart_table(rows).splitlines()[2:]
    assert lines == ["| tiny | 1,000 | 6 | graph | 3.50 ms | 3.00 ms | 0.50 ms | 250 us |"]


@pytest.mark.parametrize(("seconds", "shown"), [(11.9, "11.9 → 10.0 (none)"), (12.0, "12.0 → 10.0 (1.2x)")])
def test_factors_of_programs_below_a_bound_are_none(seconds, shown):
    row = {"program": "p", "model": "embedded", "setting": "s", "prefilled_tokens": "5", "status": "ok"}
    row |= {"device": "d", "torch": "1", "transformers": "2"}
    rows = [row | {"way": "stock", "generate_s": seconds}, row | {"way": "enabled", "generate_s": 10.0}]
    assert f"| p | embedded | s | {shown} | 5 → 5 | yes |" in programs_table.clients_table(rows, name="programs")


def test_the_picture_of_the_readme_is_drawn(tmp_path):
    rows = [row for name in ("generate.csv", "generate-vllm.csv") for row in read_rows(RESULTS / name)]
    drawn = draw_readme_figures(rows, tmp_path)
    assert sorted(path.name for path in drawn) == sorted(path.name for path in summary.PICTURES.iterdir())
    assert all(path.stat().st_size > 10_000 for path in drawn)


def test_captions_say_which_commits_were_measured(monkeypatch):
    monkeypatch.setattr(summary, "_dates", lambda: {"aaaaaaa": "2026-11-26", "bbbbbbb": "2026-11-23"})
    row = {"torch": "1", "transformers": "2"}
    one = row | {"commit": "aaaaaaa12345+changed"}
    other = row | {"commit": ""}  # of another program
    assert summary.ages([one, one, other]) == "Measured at aaaaaaa (2026-11-26)."
    older = row | {"commit": "bbbbbbb", "transformers": "1"}
    expected = (
        "Measured at several commits: ccccccc, bbbbbbb (2026-11-23), aaaaaaa (2026-11-26). Of transformers 1 and 2."
    )
    assert summary.ages([one, older, one | {"commit": "ccccccc"}]) == expected


def test_captions_say_what_was_timed_once():
    row = {"status": "ok", "way": "shared", "ms_per_step_p20": "1", "ms_per_step_p80": "2"}
    once = row | {"way": "stock", "ms_per_step_p80": "1"}
    assert generate.timed([row]) == "medians"
    assert generate.timed([once, once]) == "of one timed call each"
    assert generate.timed([row, once]) == "medians, stock: one timed call"
    assert generate.timed([row, once, row | {"way": "stock"}]) == "medians, some of one timed call"
