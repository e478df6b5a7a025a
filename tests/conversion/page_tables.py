"""Tables of documentation pages that tools write, and comparison of what they show of predicted tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.token_agreement import EXACT, TOKENS, Caches, rows


def read_table(page: Path, tool: str) -> list[list[str]]:
    """The cells of a tool's table, head first."""
    text = page.read_text(encoding="utf-8").partition(f"<!-- table of {tool} -->\n")[2].partition("<!-- end")[0]
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [head, *lines]


def check_tokens(page: Path, tool: str, caches: Caches, names: list[str]) -> None:
    """Fail unless the page has all caches, and shows what is measured of those named."""
    head, *lines = read_table(page, tool)
    shown = {cells[0]: cells for cells in lines}
    assert list(shown) == [name for name in caches if name != EXACT]
    measured = rows(caches, names)
    assert [row.name for row in measured] == names
    positions, tokens, texts = (int(re.sub(r"\D", "", head[column])) for column in (1, 3, 4))
    assert positions == TOKENS <= tokens
    for row in measured:
        assert (row.forced[0], row.continuations[0]) == (positions, texts)
        assert row.greedy[0] == pytest.approx(tokens, rel=0.05)
        _, forced, divergence, greedy, same_texts = shown[row.name]
        # Processors round differently, and where a cache errs much, that decides which tokens differ.
        different = 100 * (1 - row.forced[1] / row.forced[0])
        assert 100 - float(forced.rstrip("%")) == pytest.approx(different, abs=max(0.5, 0.2 * different))
        assert float(divergence) == pytest.approx(row.divergence, rel=0.5)
        # So it does which of few texts differ, and these may from their beginning on.
        assert int(same_texts) == pytest.approx(row.continuations[1], abs=2)
        assert float(greedy.rstrip("%")) == pytest.approx(100 * row.greedy[1] / row.greedy[0], abs=200 / texts)
