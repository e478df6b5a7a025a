"""docs/quickstart.ipynb runs, and its committed outputs are what its cells print."""

import json

import pytest

from hf_fastdecode._compat import CACHE
from tools.notebook import NOTEBOOK, run, sources, with_outputs

from .test_readme import without_numbers

COMMITTED = json.loads(NOTEBOOK.read_text())
REMEDY = "run python -m tools.notebook"


def test_the_notebook_prints_what_is_committed(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which would let kernels run on the CPU
    cells = [
        cell.replace(", cache=", f", {CACHE}=").replace("out.cache", f"out.{CACHE}") for cell in sources(COMMITTED)
    ]
    printed = run(cells)
    committed = ["".join(cell["outputs"][0]["text"]) for cell in COMMITTED["cells"] if cell.get("outputs")]
    first, *others = ([without_numbers(text) for text in texts] for texts in zip(printed, committed, strict=True))
    assert first[0].startswith("# samples of a prompt of # tokens"), REMEDY  # and a sample, which rounding may change
    for found, expected in others:
        assert found == expected, REMEDY


def test_outputs_are_of_their_cells():
    notebook = {
        "cells": [{"cell_type": kind, "source": [text]} for kind, text in (("markdown", "#"), ("code", "1 + 1"))]
    }
    words, code = with_outputs(notebook, run(sources(notebook)))["cells"]
    assert "outputs" not in words
    assert code["outputs"][0]["text"] == ["2\n"]
    with pytest.raises(ZeroDivisionError):
        run(["1 / 0"])
