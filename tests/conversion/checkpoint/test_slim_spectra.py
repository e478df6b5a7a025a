"""What docs/slim-measurements.md says of spectra of ``W_K``, on a small layer and in the committed rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_fastdecode.conversion.layers.plan_choice import AUTO
from hf_fastdecode.files import read_rows
from tools import slim_spectra
from tools.slim_spectra import EXACT, KEYS, ORDINARY, PAPER, SPECTRA, STORED, TOLERANCE


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
        for weights in (EXACT, STORED):
            assert ratios[spectrum, weights, AUTO] <= TOLERANCE
            assert ratios[spectrum, weights, KEYS[0]] > TOLERANCE
            for fitted, paper in zip(KEYS, PAPER):
                assert ratios[spectrum, weights, paper] > ratios[spectrum, weights, fitted]
            assert ratios[spectrum, weights, KEYS[1]] > TOLERANCE or spectrum == "1e2"  # mild enough for fp16
    slim_spectra.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
