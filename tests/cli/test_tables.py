"""Tables in terminals, pipes and as Markdown."""

from __future__ import annotations

import re
import sys

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hf_fastdecode.cli.tables import show_tables
from hf_fastdecode.measurement.rows import markdown

from .command_line import refusal, run

MARKDOWN = """| rows | bifurcated-compiled | ours over floor |
|---|---|---|
| 1 | 39.4 | 1.67x |
| 1024 | 1613.5 | 1.52x |

A note.
"""


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Prints in a terminal of so many columns, and returns its lines."""

    def lines(width, *found):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        show_tables(*found)
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()

    return lines


@pytest.mark.parametrize("width", [100, 40, 31, 28, 26])
def test_wide_tables_are_folded(width, terminal):
    """No number is broken, no heading is cut, and each part has the first column."""
    lines = terminal(width, MARKDOWN)
    assert lines[-1] == "A note."
    assert all(len(line) <= width for line in lines)
    words = [line.split() for line in lines]
    if width >= 31:
        assert ["1", "39.4", "1.67x"] in words and ["1024", "1613.5", "1.52x"] in words
    else:
        assert all(row in words for row in (["1", "39.4"], ["1024", "1613.5"], ["1", "1.67x"], ["1024", "1.52x"]))
    assert "bifurcated-compiled" in " ".join(lines)


def test_bars_within_cells(terminal):
    lines = terminal(60, markdown(["way", "steps", "note"], [["paged|flash", "2", ""]]))
    assert [line.split() for line in lines[:2]] == [["way", "steps", "note"], ["paged|flash", "2"]]


def test_tables_are_markdown_in_files(capsys):
    show_tables(MARKDOWN)
    assert capsys.readouterr().out == MARKDOWN + "\n"


def test_a_group_is_folded_too(terminal):
    table = Table(title="a title")
    for name in ("layer", "first number", "second number"):
        table.add_column(name, justify="right")
    table.add_row("0", "1234567890", "0987654321")
    lines = terminal(24, Group(table, Text("the end")))
    assert all(len(line) <= 24 for line in lines)
    text = "\n".join(lines)
    assert (text.count("a title"), text.count("layer"), lines[-1]) == (1, 2, "the end")
    assert "1234567890" in text and "0987654321" in text


@pytest.mark.parametrize("command", ["inspect embedded --context 512 2048 --n 16 128", "bench"])
def test_any_command_that_prints_tables_refuses_other_formats(command):
    assert "--format must be one of auto, text, markdown, got 'html'" in refusal(*command.split(), "--format", "html")


def test_inspect_prints_markdown(checkpoint):
    words = ("inspect", checkpoint, "--context", 64, "--n", 4, "--batch", 1)
    found = run(*words, "--format", "markdown").stdout
    assert "| context | n | KV stock | KV shared | KV ratio | reads stock | reads shared | reads ratio |" in found
    assert "- can share: yes" in found
    assert "\n| keys and values | " in found
    assert "--format markdown is for tables" in refusal(*words, "--format", "markdown", "--json")


def test_conversions_print_markdown(tmp_path):
    from ..conversion.checkpoint.checkpoints import save_multi_head

    source = save_multi_head(tmp_path)
    found = run("convert-checkpoint", source, "--dry-run", "--table-format", "markdown").stdout
    assert "| layer | caches | in | cond W_K | max W_KV |" in found
