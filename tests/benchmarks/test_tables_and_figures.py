"""Pictures and tables of rows, from rows made up for the purpose."""

from itertools import product

import pytest

from benchmarks.figures import RedCheckError, plot
from benchmarks.generate import table as generate
from benchmarks.ops import table as ops
from benchmarks.ops.cases import OP_SETS
from benchmarks.paper_tables import PAPER_TABLES

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


def test_pictures_of_operators(tmp_path):
    of_some_heads = [row for row in op_rows() if row["kv_heads"] == "8"]
    pictures = plot(of_some_heads, tmp_path / "new" / "ops")
    assert [path.name for path in pictures] == ["ops-latency-context.png", "ops-latency-n.png", "ops-floor.png"]
    for path in pictures:
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert path.stat().st_size > 30_000


def test_parts_are_not_drawn_as_cases(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("benchmarks.figures.save", lambda figure, path: drawn.append(figure) or path)
    plot(list(op_rows()), tmp_path / "ops")
    for axis in drawn[0].axes:
        names = [line.get_label() for line in axis.lines]
        assert len(names) == len(set(names)) == 5
        floor = axis.lines[-1].get_xdata()
        assert len(floor) == len(set(floor))


def test_pictures_of_generate(tmp_path):
    pictures = plot(list(generate_rows()), tmp_path / "g")
    assert [path.name for path in pictures] == ["g-latency-context.png", "g-latency-n.png", "g-throughput.png"]


def test_what_the_panels_show(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("benchmarks.figures.save", lambda figure, path: drawn.append(figure) or path)
    plot(list(generate_rows()), tmp_path / "g")
    throughput = drawn[-1]
    assert [axis.get_title() for axis in throughput.axes] == ["7b-mha; context 2,048", "7b-mha; context 8,192"]
    lines = {line.get_label(): list(line.get_ydata()) for line in throughput.axes[1].lines}
    assert lines == {
        "transformers": [16 * 50.0],
        "hf_fastdecode, graph": [16 * 125.0, 128 * 125.0],
        "hf_fastdecode, graph: ceiling, no attention": [16 * 250.0, 128 * 250.0],
    }
    assert throughput.axes[0].get_xlabel() == "n, samples"
    assert throughput.axes[0].get_ylabel() == "tokens a second"
    assert "H200, bfloat16" in throughput.get_suptitle()


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


@pytest.mark.parametrize("status", ["wrong: ours errs 3 times PyTorch's error", "failed: x"])
def test_nothing_is_drawn_on_a_red_check(tmp_path, status):
    rows = list(op_rows())
    rows[5] |= {"status": status}
    with pytest.raises(RedCheckError, match="1 rows are not right"):
        plot(rows, tmp_path / "ops")
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
    case = OP_SETS["two-level"][0]
    assert f" | {case.bytes(2) / 4e6:.1f} | {2 * case.bytes(2) / 4e6:.1f} | " in lines[2]


@pytest.mark.parametrize(
    ("ways", "columns"),
    [
        (
            ["ours-suffix", "sketch-suffix"],
            "rows | suffix | heads | floor | ours-suffix | sketch-suffix | ours-suffix",
        ),
        (
            ["ours-suffix", "recipe"],
            "rows | context | suffix | heads | floor | recipe | ours-suffix | ours-suffix over",
        ),
        (["sketch-suffix"], "rows | suffix | heads | floor | sketch-suffix |"),
    ],
)
def test_a_column_is_left_out_where_only_that_part_is_shown(ways, columns):
    rows = [row for row in op_rows("small") if row["way"] in ways]
    text = ops.ops_table(rows)
    assert text.startswith(f"| {columns}")
    unchecked = [row | {"error_ratio": ""} for row in rows]
    assert ops.ops_table(unchecked).endswith("; not all checked.\n")


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


def test_table_of_rows_most_of_which_end_early():
    rows = [row | {"total_s": "12.5", "tokens_per_s": "2048", "ran": "graph"} for row in generate_rows("~4")]
    lines = generate.generate_tables(rows).splitlines()
    assert lines[0] == "| model | context | n | mean tokens, of at most | way | whole call | tokens/s | what ran |"
    assert "| 12.50 s | 2,048 | graph |" in lines[2]
    assert "| 4 of " in lines[2]


def test_table_of_rows_that_finish():
    whole, apart = list(generate_rows("65-65")), list(generate_rows("16-65"))
    for row in apart:
        if row["ms_per_step"]:
            row["ms_per_step"] = str(0.75 * float(row["ms_per_step"]))
    lines = generate.finish_table([*whole, *apart]).splitlines()
    assert lines[2] == "| 7b-mha | 2,048 | 16 | stock | 1.28 s | 0.96 s | 0.75 |"
    assert "| 7b-mha | 8,192 | 128 | stock |  |  |  |" in lines
    assert generate.finish_table(whole) == ""


def test_published_numbers_stand_beside():
    published = {(2048, 16): 12.6, (8192, 128): 19.5}
    lines = generate.generate_table(list(generate_rows()), published=published, unit="ms/step").splitlines()
    assert lines[0].endswith("| published: ms/step |")
    assert len(lines[1].split("|")) == len(lines[0].split("|"))
    assert [line.rpartition("% ")[2] for line in lines[2:6]] == ["| 12.6 |", "|  |", "|  |", "| 19.5 |"]


def test_the_papers_tables():
    by_hand = {
        ("bifurcated-1", 32768, 4): 29.73,
        ("bifurcated-6", 8192, 1024): 81.14,
        ("bifurcated-6", 32768, 128): 41.44,
        ("bifurcated-7", 16384, 256): 33.76,
        ("hydragen-table1", 16256, 2048): 22.7,
        ("hydragen-table2", 16128, 1024): 20.9,
        ("hydragen-table2", 1024, 32): 2.7,
    }
    for (name, context, samples), value in by_hand.items():
        assert PAPER_TABLES[name].published[context, samples] == value
    for name, table in PAPER_TABLES.items():
        settings = {(case.context, getattr(case, "samples", 0)) for case in table.cases}
        assert set(table.published) <= settings, name
