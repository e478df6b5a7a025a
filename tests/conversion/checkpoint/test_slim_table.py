"""The table of docs/slim-measurements.md is what the package measures."""

from __future__ import annotations

import re

import pytest

from tools.slim_table import PAGE, rows

from ...cli.command_line import needs_weights
from .page_tables import read_table

pytestmark = pytest.mark.exhaustive


@needs_weights
def test_the_page_shows_what_is_measured() -> None:
    shown, measured = read_table(PAGE, "tools.slim_table")[1:], rows()
    assert [cells[0] for cells in shown] == [row.name for row in measured]
    for cells, row in zip(shown, measured):
        assert float(cells[1].rstrip("%")) == pytest.approx(100 * row.share, abs=1)
        for cell, errors in zip(cells[2:], (row.value_errors, row.output_errors)):
            numbers = [float(number) for number in re.findall(r"[\d.]+", cell)]
            # Processors round differently, and a plan near its tolerance may go either way.
            if "plan" not in row.name:
                assert (min(numbers), max(numbers)) == pytest.approx([100 * one for one in errors], rel=0.25)
