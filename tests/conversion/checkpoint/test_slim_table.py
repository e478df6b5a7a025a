"""The table of docs/slim-measurements.md is what the package measures."""

from __future__ import annotations

import re

import pytest

from tools.slim_table import PAGE, rows, tokens_rows

from ...commands.command_line import needs_weights


def shown_as(name: str) -> list[list[str]]:
    """The cells of a table of the page."""
    page = PAGE.read_text(encoding="utf-8")
    text = page.partition(f"<!-- {name} of tools.slim_table -->")[2].partition("<!-- end")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()[2:]]


@needs_weights
def test_the_page_shows_what_is_measured() -> None:
    shown, measured = shown_as("table"), rows()
    assert [cells[0] for cells in shown] == [row.name for row in measured]
    for cells, row in zip(shown, measured):
        assert float(cells[1].rstrip("%")) == pytest.approx(100 * row.share, abs=1)
        for cell, errors in zip(cells[2:], (row.value_errors, row.output_errors)):
            numbers = [float(number) for number in re.findall(r"[\d.]+", cell)]
            # Processors round differently, and a plan near its tolerance may go either way.
            if "plan" not in row.name:
                assert (min(numbers), max(numbers)) == pytest.approx([100 * one for one in errors], rel=0.25)


@needs_weights
def test_the_page_shows_the_tokens_that_are_predicted() -> None:
    shown, measured = shown_as("tokens"), tokens_rows()
    assert [cells[0] for cells in shown] == [row.name for row in measured]
    for cells, row in zip(shown, measured):
        if "plan" not in row.name:
            # Where a cache errs so much that many tokens differ, processors' rounding decides which.
            different = 100 * (1 - row.agreement)
            assert 100 - float(cells[1].rstrip("%")) == pytest.approx(different, abs=max(0.5, 0.2 * different))
            assert float(cells[2]) == pytest.approx(row.divergence, rel=0.5)
