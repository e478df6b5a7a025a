"""The terminal: libraries are silenced for a while, arguments are shown as options, tables are folded."""

from __future__ import annotations

import logging
import re
import sys

import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from rich.console import Group
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging

from hf_fastdecode.cli.console import in_options, progress_bar, quiet_libraries, show_tables
from hf_fastdecode.measurement.rows import markdown

from .command_line import refusal, run


def state() -> tuple[object, ...]:
    return (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
        are_progress_bars_disabled(),
        logging.getLogger("hf_fastdecode").level,
    )


@pytest.mark.parametrize("warnings", [False, True])
def test_libraries_are_quiet_and_then_as_before(warnings):
    before = state()
    with quiet_libraries(warnings=warnings), quiet_libraries(warnings=warnings):
        assert not transformers_logging.is_progress_bar_enabled()
        assert (transformers_logging.get_verbosity() == logging.ERROR) is not warnings
        assert not logging.getLogger("hf_fastdecode").isEnabledFor(logging.WARNING)
    assert state() == before


def test_libraries_are_as_before_after_an_error():
    before = state()
    with pytest.raises(RuntimeError), quiet_libraries():
        raise RuntimeError
    assert state() == before


def test_no_progress_where_stderr_is_no_terminal(capsys):
    with progress_bar("title", 3) as on_step:
        on_step(0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("`limit` must be at least 1, got 0", "--limit must be at least 1, got 0"),
        ('try `dtype="bfloat16"`', "try --dtype bfloat16"),
        ("`prompt_format='mbxp'`", "--format mbxp"),
        ('a conversion with `format="full"`', "a conversion with --format full"),
        ("pass `resume=True`", "pass --resume"),
        ("leave `rank=8` out", "leave --rank 8 out"),
        ("`max_position_embeddings` of `config.json`", "`max_position_embeddings` of `config.json`"),
    ],
)
def test_arguments_are_shown_as_options(message, shown):
    assert in_options(message) == shown


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


def test_conversions_print_markdown(source):
    found = run("convert-checkpoint", source, "--dry-run", "--table-format", "markdown").stdout
    assert "| layer | caches | in | cond W_K | max W_KV |" in found
