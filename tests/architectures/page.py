"""``docs/architectures.md``: the verdicts on all generating classes, as tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from ..tiny_models import ARCHITECTURES
from .classes import generating_classes
from .compare import Verdict

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"

_TITLES = {
    "shared": "Shared: the context is prefilled, stored and read once",
    "stock": "Stock: transformers' own decoding, for the reason given",
    "not compared": "Not compared: stock itself was not built, or not run with these inputs",
    "wrong": "Wrong: other tokens than stock",
    "crashed": "Crashed: an error where stock has none",
    "blind": "Blind: the comparison shows nothing",
}
_LONGEST_REASON = 220
_TESTED = (
    "The tests of caches, decoding loops and options run on these model types, greedy and sampled, token by token "
    "against stock:"
)


def written(verdicts: Mapping[str, Verdict]) -> str:
    """The page's text."""
    counts = {kind: sum(verdict.kind == kind for verdict in verdicts.values()) for kind in _TITLES}
    types = sorted({model_type for model_type, _ in ARCHITECTURES.values()})
    lines = [
        "# Architectures",
        "",
        f"The {len(verdicts)} classes of transformers {transformers.__version__} that have `generate`, each as a tiny",
        "random model in fp32 on the CPU: left-padded prompts of unequal length that begin alike, greedy and sampled,",
        "stock beside enabled, and over a kept cache. In the first two tables all tokens are equal to stock's.",
        *_with_inputs(verdicts),
        "",
        f"`make test-architectures` wrote this page with torch {torch.__version__}: "
        + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        + ".",
        "",
        *textwrap.wrap(
            f"{_TESTED} {', '.join(types)}. llama has multi-head, grouped-query and multi-query attention.", 110
        ),
    ]
    for kind, title in _TITLES.items():
        names = sorted(name for name, verdict in verdicts.items() if verdict.kind == kind)
        if names:
            lines += ["", f"## {title}", "", *_table(names, verdicts)]
    return "\n".join(lines) + "\n"


def _with_inputs(verdicts: Mapping[str, Verdict]) -> list[str]:
    if not any(verdict.inputs for verdict in verdicts.values()):
        return ["Multimodal classes get text alone; their calls with images run stock."]
    return [
        "Classes with an entry under *also with* were compared with a small image or sound in each prompt too,",
        "sampled and by beams; other multimodal classes get text alone: no such prompt is made here that stock runs.",
    ]


def _table(names: list[str], verdicts: Mapping[str, Verdict]) -> list[str]:
    reasons, inputs = (any(getattr(verdicts[name], part) for name in names) for part in ("reason", "inputs"))
    head = ["class", "model type", *["also with"] * inputs, *["reason"] * reasons]
    rows = [
        [
            name,
            _family(name, verdicts[name]),
            *[_cell(verdicts[name].inputs)] * inputs,
            *[_cell(verdicts[name].reason)] * reasons,
        ]
        for name in names
    ]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _family(name: str, verdict: Verdict) -> str:
    return verdict.model_type or generating_classes()[name].split(".")[2]


def _cell(reason: str) -> str:
    short = reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON].rsplit(" ", 1)[0] + " ..."
    return short.replace("|", "\\|").replace("<", "&lt;")


def _text(cell: str) -> str:
    return cell.replace("&lt;", "<").replace("\\|", "|")


def read() -> dict[str, Verdict]:
    """Class name -> verdict, as the committed page has them."""
    kinds = {title: kind for kind, title in _TITLES.items()}
    found: dict[str, Verdict] = {}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, table = section.partition("\n")
        rows = re.findall(r"^\| (.*) \|$", table, re.MULTILINE)
        inputs = "| also with |" in f"| {rows[0]} |"
        for row in rows[2:]:
            name, model_type, *others = row.split(" | ", 2 + inputs)
            with_inputs = others.pop(0).strip() if inputs else ""
            found[name] = Verdict(kinds[title], _text("".join(others)), model_type, _text(with_inputs))
    return found


def listed() -> dict[str, str]:
    """Class name -> kind, as the committed page has them."""
    return {name: verdict.kind for name, verdict in read().items()}


def version() -> str:
    """The transformers of the committed page."""
    return re.findall(r"of transformers (\S+) that", PAGE.read_text())[0]
