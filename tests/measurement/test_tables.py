"""Tables in terminals and files."""

import re
import sys

import pytest

from hf_fastdecode.measurement.tables import show

MARKDOWN = """| rows | bifurcated-compiled | ours over floor |
|---|---|---|
| 1 | 39.4 | 1.67x |
| 1024 | 1613.5 | 1.52x |

A note.
"""


@pytest.mark.parametrize("width", [100, 40, 24, 18, 16])
def test_tables_fit_the_terminal(width, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    show(MARKDOWN)
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert text.endswith("A note.\n")
    if width == 16:  # not even the cells fit
        assert text == MARKDOWN
        return
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    assert ("bifurcated-compiled" in text) == (width >= 40)
    assert lines[-4].split() == ["1", "39.4", "1.67x"]
    assert lines[-3].split() == ["1024", "1613.5", "1.52x"]


def test_tables_are_markdown_in_files(capsys):
    show(MARKDOWN)
    assert capsys.readouterr().out == MARKDOWN + "\n"
