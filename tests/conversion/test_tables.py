"""Tables of docs/slim-measurements.md are those of the committed rows, and what the package measures."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_fastdecode.conversion.fit.value_coordinates import rounded
from hf_fastdecode.conversion.layer_converter import AUTO
from hf_fastdecode.files import read_rows
from tools import slim_eval, slim_spectra, slim_table, slim_tokens
from tools.slim_spectra import KEYS, ORDINARY, PAPER, SPECTRA, STORED, TOLERANCE
from tools.token_agreement import (
    EXACT,
    Predictions,
    TokensRow,
    before_end,
    compare,
    rounded_inputs,
    rows,
    table,
    values_from_keys,
)

from ..cli.command_line import needs_weights
from ..tiny_models import tiny_model
from .page_tables import check_tokens, read_table


def logits_of(*likely: int, sure: float = 0.9) -> Tensor:
    """Logits of positions whose most likely token, of three, has the probability `sure`."""
    chances = torch.full((len(likely), 3), (1 - sure) / 2)
    chances[range(len(likely)), likely] = sure
    return chances.log()


def test_equal_predictions_agree_throughout() -> None:
    same = Predictions(logits_of(*[0, 1, 2] * 70), [[5, 6], [7]])
    assert compare("same", same, same) == TokensRow("same", (210, 210), 0.0, (3, 3), (2, 2))


def test_forced_tokens_and_their_divergence_are_those_of_every_position() -> None:
    """Also of the last positions, where they are no whole number of parts."""
    exact = Predictions(logits_of(*[0] * 210), [[1]])
    found = Predictions(torch.cat([logits_of(*[0] * 205), logits_of(*[1] * 5)]), [[1]])
    row = compare("five others", found, exact)
    assert row.forced == (210, 205)
    assert row.divergence == pytest.approx(5 / 210 * (0.9 - 0.05) * math.log(0.9 / 0.05), rel=1e-5)


@pytest.mark.parametrize(
    ("found", "tokens_alike", "texts_alike"),
    [
        ([[1, 2, 3, 4], [5, 6]], 6, 2),
        ([[1, 9, 3, 4], [5, 6]], 5, 1),
        ([[1, 2], [5, 6]], 4, 1),  # ends early
        ([[1, 2, 3, 4, 9], [5, 6]], 6, 1),  # goes on
        ([[9, 1, 2, 3, 4], [5, 6]], 2, 1),  # a token more at the beginning
        ([[], []], 0, 0),
    ],
    ids=["same", "one other", "short", "long", "shifted", "empty"],
)
def test_greedy_tokens_are_compared_by_place(found: list[list[int]], tokens_alike: int, texts_alike: int) -> None:
    forced = logits_of(0)
    row = compare("cache", Predictions(forced, found), Predictions(forced, [[1, 2, 3, 4], [5, 6]]))
    assert (row.greedy, row.continuations) == ((6, tokens_alike), (2, texts_alike))


def test_texts_that_are_not_of_the_same_prompts_are_refused() -> None:
    one, two = Predictions(logits_of(0), [[1]]), Predictions(logits_of(0), [[1], [2]])
    with pytest.raises(ValueError, match="zip"):
        compare("cache", one, two)


def test_continuations_stop_before_their_end() -> None:
    assert before_end(torch.tensor([[3, 4, 2, 0], [3, 4, 5, 6], [2, 2, 0, 0]]), 2) == [[3, 4], [3, 4, 5, 6], []]


def test_a_table_has_each_cache_but_the_exact_one() -> None:
    exact = Predictions(logits_of(*[0] * 1000), [[1, 2, 3, 4], [5, 6, 7, 8]])
    worse = Predictions(logits_of(*[1] * 500, *[0] * 500), [[1, 2, 3, 9], [5, 6, 7, 8]])
    made = {EXACT: lambda: exact, "worse": lambda: worse, "never made": pytest.fail}
    assert table(rows(made, ["worse"])).splitlines() == [
        "| cache | same of 1,000 forced tokens | divergence | same of 8 greedy tokens | same of 2 greedy texts |",
        "|---|---|---|---|---|",
        "| worse | 50.0% | 1e+00 | 87.5% | 1 |",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_keys_and_values_are_of_rounded_inputs_and_queries_are_not(dtype: torch.dtype) -> None:
    model = tiny_model("llama-mha")
    attention, inputs = model.model.layers[0].self_attn, torch.randn(1, 5, 64)
    expected = rounded(inputs, dtype, 16).float()
    assert not expected.equal(inputs)
    with rounded_inputs([attention.k_proj, attention.v_proj], dtype, 16):
        for projection, read in (
            (attention.k_proj, expected),
            (attention.v_proj, expected),
            (attention.q_proj, inputs),
        ):
            assert projection(inputs).equal(read @ projection.weight.mT)


def test_rounding_ends_with_the_block_even_if_it_raises() -> None:
    model, ids = tiny_model("llama-mha"), torch.arange(3, 40)[None]
    projections = [layer.self_attn.k_proj for layer in model.model.layers]
    before = model(ids).logits
    with rounded_inputs(projections, torch.int8, 16):
        assert not model(ids).logits.equal(before)
    assert model(ids).logits.equal(before)
    with pytest.raises(ValueError, match="exactly one"), rounded_inputs(projections, torch.int8, 16):
        model()
    assert model(ids).logits.equal(before)


def test_values_follow_from_rounded_keys() -> None:
    """Biases included; without rounding, nothing changes."""
    model = tiny_model("llama-mha", attention_bias=True)
    attention, inputs = model.model.layers[0].self_attn, torch.randn(1, 5, 64)
    with torch.no_grad():
        attention.k_proj.bias.normal_()
        attention.v_proj.bias.normal_()
    keys, values = attention.k_proj(inputs), attention.v_proj(inputs)
    with values_from_keys([attention], torch.float32, 16):
        assert attention.k_proj(inputs).equal(keys)
        torch.testing.assert_close(attention.v_proj(inputs), values, rtol=1e-4, atol=1e-4)
    cached = rounded(keys, torch.bfloat16, 16)
    map_of = torch.linalg.solve(attention.k_proj.weight.double().mT, attention.v_proj.weight.double().mT)
    with values_from_keys([attention], torch.bfloat16, 16):
        assert attention.k_proj(inputs).equal(cached.float())
        expected = (cached - attention.k_proj.bias.double()) @ map_of + attention.v_proj.bias.double()
        torch.testing.assert_close(attention.v_proj(inputs), expected.float())
    assert attention.v_proj(inputs).equal(values)


def test_the_page_shows_the_rows() -> None:
    shown = slim_eval.PAGE.read_text(encoding="utf-8").partition("<!-- table of tools.slim_eval -->\n")[2]
    assert shown.partition("<!-- end of the table -->")[0] == slim_eval.table(read_rows(slim_eval.ROWS))


def save_run(folder: Path, passed: dict[str, int]) -> Path:
    """32 samples a task, all distinct, of which the last so many pass; the later, the likelier."""
    folder.mkdir()
    (folder / "settings.json").write_text("{}")
    at = [(task, index) for task in passed for index in range(32)]
    samples, verdicts = [], []
    for task, index in at:
        right = index >= 32 - passed[task]
        text, score = f"{right} {index}", float(index - 40)
        samples.append({"task_id": task, "index": index, "completion": text, "tokens": 1, "sum_logp": score})
        verdicts.append({"task_id": task, "index": index, "status": "pass" if right else "fail", "detail": ""})
    for name, lines in (("samples", samples), ("verdicts", verdicts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_changes_are_paired(tmp_path: Path) -> None:
    base = slim_eval.read_run(save_run(tmp_path / "base", {"d": 4, "b": 8, "a": 0, "c": 32}))
    found = slim_eval.compare(slim_eval.read_run(save_run(tmp_path / "slim", {"a": 0, "b": 16, "c": 32})), base)
    assert found["same_samples"] == pytest.approx(1 - 8 / 96)
    assert found["pass@1"] == pytest.approx(0.5)
    assert found["pass@1 error"] == pytest.approx(np.std([0, 0.5, 1], ddof=1) / 3**0.5)
    assert found["pass@1 change"] == pytest.approx(0.25 / 3)
    assert found["pass@1 change error"] == pytest.approx(np.std([0, 0.25, 0], ddof=1) / 3**0.5)
    assert found["pass@32"] == found["pass@top3"] == pytest.approx(2 / 3)
    assert found["pass@32 change"] == found["pass@32 change error"] == 0


def test_rows_of_the_same_case_are_replaced_in_their_places() -> None:
    def row(model: str, dtype: str, way: str, value: str) -> dict[str, str]:
        return {"model": model, "dtype": dtype, "way": way, "pass@1": value}

    known = [
        row("a", "bfloat16", "shared", "0"),
        row("a", "float32", "shared", "1"),
        row("b", "bfloat16", "stock", "2"),
    ]
    found = [
        row("b", "bfloat16", "stock", "3"),
        row("b", "bfloat16", "shared", "4"),
        row("a", "bfloat16", "shared", "5"),
    ]
    assert slim_eval.replace_rows(known, found) == [found[2], known[1], found[0], found[1]]


@pytest.mark.parametrize("spectrum", ["1e3", "1e5", "1e7"])
def test_auto_holds_its_tolerance_where_keys_alone_do_not(spectrum: str) -> None:
    rows = {row["cache"]: row for row in slim_spectra.measure(spectrum, width=128, calibration=256, measured=128)}
    assert rows[AUTO]["error_ratio"] <= TOLERANCE
    assert min(rows[keys]["error_ratio"] for keys in KEYS) > TOLERANCE
    assert (rows[AUTO]["bytes_per_token"] < rows[ORDINARY]["bytes_per_token"]) == (spectrum != "1e7")


def test_spectra_are_what_they_are_called() -> None:
    key = slim_spectra.random_layer("1e4", 128, torch.float64, torch.Generator().manual_seed(0)).key
    logs = torch.linalg.svdvals(key).log10()
    assert (logs - logs[0]).tolist() == pytest.approx(torch.linspace(0, -4, 128).tolist(), abs=1e-5)


def test_the_page_and_its_rows_say_so_too(tmp_path: Path) -> None:
    rows = read_rows(slim_spectra.ROWS)
    assert slim_spectra.table(rows) in slim_spectra.PAGE.read_text(encoding="utf-8"), (
        "run python -m tools.slim_spectra"
    )
    ratios = {(row["spectrum"], row["weights"], row["cache"]): float(row["error_ratio"]) for row in rows}
    for spectrum in SPECTRA:
        for weights in (slim_spectra.EXACT, STORED):
            assert ratios[spectrum, weights, AUTO] <= TOLERANCE
            assert ratios[spectrum, weights, KEYS[0]] > TOLERANCE
            for fitted, paper in zip(KEYS, PAPER):
                assert ratios[spectrum, weights, paper] > ratios[spectrum, weights, fitted]
            assert ratios[spectrum, weights, KEYS[1]] > TOLERANCE or spectrum == "1e2"  # mild enough for fp16
    slim_spectra.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@needs_weights
@pytest.mark.exhaustive
def test_the_page_shows_what_is_measured() -> None:
    shown, measured = read_table(slim_table.PAGE, "tools.slim_table")[1:], slim_table.rows()
    assert [cells[0] for cells in shown] == [row.name for row in measured]
    for cells, row in zip(shown, measured):
        assert float(cells[1].rstrip("%")) == pytest.approx(100 * row.share, abs=1)
        for cell, errors in zip(cells[2:], (row.value_errors, row.output_errors)):
            numbers = [float(number) for number in re.findall(r"[\d.]+", cell)]
            # Processors round differently, and a plan near its tolerance may go either way.
            if "plan" not in row.name:
                assert (min(numbers), max(numbers)) == pytest.approx([100 * one for one in errors], rel=0.25)


SOME = ["keys + d/32 V-coordinates, int8"]
"""One, as each takes minutes on a busy machine."""


@needs_weights
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_page_shows_the_tokens_that_are_predicted() -> None:
    check_tokens(slim_tokens.PAGE, "tools.slim_tokens", slim_tokens.caches(), SOME)
