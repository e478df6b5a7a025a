"""Tables in documentation pages that tools write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from benchmarks.page_tables import replace_between

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"


def replace_table(page: Path, tool: str, table: str) -> None:
    """Replace the lines between ``<!-- table of TOOL -->`` and ``<!-- end of the table -->``.

    Args:
        page: The page.
        tool: Such as ``tools.slim_table``.
        table: Its new lines.

    Raises:
        ValueError: The page has no such place.
    """
    between = re.compile(rf"(<!-- table of {re.escape(tool)} -->\n).*?(<!-- end of the table -->)", re.DOTALL)
    text, count = replace_between(page.read_text(encoding="utf-8"), between, lambda _: table)
    if count != 1:
        raise ValueError(f"{page} must have one place for the table of {tool}, got {count}")
    page.write_text(text, encoding="utf-8")
