"""Python source for a pipeline of steps, as one expression, as assignments or as a loop."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from .grammar import DICT, INT, INTS, PARAM, TEXT, WORDS, Source, Step

Pick = Callable[[Sequence[Any]], Any]  # chooses one of the options

_STYLES = {"expression": 0.5, "assignments": 0.3, "loop": 0.2}  # shares
_NAMES = {
    INTS: ("result", "values", "kept"),
    WORDS: ("result", "words"),
    TEXT: ("result", "text"),
    INT: ("result", "total"),
    DICT: ("result", "data"),
}
# Calls that take a bare generator in place of a list.
_TAKES_GENERATOR = ("sum({v})", "max({v})", "min({v})", "math.prod({v})", "sorted({v})", "tuple({v})", "set({v})")
# Codes that work on any sized iterable (a range, dictionary values, a tuple) and not only on a list.
_TAKES_ITERABLE = (*_TAKES_GENERATOR, "len({v})", "sorted({v}, reverse=True)", "sorted(set({v}))", "len(set({v}))")


@lru_cache(maxsize=65536)
def atom(expr: str) -> str:
    """The expression, in parentheses unless it binds tighter than any operator."""
    node = ast.parse(expr, mode="eval").body
    tight = (
        ast.Name,
        ast.Call,
        ast.Constant,
        ast.Subscript,
        ast.List,
        ast.ListComp,
        ast.Dict,
        ast.DictComp,
        ast.Tuple,
    )
    return expr if isinstance(node, tight) else f"({expr})"


class _Writer:
    """Folds filters and maps into one comprehension until something needs the list itself."""

    def __init__(self, source: Source, args: Sequence[str], var: str, words_var: str, pick: Pick) -> None:
        def fill(template: str) -> str:
            for index, arg in enumerate(args):
                template = template.replace(f"{{{index}}}", arg)
            return template

        self.pick = pick
        self.lines: list[str] = []
        self.var, self.words_var = var, words_var
        self.type = source.gives
        self.value = fill(source.expr)
        self.listed = fill(source.as_list) if source.as_list else self.value
        self.element: str | None = None
        self.conditions: list[str] = []
        self._element_var = self._var_of(self.type)

    def _var_of(self, gives: str) -> str:
        return self.words_var if gives == WORDS else self.var

    @property
    def pending(self) -> bool:
        """Whether a comprehension is open."""
        return self.element is not None or bool(self.conditions)

    def generator(self) -> str:
        """The open comprehension without its brackets."""
        tests = "".join(f" if {condition}" for condition in self.conditions[:1])
        if len(self.conditions) > 1:
            tests = " if " + " and ".join(atom(c) if " or " in c or " if " in c else c for c in self.conditions)
        return f"{self.element or self._element_var} for {self._element_var} in {self.value}{tests}"

    def settle(self, value: str, gives: str) -> None:
        """Continue from a plain value."""
        self.value = self.listed = value
        self.type = gives
        self.element, self.conditions = None, []
        self._element_var = self._var_of(gives)

    def close(self) -> None:
        """Turn the open comprehension into a list expression."""
        if self.pending:
            self.settle(f"[{self.generator()}]", self.type)

    def assign(self) -> None:
        """Give the current value a name, so that it can be used twice."""
        self.close()
        if not self.listed.isidentifier():
            name = self.pick(_NAMES[self.type])
            self.lines.append(f"{name} = {self.listed}")
            self.settle(name, self.type)

    def add(self, step: Step) -> None:
        """Apply one step."""
        code = self.pick((step.code[0], step.code[0], step.code[0], *step.code[1:]))
        if step.kind == "filter":
            if self.element is not None:
                self.close()
            self.conditions.append(code.replace("{x}", self._element_var))
        elif step.kind == "map":
            if self.element is not None and code.count("{x}") > 1:
                self.close()
            inner = self._element_var if self.element is None else atom(self.element)
            self.element = code.replace("{x}", inner)
            self.type = step.gives
        else:
            self._add_whole(code, step.gives)

    def _add_whole(self, code: str, gives: str) -> None:
        if self.pending and code in _TAKES_GENERATOR:
            self.settle(code.replace("{v}", self.generator()), gives)
            return
        self.close()
        iterable = code in _TAKES_ITERABLE or (code.count("{v}") == 1 and " for " in code and code.endswith("in {v})"))
        if iterable:
            self.settle(code.replace("{v}", self.value), gives)
            return
        if code.count("{v}") > 1:
            self.assign()
        bare = code.replace(" ", "")
        operand = atom(self.listed) if bare not in ("list({v})", "str({v})", "abs({v})") else self.listed
        self.settle(code.replace("{v}", operand), gives)

    def loop(self, reduce: Step | None) -> bool:
        """Write the open comprehension as a loop, together with a sum, count or product that follows; say if it took it."""
        accumulators = {
            "sum({v})": ("total = 0", "total += {e}"),
            "len({v})": ("count = 0", "count += 1"),
            "math.prod({v})": ("product = 1", "product *= {e}"),
        }
        out = "out" if "result" in self.value else "result"  # the list it reads may be called result
        start, update = (f"{out} = []", f"{out}.append({{e}})")
        taken = reduce is not None and reduce.code[0] in accumulators
        if reduce is not None and taken:
            start, update = accumulators[reduce.code[0]]
        indent = "    "
        body = [start, f"for {self._element_var} in {self.value}:"]
        if self.conditions:
            body.append(f"{indent}if {' and '.join(self.conditions)}:")
            indent *= 2
        body.append(indent + update.replace("{e}", self.element or self._element_var))
        self.lines += body
        self.settle(start.split(" ")[0], reduce.gives if reduce is not None and taken else self.type)
        return taken


def render(
    source: Source, steps: Sequence[Step], name: str, args: Sequence[str], param: str | None, rng: random.Random
) -> str:
    """A function of the given name and arguments. Deterministic in `rng`; imports `math` when it uses it."""
    style = rng.choices(list(_STYLES), weights=list(_STYLES.values()))[0]
    return _render(source, steps, name, args, param, style, rng.choice)


def canonical(source: Source, steps: Sequence[Step], takes_param: bool) -> str:
    """The function in its one canonical style and naming: compositions that share it mean the same program."""
    args = [f"arg{index}" for index in range(len(source.args))]
    return _render(source, steps, "f", args, PARAM if takes_param else None, "expression", lambda options: options[0])


def _render(
    source: Source, steps: Sequence[Step], name: str, args: Sequence[str], param: str | None, style: str, pick: Pick
) -> str:
    var = pick([choice for choice in ("x", "x", "num", "i") if choice not in args])
    writer = _Writer(source, args, var, pick(("w", "word")), pick)
    index = 0
    while index < len(steps):
        following = steps[index + 1] if index + 1 < len(steps) else None
        writer.add(steps[index])
        index += 1
        stays_open = following is not None and following.kind != "whole"
        if style == "loop" and writer.pending and not stays_open:
            index += writer.loop(following)
            style = "expression"
        elif style == "assignments" and following is not None and pick((True, True, True, True, False)):
            writer.assign()
    writer.close()
    body = [*writer.lines, f"return {writer.listed}"]
    lines = [f"def {name}({', '.join([*args, param] if param else args)}):", *(f"    {line}" for line in body)]
    if any("math." in line for line in body):
        lines.insert(0, "import math")
    return "\n".join(lines)
