"""The README's numbers are the committed rows'."""

import pytest

from benchmarks import RESULTS, programs_table, summary
from benchmarks.generate import table as generate
from benchmarks.ops.table import fixed_parts_table
from benchmarks.readme import draw_readme_figures
from hf_fastdecode.files import read_rows, write_rows


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


def test_many_rows_that_run_to_the_end():
    row = {"shape": "x", "context": "100", "samples": "4", "new_tokens": "10", "dtype": "float32", "device": "d"}
    row |= {"torch": "1", "transformers": "2", "way": "graph", "status": "ok", "finish": "", "total_s": "1.5"}
    row |= {"tokens_per_s": "2000", "ran": "graph, 2 rows at once"}
    (line,) = generate.many_rows_table([row]).splitlines()[2:3]
    assert line == "| x | 100 | 4 | 10 of 10 | graph | 1.50 s | 2,000 | graph, 2 rows at once |"


def test_what_stock_would_hold_of_a_tree():
    stock = {"shape": "x tree 60+2x40x3", "context": 100, "samples": 6, "new_tokens": 10, "status": "out of memory"}
    shared = {"floor_kv_bytes": 7 * (60 + 2 * 40 + 6 * 10)}
    assert generate.stock_kv_bytes(stock, shared) == 7 * 6 * 109


def test_what_stock_would_hold_where_rows_end_early():
    stock = {"shape": "x", "context": 100, "samples": 4, "new_tokens": 10, "finish": "4-10", "status": "out of memory"}
    shared = {"floor_kv_bytes": 7 * (100 + 4 + 6 + 8 + 10)}
    assert generate.stock_kv_bytes(stock, shared) == 7 * 4 * 109


def test_trees_beside_stock():
    tree = {"shape": "x tree 60+2x40x3", "context": 100, "samples": 6, "new_tokens": 10, "status": "ok"}
    tree |= {"way": "graph", "ms_per_step": 1.25, "kv_bytes": 2**30 * 200 / 50, "floor_kv_bytes": 2**30 * 200 / 50}
    tree = {name: str(value) for name, value in tree.items()}
    assert "| x tree 60+2x40x3 | 6 | graph | 1.2 ms | 4.0 GiB | 13.1 GiB |" in generate.trees_table([tree])


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


def test_first_calls():
    row = {"shape": "x", "context": "100", "samples": "6", "new_tokens": "10", "way": "graph", "caches": "cold"}
    row |= {"first_call_s": "7", "second_call_s": "0.64", "third_call_s": "0.6", "tenth_call_s": "0.5"}
    row |= {"more_rows_s": "1", "longer_prompt_s": "2", "reused_first_token_s": "0.0144", "status": "ok"}
    row |= {"device": "d", "dtype": "float16", "torch": "1", "transformers": "2"}
    found = summary.table([row, row | {"way": "stock", "status": "out of memory"}])
    assert "| x | 100 | 6 | graph | cold | 7.00 | 0.64 | 0.60 | 0.50 | 1.00 | 2.00 | 0.014 |" in found
    assert "| stock | cold | out of memory | out of memory |" in found


@pytest.mark.parametrize(("seconds", "shown"), [(11.9, "11.9 → 10.0 (none)"), (12.0, "12.0 → 10.0 (1.2x)")])
def test_factors_of_programs_below_a_bound_are_none(seconds, shown):
    row = {"program": "p", "model": "embedded", "setting": "s", "prefilled_tokens": "5", "status": "ok"}
    row |= {"device": "d", "torch": "1", "transformers": "2"}
    rows = [row | {"way": "stock", "generate_s": seconds}, row | {"way": "enabled", "generate_s": 10.0}]
    assert f"| p | embedded | s | {shown} | 5 → 5 | yes |" in programs_table.programs_table(rows)


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


def test_an_interrupted_write_leaves_the_old_rows(tmp_path):
    path = tmp_path / "rows.csv"
    write_rows(path, [{"a": 1}])
    with pytest.raises(KeyboardInterrupt):
        write_rows(path, Interrupted([{"a": 2}]))
    assert read_rows(path) == [{"a": "1"}]


class Interrupted(list):
    """Rows during whose writing the user presses Ctrl-C: the second pass over them, after the column names, breaks."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        yield from super().__iter__()
        if self.passes > 1:
            raise KeyboardInterrupt
