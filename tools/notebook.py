"""Run docs/quickstart.ipynb and write its outputs: ``python -m tools.notebook``.

Cells run in this process, one after another, as in a kernel; a test compares what they print with the committed
outputs. No kernel or package of Jupyter is needed.
"""

from __future__ import annotations

import ast
import json
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs" / "quickstart.ipynb"


def sources(notebook: dict[str, Any]) -> list[str]:
    """The source of each code cell."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(cells: list[str]) -> list[str]:
    """The output of each cell, and after it the repr of its last line, if that is an expression with a value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for source in cells:
        *body, last = ast.parse(source).body
        value = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
        with redirect_stdout(StringIO()) as out:
            exec(compile(ast.Module(body if value else [*body, last], []), "cell", "exec"), names)
            found = eval(compile(value, "cell", "eval"), names) if value else None
            if found is not None:
                print(repr(found))
        printed.append(out.getvalue())
    return printed


def with_outputs(notebook: dict[str, Any], printed: list[str]) -> dict[str, Any]:
    """The notebook with these outputs and no others."""
    left, cells = iter(printed), []
    for index, cell in enumerate(notebook["cells"]):
        cell = {"cell_type": cell["cell_type"], "id": f"cell-{index}", "metadata": {}, "source": cell["source"]}
        if cell["cell_type"] == "code":
            text = next(left).splitlines(keepends=True)
            outputs = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
            cell |= {"execution_count": None, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


def main() -> None:
    """Run the notebook's cells and rewrite its outputs."""
    warnings.simplefilter("ignore")
    notebook = json.loads(NOTEBOOK.read_text())
    NOTEBOOK.write_text(
        json.dumps(with_outputs(notebook, run(sources(notebook))), indent=1, ensure_ascii=False) + "\n"
    )


if __name__ == "__main__":
    main()
