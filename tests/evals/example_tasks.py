"""Small tasks in three languages, pieces of code that look like programs, and runners that check programs on tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Final

import pytest
from hypothesis import strategies as st

from hf_fastdecode.evals.records import Language, Task
from hf_fastdecode.evals.sandbox import Limits, Sandbox
from hf_fastdecode.evals.scoring import LANGUAGES, Result, Runner
from hf_fastdecode.evals.scoring.python import PythonRunner

MBPP = Task(
    task_id="11",
    language="python",
    description="Write a function to double a number.",
    stem="",
    tests=("assert double(2) == 4", "assert double(0) == 0"),
    reference="def double(x):\n    return 2 * x",
)
PYTHON = replace(
    MBPP,
    task_id="MBPP/3",
    stem='def double(x):\n    """\n    Write a function to double a number.\n    """\n',
    tests=("def check(candidate):\n    assert candidate(2) == 4\n",),
    entry_point="double",
    reference="    return 2 * x\n",
)
JAVA = replace(
    PYTHON,
    task_id="MBJP/3",
    language="java",
    stem="import java.util.*;\n\nclass Double2 {\n    /** {@code 2 * x} */\n    public static int twice(int x) {\n",
    tests=("class Main { }",),
    entry_point="twice",
    reference="        return 2 * x;\n    }\n}",
)
JAVASCRIPT = replace(
    JAVA,
    task_id="MBJSP/3",
    language="javascript",
    stem="/** twice: { */\nfunction twice(x) {\n",
    tests=("if (twice(2) !== 4) { throw 'no' }",),
    reference="  return 2 * x;\n}",
)


CODE: Final[tuple[Language, ...]] = ("python", "java", "javascript")

_ALL: Final = ["\n", "\n\n", "    ", "helper", "twice", "double", *" x()[]'\"\\+é0`"]
_PIECES: Final[dict[Language, list[str]]] = {
    "python": [
        "    return helper(x)\n", "def helper(a):\n", "def other(a):\n", "def double(x):\n", "class A:\n",
        "import re\n",
        "# a\n", "    # b\n", '"""', "'''", "print(", "async ", "async def helper(b):\n    pass\n", "x = 1\n", "@a\n",
    ],
    "java": [
        "{", "}", ";", "}\n", "        return helper(x);\n    }\n", "    static int helper(int a) {\n",
        "class Node {\n",
        "int helper = 2;", "// {\n", "/* } */", "/", "*", '"""', "'}'", '"{"', "@Override ", "import a.b;", "static {",
        "Node n;", "public class Main {",
    ],
    "javascript": [
        "{", "}", ";", "}\n", "  return helper(x);\n}\n", "function helper(a) {\n", "class Node {\n", "async ",
        "// {\n", "/* } */", "/", "/}/", "${", "return ", "if (x) ", "++", "'}'", "new Node()",
        "console.log(1)\n", "const a = ",
    ],
}  # fmt: skip


def pieces(language: Language) -> st.SearchStrategy[str]:
    """Texts of up to 25 pieces."""
    return st.lists(st.sampled_from(_PIECES[language] + _ALL), max_size=25).map("".join)


class Scripted(AbstractContextManager):
    """A runner that gives results from a list per completion, one after another; the last one stays, else a pass."""

    scripts: dict[str, list[Result | BaseException]]
    seen: list[tuple[str, str]]  # task id and completion of each check
    walls: list[float]  # its limit on wall-clock time

    def __init__(self, sandbox: Sandbox, limits: Limits):
        self.limits = limits

    def check(self, task: Task, completion: str) -> Result:
        done = sum(text == completion for _, text in self.seen)
        self.seen.append((task.task_id, completion))
        self.walls.append(self.limits.wall_seconds)
        script = self.scripts.get(completion, [Result("pass")])
        result = script[min(done, len(script) - 1)]
        if isinstance(result, BaseException):
            raise result
        return result

    def __exit__(self, *raised: object) -> None:
        pass


PYTHON_LIMITS = Limits(
    cpu_seconds=1, wall_seconds=30, memory_bytes=256 << 20, address_bytes=1 << 30, output_bytes=1 << 20
)


def asserts(*tests: str, setup: str = "", entry_point: str = "", stem: str = "") -> Task:
    """A task of asserts."""
    return Task("1", "python", "", stem, tests, entry_point, setup)


def check(sandbox: Sandbox, task: Task, program: str) -> Result:
    return _runner(sandbox).check(task, program)


_RUNNERS = ExitStack()


@cache
def _runner(sandbox: Sandbox) -> PythonRunner:
    """One for all tests, as a run has one for all tasks: each check has new sandboxes, forked from what it keeps."""
    return _RUNNERS.enter_context(PythonRunner(sandbox, PYTHON_LIMITS))


def end_runners() -> None:
    """End what `check` keeps."""
    _runner.cache_clear()
    _RUNNERS.close()


MBXP_LIMITS = Limits(cpu_seconds=3.0, wall_seconds=30.0, memory_bytes=1 << 30, output_bytes=1 << 20)

JAVA_TESTS = """

class Main {
    public static boolean compare(Object obj1, Object obj2) {
        if (obj1 == null && obj2 == null) {
            return true;
        } else if (obj1 == null || obj2 == null) {
            return false;
        } else {
            return obj1.equals(obj2);
        }
    }

    public static void main(String[] args) throws Exception {
        %s
    }
}
"""
JAVA_CASE = """
        Object x%d = %s;
        Object v%d = %s;
        if (!(compare(x%d, v%d))) {
            throw new java.lang.Exception("Exception -- test case %d did not pass. x%d = " + x%d);
        }
"""
JAVASCRIPT_TESTS = """
const _ = require("lodash")

function compare(object1, object2){
    return _.isEqual(object1, object2)
}
"""
JAVASCRIPT_CASE = """
var x%d = %s;
var v%d = %s;
if(!compare(x%d, v%d)){
    throw 'Error at %dth assert statement. Value = ' + JSON.stringify(x)
}
"""


def java_task(signature: str, *cases: tuple[str, str]) -> Task:
    """A task whose method has a signature, with calls and what they give."""
    tests = "".join(JAVA_CASE % (n, call, n, value, *[n] * 5) for n, (call, value) in enumerate(cases))
    stem = f"import java.io.*;\nimport java.util.*;\nimport java.math.*;\n\n\nclass Solution {{\n    {signature} {{\n"
    return Task("MBJP/1", "java", "", stem, (JAVA_TESTS % tests,), signature.partition("(")[0].split()[-1])


def javascript_task(signature: str, *cases: tuple[str, str]) -> Task:
    """A task whose function has a signature, with calls and what they give."""
    tests = "".join(JAVASCRIPT_CASE % (n, call, n, value, *[n] * 3) for n, (call, value) in enumerate(cases, 1))
    name = signature.partition("(")[0]
    return Task("MBJSP/1", "javascript", "", f"function {signature} {{\n", (JAVASCRIPT_TESTS + tests,), name)


@contextmanager
def usable_runner(language: Language, sandbox: Sandbox) -> Iterator[Runner]:
    """A runner of a language; skips the test where its toolchain is missing."""
    if missing := LANGUAGES[language].missing():
        pytest.skip(missing)
    with LANGUAGES[language].runner(sandbox, MBXP_LIMITS) as runner:
        yield runner
