"""The reasons of docs/troubleshooting.md, read from the package's source: ``python -m tools.reasons`` rewrites them.

A reason is the text of an `Unsupported` that the package makes, with "…" where a value stands. Each belongs to a
subject by the file it is in; a test fails where the page differs, or a file has no subject.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, TypeGuard

from benchmarks.page_tables import replace_between

PACKAGE: Final = Path(__file__).parents[1] / "hf_fastdecode"
PAGE: Final = PACKAGE.parent / "docs" / "troubleshooting.md"
_MARKERS: Final = re.compile(r"(<!-- reasons -->\n).*?(<!-- end reasons -->)", re.DOTALL)
_LEAST_LETTERS: Final = 12  # of a text; shorter ones are put together from others


class Subject(NamedTuple):
    """A subject that reasons of some files share."""

    title: str
    meaning: str
    files: tuple[str, ...]


SUBJECTS: Final = (
    Subject(
        "Code of your own in the model",
        "Prefill packs the tokens of all prompts into one row, so a hook or a replaced `forward` would see other "
        "shapes than in stock calls. Remove it for the call, or use a library that is "
        "[known](limits.md#calls-that-run-stock-transformers).",
        ("generation/foreign_code.py", "generation/structure.py"),
    ),
    Subject(
        "The loop and the cache of the call",
        "The call asks for another loop, or for a cache that sharing does not have. Leave the argument out, if you do "
        "not need it.",
        ("generation/interception/",),
    ),
    Subject(
        "Prompts and positions",
        "Sharing saves too little, or the model places tokens so that equal tokens of two prompts have other keys. "
        "Long prompts, more samples of each, and prompts that begin alike as neighbours in the batch gain most.",
        ("generation/prompts/",),
    ),
    Subject(
        "Forward passes without a cache",
        "Rows that begin alike save too little, or the pass asks for what one packed row of their tokens does not "
        "have; see [scoring and training](scoring.md#when-a-pass-runs-stock).",
        ("forward/",),
    ),
    Subject(
        "The model, and arguments of the call",
        "The architecture computes attention in a way that a shared cache does not have, the model is in training "
        "mode, or an argument asks for what passes over a shared cache do not compute: leave it out, if you can. "
        "[Architectures](architectures.md) lists every class; the others need code in this package.",
        (
            "generation/support.py",
            "attention/",
            "cache/layers/",
            "cache/layout.py",
            "cache/shared.py",
            "patches/architectures/",
            "patches/layers/attention_layer.py",
        ),
    ),
    Subject(
        "Images, sounds and encoders",
        "It is not known which input belongs to which prompt, or the model takes it in every step. Pass what one "
        "call of the processor returned.",
        ("generation/inputs/",),
    ),
    Subject(
        "Several processes",
        "Processes that compute one model together have to make the same passes, each with a whole part of the heads.",
        ("parallel/",),
    ),
    Subject(
        "The sampling kernel",
        "The call shares; its tokens are drawn by transformers' own processors, which are slower on a GPU. "
        '`sampler="fast"` makes this an error.',
        ("generation/decoding/",),
    ),
    Subject(
        "Captured steps and passes",
        "The call shares; its steps or prefill passes run eagerly instead of as CUDA graphs.",
        ("generation/steps/", "cache/captured", "patches/layers/kernel_attention.py"),
    ),
)
_FORWARDED: Final = ("generation/call_context.py",)  # which raise what others found


class Reason(NamedTuple):
    """A text with "…" for values, what to do about it, if the code says so, and the file, relative to the package."""

    text: str
    remedy: str
    file: str


def reasons() -> list[Reason]:
    """All reasons of the package, in the order of files and lines."""
    found = []
    for file, tree in _trees().items():
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_reason(node))
        for call in sorted(calls, key=lambda node: node.lineno):
            texts = [text for text in _texts(call.args[0]) if len(text.replace("…", "")) >= _LEAST_LETTERS]
            remedies = list(_texts(call.args[1])) if len(call.args) > 1 else []
            remedy = next((one for one in remedies if len(one.replace("…", "")) >= _LEAST_LETTERS), "")
            found += [Reason(text, remedy, file) for text in texts]
    return list(dict.fromkeys(found))


def templates() -> list[str]:
    """Every text in the package's source."""
    kinds = ast.Constant | ast.JoinedStr
    return [
        text
        for tree in _trees().values()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
        for text in _texts(node)
    ]


def subject_of(reason: Reason) -> Subject | None:
    """The subject of a reason's file."""
    return next((subject for subject in SUBJECTS if reason.file.startswith(subject.files)), None)


def refreshed(page: str) -> str:
    """The page with the reasons of the source between its markers."""
    parts = []
    known = [reason for reason in reasons() if reason.file not in _FORWARDED]
    for subject in SUBJECTS:
        lines = {
            reason.text: f"- `{reason.text}`" + (f": {reason.remedy}" if reason.remedy else "")
            for reason in known
            if subject_of(reason) is subject
        }
        parts += [f"### {subject.title}", textwrap.fill(subject.meaning, 120), "\n".join(lines.values())]
    return replace_between(page, _MARKERS, lambda _: "\n" + "\n\n".join(parts) + "\n\n")[0]


@cache
def _trees() -> dict[str, ast.Module]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}


@cache
def _constants() -> dict[str, tuple[str, ...]]:
    """The texts of module-level names in capitals, such as a reason that several places give."""
    found: dict[str, tuple[str, ...]] = {}
    for tree in _trees().values():
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and target.id.isupper() and value is not None:
                values = value.values if isinstance(value, ast.Dict) else [value]
                found[target.id] = tuple(str(one.value) for one in values if _is_text(one))
    return found


def _is_text(node: ast.expr) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_reason(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "Unsupported" and bool(call.args)


def _texts(node: ast.expr) -> Iterator[str]:
    """The texts that an expression may be, with "…" for what is computed."""
    if isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.Constant):
        yield node.value if isinstance(node.value, str) else "…"
    elif isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else _placed(part) for part in node.values]
        yield re.sub("…+", "…", "".join(parts))
    else:
        names = [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and one.id.isupper()]
        yield from (text for name in names for text in _constants().get(name, ()))


def _placed(part: ast.expr) -> str:
    """A value within a text: a constant's only text, or "…"."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    texts = _constants().get(value.id, ()) if isinstance(value, ast.Name) else ()
    return texts[0] if len(texts) == 1 else "…"


def main() -> None:
    """Rewrite the page's reasons."""
    PAGE.write_text(refreshed(PAGE.read_text()))


if __name__ == "__main__":
    main()
