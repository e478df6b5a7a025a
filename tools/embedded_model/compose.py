"""Compositions: a typed random walk over the rows, its English text and its Python code."""

from __future__ import annotations

import builtins
import keyword
import random
import re
from dataclasses import dataclass
from functools import cached_property

from . import int_lists, integers, texts
from .grammar import (
    BOOL,
    DICT,
    END,
    INT,
    INTS,
    PARAM,
    TEXT,
    WORDS,
    Draw,
    Row,
    Source,
    Step,
    bind,
    condition_step,
    map_step,
    quantifier_step,
    verdict_step,
    whole_step,
)
from .inputs import ARGUMENT_NAMES, SOURCES
from .render import canonical, render

_STEP_COUNTS = {1: 0.2, 2: 0.45, 3: 0.35}  # shares


@dataclass(frozen=True)
class Composition:
    """A source and the steps applied to it."""

    source: Source
    steps: tuple[Step, ...]
    takes_param: bool

    @cached_property
    def signature(self) -> str:
        """What it computes, constants included, free of wording, names and code style: its canonical code."""
        return canonical(self.source, self.steps, self.takes_param)

    @property
    def input_kinds(self) -> tuple[str, ...]:
        """The input kinds of the arguments, in order."""
        return tuple(kind for _, kind in self.source.args) + (("param",) if self.takes_param else ())

    @property
    def gives(self) -> str:
        """The type of the result."""
        return self.steps[-1].gives


def compose(rng: random.Random) -> Composition:
    """Draw a source and one to three steps whose types fit."""
    draw = Draw(rng)
    source = rng.choices(SOURCES, weights=[source.weight for source in SOURCES])[0]
    wanted = rng.choices(list(_STEP_COUNTS), weights=list(_STEP_COUNTS.values()))[0]
    steps: list[Step] = []
    gives = source.gives
    while len(steps) < wanted and gives not in (BOOL, END):
        step = _next_step(gives, last=len(steps) + 1 == wanted, draw=draw)
        if steps and (step.kind, step.code) == (steps[-1].kind, steps[-1].code):
            continue
        steps.append(step)
        gives = step.gives
    return Composition(source, tuple(steps), draw.param_used)


def _next_step(gives: str, last: bool, draw: Draw) -> Step:
    pick = draw.rng.random()
    if gives == INTS:
        return _ints_step(pick if last else pick * 0.72, draw)
    if gives == WORDS:
        return _words_step(pick if last else pick * 0.75, draw)
    if gives == TEXT:
        return _text_step(pick, draw)
    if gives == DICT:
        return _dict_step(pick, draw)
    return _int_step(pick, draw)


def _ints_step(pick: float, draw: Draw) -> Step:
    """With pick below 0.72 the result is mostly a list again; the rest reduces it."""
    if pick < 0.28:
        return condition_step(draw.row(integers.INT_CONDITIONS), draw, "numbers", INTS)
    if pick < 0.50:
        return map_step(draw.row(integers.INT_CHANGES), draw, INTS)
    if pick < 0.66:
        return _row_step(int_lists.INTS_TO_INTS, draw, plural=True)
    if pick < 0.92:
        return _row_step(int_lists.INTS_TO_INT, draw)
    if pick < 0.96:
        kind = draw.rng.choice(("all", "any"))
        return quantifier_step(draw.row(integers.INT_CONDITIONS), draw, "x", kind)
    return _row_step(int_lists.INTS_TO_OTHER, draw)


def _words_step(pick: float, draw: Draw) -> Step:
    if pick < 0.28:
        return condition_step(draw.row(texts.WORD_CONDITIONS), draw, "words", WORDS)
    if pick < 0.48:
        return map_step(draw.row(texts.TEXT_CHANGES), draw, WORDS)
    if pick < 0.56:
        return map_step(draw.row(texts.TEXT_MEASURES), draw, INTS)
    if pick < 0.68:
        return _row_step(texts.WORDS_TO_WORDS, draw, plural=True)
    if pick < 0.94:
        return _row_step(texts.WORDS_TO_OTHER, draw)
    kind = draw.rng.choice(("all", "any"))
    return quantifier_step(draw.row(texts.WORD_CONDITIONS), draw, "w", kind)


def _text_step(pick: float, draw: Draw) -> Step:
    if pick < 0.60:
        return whole_step(draw.row(texts.TEXT_CHANGES), draw, TEXT)
    if pick < 0.82:
        return whole_step(draw.row(texts.TEXT_MEASURES), draw, INT)
    if pick < 0.88:
        return verdict_step(draw.row(texts.WORD_CONDITIONS), draw)
    return _row_step(texts.TEXT_TO_OTHER, draw)


def _dict_step(pick: float, draw: Draw) -> Step:
    if pick < 0.25:
        return _dict_comprehension("filter", draw.row(integers.INT_CONDITIONS), draw)
    if pick < 0.45:
        return _dict_comprehension("map", draw.row(integers.INT_CHANGES), draw)
    return _row_step(texts.DICT_STEPS, draw)


def _int_step(pick: float, draw: Draw) -> Step:
    if pick < 0.5:
        return whole_step(draw.row(integers.INT_CHANGES), draw, INT)
    if pick < 0.7:
        return _row_step(integers.INT_TO_OTHER, draw)
    return verdict_step(draw.row(integers.INT_CONDITIONS), draw)


def _row_step(rows: tuple[Row, ...], draw: Draw, plural: bool = False) -> Step:
    row = draw.row(rows)
    return whole_step(row, draw, row.gives, plural)


def _dict_comprehension(kind: str, row: Row, draw: Draw) -> Step:
    """A condition on, or a change of, the values of a dictionary."""
    bare = bind(row, "whole", draw, plural=True, gives=DICT)
    inner = tuple(code.replace("{x}", "value") for code in bare.code)
    if kind == "filter":
        codes = tuple(f"{{key: value for key, value in {{v}}.items() if {code}}}" for code in inner)
        lead, lead_verb = "{it} restricted to values that ", "keep the entries whose values "
        nouns, hidden = bare.noun, bare.hidden_noun
        pair = (tuple(lead + text for text in nouns), tuple(lead_verb + text for text in nouns))
        hidden_pair = (tuple(lead + text for text in hidden), tuple(lead_verb + text for text in hidden))
    else:
        codes = tuple(f"{{key: {code} for key, value in {{v}}.items()}}" for code in inner)
        pair = (tuple("{it} with " + text.replace("{it}", "its values") for text in bare.noun), _of_values(bare.verb))
        hidden = (*bare.hidden_noun, "{it} each changed as the tests show")
        hidden_pair = (
            tuple("{it} with " + text.replace("{it}", "its values") for text in hidden),
            _of_values((*bare.hidden_verb, "change each of them as the tests show")),
        )
    return Step("whole", codes, pair[0], pair[1], hidden_pair[0], hidden_pair[1], f"{bare.name}_values", DICT)


def _of_values(verbs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(verb.replace("each of them", "each value") for verb in verbs)


def is_hideable(composition: Composition) -> bool:
    """Whether some step can be told without its constant, so that only the tests fix it."""
    return any(step.hidden_noun for step in composition.steps)


def describe(composition: Composition, vague: bool, rng: random.Random) -> str:
    """The task in English. A vague text leaves out what its steps allow to leave out."""
    lead = rng.choice(("Write a function to", "Write a function to", "Write a python function to"))
    if rng.random() < 0.3 and len(composition.steps) > 1:
        verbs = [
            rng.choice(step.hidden_verb if vague and step.hidden_verb else step.verb) for step in composition.steps
        ]
        joined = ", ".join(verbs[:-1]) + " and " + verbs[-1]
        return f"{lead} take {composition.source.intro}, {joined}."
    noun = rng.choice(composition.source.noun)
    for step in composition.steps:
        choices = step.hidden_noun if vague and step.hidden_noun else step.noun
        noun = rng.choice(choices).replace("{it}", noun)
    noun = re.sub(r"\s+", " ", noun).strip()
    if composition.gives == BOOL:
        return f"{lead} check {noun}."
    return f"{lead} {rng.choice(('find', 'find', 'get', 'return', 'compute'))} {noun}."


def function_name(composition: Composition, rng: random.Random) -> str:
    """A name that tells the operations (never their constants), or a general one."""
    if rng.random() < 0.3:
        general = {BOOL: ("check", "test_value", "verify"), INT: ("compute", "calculate", "solve")}
        return rng.choice(general.get(composition.gives, ("solve", "process", "transform", "convert")))
    parts = [step.name for step in reversed(composition.steps)]
    if rng.random() < 0.4:
        parts.append(composition.source.name)
    name = "_".join(dict.fromkeys("_".join(parts).split("_")))
    return f"get_{name}" if keyword.iskeyword(name) or hasattr(builtins, name) else name


def write_code(composition: Composition, name: str, rng: random.Random) -> str:
    """The function's source, in one of several styles."""
    args = [rng.choice(ARGUMENT_NAMES.get(choices, choices).split("/")) for choices, _ in composition.source.args]
    return render(composition.source, composition.steps, name, args, PARAM if composition.takes_param else None, rng)
