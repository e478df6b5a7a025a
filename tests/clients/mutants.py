"""Programs made of tasks' reference solutions, of which many pass and many do not: a pool to compare scorers on."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hf_fastdecode.evals.records import Sample, Task

_COMPARISONS: Final[dict[type[ast.cmpop], ast.cmpop]] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
_OPERATORS: Final[dict[type[ast.operator], ast.operator]] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Add(),
    ast.Div: ast.FloorDiv(),
    ast.FloorDiv: ast.Div(),
    ast.Mod: ast.Mult(),
}

# Put before the body of the function under test.
_FIRST_LINES: Final = {
    "infinite loop": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "4 TiB of memory": "data = bytearray(1 << 42)",
    "20 MiB printed": "print('x' * (20 << 20))",
    "a line printed": "print('called')",
    "exit in the function": "raise SystemExit(0)",
    "an AssertionError of its own": "raise AssertionError",
    "an object equal to all": "class Equal:\n    def __eq__(self, other): return True\nresult = Equal()",
}
# Put behind the program.
_LAST_LINES: Final = {
    "exit": "import sys\nsys.exit(0)\n",
    "exit at once": "import os\nos._exit(0)\n",
    "main": "if __name__ == '__main__':\n    print(undefined)\n",
    "input": "input()\n",
    "a line of stderr": "import sys\nprint('noise', file=sys.stderr)\n",
}

_Change = Callable[[], object]


@dataclass(frozen=True)
class Mutant:
    """A program with the rule that made it.

    Attributes:
        rule: In words.
        sample: The program.
    """

    rule: str
    sample: Sample


def mutants(tasks: Sequence[Task], *, each: int = 4, every: int = 100, seed: int = 0) -> list[Mutant]:
    """The reference solutions of tasks, and programs made of them.

    Args:
        tasks: In Python, without a stem; those without a reference are left out.
        each: Rules that change one place of a reference, for each task.
        every: Each of the other rules applies to one task of so many.
        seed: Of rules and places.
    """
    pool: list[Mutant] = []
    for number, task in enumerate(tasks):
        if task.reference is None:
            continue
        choices = random.Random(f"{seed} {task.task_id}")
        changed = [(rule, text) for rule in _PLACES if (text := _changed(task.reference, rule, choices)) is not None]
        added = list(_added(task, task.reference))
        due = [one for at, one in enumerate(added) if number % every == at * every // len(added)]
        found = [("reference", task.reference), *choices.sample(changed, min(each, len(changed))), *due]
        pool += [Mutant(rule, Sample(task.task_id, index, text)) for index, (rule, text) in enumerate(found)]
    return pool


def _changed(reference: str, rule: str, choices: random.Random) -> str | None:
    """A program with one place changed; None where the rule has no place in it."""
    if rule == "bracket removed":
        found = [at for at, letter in enumerate(reference) if letter in "()[]"]
        at = choices.choice(found) if found else -1
        return reference[:at] + reference[at + 1 :] if found else None
    tree = ast.parse(reference)
    places = [change for node in ast.walk(tree) for change in _PLACES[rule](node)]
    if not places:
        return None
    choices.choice(places)()
    return ast.unparse(tree)


def _comparison(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Compare) and (other := _COMPARISONS.get(type(node.ops[0]))):
        yield lambda: node.ops.__setitem__(0, other)


def _constant(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value + 1
        yield lambda: setattr(node, "value", value)


def _operator(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.BinOp) and (other := _OPERATORS.get(type(node.op))):
        yield lambda: setattr(node, "op", other)


def _returned(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Return) and node.value is not None:
        yield lambda: setattr(node, "value", None)


_PLACES: Final[dict[str, Callable[[ast.AST], Iterator[_Change]]]] = {
    "comparison swapped": _comparison,
    "constant off by one": _constant,
    "operator swapped": _operator,
    "return None": _returned,
    "bracket removed": lambda node: iter(()),
}


def _added(task: Task, reference: str) -> Iterator[tuple[str, str]]:
    """Rules that apply to any program, and what they make of one."""
    for rule, lines in _FIRST_LINES.items():
        tree = ast.parse(reference)
        for function in _tested(tree, task):
            function.body[:0] = ast.parse(lines).body
            if rule == "an object equal to all":
                function.body.insert(2, ast.Return(ast.Name("result", ast.Load())))
        yield rule, ast.unparse(ast.fix_missing_locations(tree))
    for rule, lines in _LAST_LINES.items():
        yield rule, f"{reference}\n{lines}"
    tree = ast.parse(reference)
    for function in _tested(tree, task):
        function.name += "_renamed"
    yield "function renamed", ast.unparse(tree)


def _tested(tree: ast.Module, task: Task) -> list[ast.FunctionDef]:
    """The functions at the top of a program that the tests call."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [function for function in functions if any(f"{function.name}(" in test for test in task.tests)]
