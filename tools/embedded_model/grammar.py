"""The vocabulary of the corpus grammar: rows of data that say how an operation is coded and how it is told in English.

Text and code of a row are templates:

- ``{it}`` is the noun phrase so far ("the numbers in the given list"), ``{x}`` one element, ``{v}`` a whole value;
- ``[plural|singular]`` picks a form: plural when the operation runs over many elements, singular on one value;
- ``#`` and ``~`` are the row's first and second constant.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final

# Value types that flow through a pipeline.
INTS: Final = "list of int"
WORDS: Final = "list of str"
TEXT: Final = "str"
INT: Final = "int"
BOOL: Final = "bool"
DICT: Final = "dict of str to int"
END: Final = "anything that no further step takes"

PARAM: Final = "k"  # the name of the second argument that may stand for a constant
_FORMS = re.compile(r"\[([^\[\]|]*)\|([^\[\]|]*)\]")


@dataclass(frozen=True)
class Row:
    """One operation as data. ``code[0]`` is the canonical spelling, the others are style; ``hidden_*`` leave constants open."""

    code: tuple[str, ...]
    noun: tuple[str, ...]
    verb: tuple[str, ...]
    name: str
    gives: str = ""
    consts: tuple[str, ...] = ()
    hidden_noun: tuple[str, ...] = ()
    hidden_verb: tuple[str, ...] = ()
    weight: float = 1.0
    takes_param: bool = True


@dataclass(frozen=True)
class Step:
    """A row bound to its constants. ``kind`` is filter or map (over elements: ``{x}``) or whole (over a value: ``{v}``)."""

    kind: str
    code: tuple[str, ...]
    noun: tuple[str, ...]
    verb: tuple[str, ...]
    hidden_noun: tuple[str, ...]
    hidden_verb: tuple[str, ...]
    name: str
    gives: str


@dataclass(frozen=True)
class Source:
    """Where a pipeline starts: arguments, an iterable expression, the same as a list, and how to call it in English."""

    args: tuple[tuple[str, str], ...]  # (argument name choices joined by "/", input kind in inputs.py)
    expr: str
    as_list: str
    gives: str
    noun: tuple[str, ...]
    intro: str
    name: str
    weight: float = 1.0


class Draw:
    """A seeded source of choices that remembers whether the extra argument ``k`` was used."""

    def __init__(self, rng: random.Random, param_share: float = 0.12) -> None:
        self.rng = rng
        self.param_used = False
        self._param_share = param_share

    def row(self, rows: tuple[Row, ...]) -> Row:
        """One row by weight."""
        return self.rng.choices(rows, weights=[row.weight for row in rows])[0]

    def constants(self, row: Row) -> tuple[str, str]:
        """The row's constants as source text; now and then the first one is the argument ``k``."""
        if not row.consts:
            return "", ""
        first, _, second = self.rng.choice(row.consts).partition(",")
        numeric = first.isdigit() and not second and row.takes_param
        if numeric and not self.param_used and self.rng.random() < self._param_share:
            self.param_used = True
            return PARAM, ""
        return first, second


def form(text: str, plural: bool) -> str:
    """Resolve every ``[plural|singular]`` of a template."""
    return _FORMS.sub(lambda match: match[1] if plural else match[2], text)


def bind(row: Row, kind: str, draw: Draw, plural: bool, gives: str) -> Step:
    """Fix a row's constants and number; a constant that is an argument cannot be hidden."""
    first, second = draw.constants(row)

    def fill(templates: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(form(text, plural).replace("#", first).replace("~", second) for text in templates)

    open_constants = first != PARAM
    return Step(
        kind=kind,
        code=tuple(code.replace("#", first).replace("~", second) for code in row.code),
        noun=fill(row.noun),
        verb=fill(row.verb),
        hidden_noun=fill(row.hidden_noun) if open_constants else (),
        hidden_verb=fill(row.hidden_verb) if open_constants else (),
        name=row.name,
        gives=gives,
    )


def condition_step(row: Row, draw: Draw, them: str, gives: str) -> Step:
    """A filter from a condition row, whose texts are bare predicates such as ``[are|is] even``."""
    bare = bind(row, "filter", draw, plural=True, gives=gives)
    rule = "fit the rule shown by the tests"
    return Step(
        kind="filter",
        code=bare.code,
        noun=tuple(f"{{it}} that {text}" for text in bare.noun),
        verb=tuple(f"{keep} the {them} that {text}" for text in bare.noun for keep in ("keep only", "select")),
        hidden_noun=tuple(f"{{it}} that {text}" for text in (*bare.hidden_noun, rule)),
        hidden_verb=tuple(f"keep only the {them} that {text}" for text in (*bare.hidden_noun, rule)),
        name=bare.name,
        gives=gives,
    )


def quantifier_step(row: Row, draw: Draw, var: str, kind: str) -> Step:
    """``all`` or ``any`` over a list, from a condition row."""
    bare = bind(row, "whole", draw, plural=True, gives=BOOL)
    lead = "all of" if kind == "all" else "any of"

    def noun(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"whether {lead} {{it}} {text}" for text in texts)

    def verb(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"check whether {lead} them {text}" for text in texts)

    return Step(
        kind="whole",
        code=(f"{kind}({bare.code[0].replace('{x}', var)} for {var} in {{v}})",),
        noun=noun(bare.noun),
        verb=verb(bare.noun),
        hidden_noun=noun(bare.hidden_noun),
        hidden_verb=verb(bare.hidden_noun),
        name=f"{kind}_{bare.name}",
        gives=BOOL,
    )


def verdict_step(row: Row, draw: Draw) -> Step:
    """A condition asked about one value."""
    bare = bind(row, "whole", draw, plural=False, gives=BOOL)

    def texts(lead: str, choices: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(lead + text for text in choices)

    return Step(
        kind="whole",
        code=tuple(code.replace("{x}", "{v}") for code in bare.code),
        noun=texts("whether {it} ", bare.noun),
        verb=texts("check whether it ", bare.noun),
        hidden_noun=texts("whether {it} ", bare.hidden_noun),
        hidden_verb=texts("check whether it ", bare.hidden_noun),
        name=f"is_{bare.name}",
        gives=BOOL,
    )


def map_step(row: Row, draw: Draw, gives: str) -> Step:
    """A change made to each element."""
    step = bind(row, "map", draw, plural=True, gives=gives)
    return Step(
        kind=step.kind,
        code=step.code,
        noun=step.noun,
        verb=step.verb,
        hidden_noun=(*step.hidden_noun, "{it} each changed as the tests show"),
        hidden_verb=(*step.hidden_verb, "change each of them as the tests show"),
        name=step.name,
        gives=step.gives,
    )


def whole_step(row: Row, draw: Draw, gives: str, plural: bool = False) -> Step:
    """An operation on one whole value; element templates (``{x}``) are read as the value."""
    step = bind(row, "whole", draw, plural=plural, gives=gives)
    return Step(
        kind=step.kind,
        code=tuple(code.replace("{x}", "{v}") for code in step.code),
        noun=step.noun,
        verb=step.verb,
        hidden_noun=step.hidden_noun,
        hidden_verb=step.hidden_verb,
        name=step.name,
        gives=step.gives,
    )
