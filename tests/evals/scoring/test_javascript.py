"""JavaScript programs: verdicts, values that cross between processes, and programs that cheat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hf_fastdecode.evals.sandbox import Sandbox, SandboxError
from hf_fastdecode.evals.scoring import LANGUAGES, Result, Runner

from ...cases import exhaustive_but
from .other_languages import javascript_task, usable_runner

DOUBLE = javascript_task("twice(x)", ("twice(2)", "4"), ("twice([3])", "[6]"), ("twice(0)", "0"))
RIGHT = "  return Array.isArray(x) ? x.map(y => 2 * y) : 2 * x;\n}"


@pytest.fixture(scope="module")
def runner(any_sandbox: Sandbox) -> Iterator[Runner]:
    with usable_runner("javascript", any_sandbox) as found:
        yield found


def test_right_and_wrong(runner: Runner) -> None:
    assert runner.check(DOUBLE, RIGHT) == Result("pass")
    assert runner.check(DOUBLE, "  return 2 * x;\n}") == Result(
        "fail", "Error at 2th assert statement. Value = undefined"
    )


def test_each_sandbox(sandbox: Sandbox) -> None:
    with usable_runner("javascript", sandbox) as found:
        assert found.check(DOUBLE, RIGHT) == Result("pass")
        assert found.check(DOUBLE, RIGHT.replace("2", "3")).status == "fail"


@pytest.mark.parametrize(
    ("completion", "status", "detail"),
    [
        ("  return 2 * ;\n}", "compile", "SyntaxError: "),
        ("  return 2 * x;", "compile", "SyntaxError: "),
        ("", "compile", "SyntaxError: "),
        ("  return y;\n}", "fail", "Error: ReferenceError: y is not defined"),
        ("  return twice(x);\n}", "fail", "Error: RangeError: Maximum call stack size exceeded"),
        (RIGHT + "\nthrow new Error('no');", "fail", "Error: no"),
        ("  for (;;) { }\n}", "timeout", "used more than 3 s of CPU time"),
        ("  const a = []; for (;;) a.push(new Array(1e5).fill(0.5));\n}", "memory", ""),
        ("  return new Array(3e6).fill(1);\n}", "output", ""),
        ("  for (;;) require('fs').writeSync(4, 'x'.repeat(1e5));\n}", "output", ""),
        ("  for (;;) require('fs').writeSync(1, 'x'.repeat(1e5));\n}", "output", ""),
        (RIGHT.replace("return", "console.log(x); require('fs').readFileSync(0); return"), "pass", ""),
        (RIGHT + "\nfunction compare() { return true; }\nconst _ = 1;", "pass", ""),
    ],
)
def test_statuses(runner: Runner, completion: str, status: str, detail: str) -> None:
    result = runner.check(DOUBLE, completion)
    assert (result.status, result.detail[: len(detail)]) == (status, detail)
    assert runner.check(DOUBLE, RIGHT) == Result("pass")  # the next program is not affected


FORGED = """
const part = (text) => '\\0\\0\\0' + String.fromCharCode(text.length) + text;
const two = '\\0\\0\\0\\2', one = '\\0\\0\\0\\1';
"""


@pytest.mark.parametrize(
    "completion",
    [
        "  process.exit(0);\n}",
        "  return 0;\n}\nprocess.exit(0);",
        "  return 0;\n}\nprocess.kill(process.ppid); process.abort();",
        "  return { valueOf() { return 4; }, toString() { return '4'; } };\n}",
        "  return new Proxy({}, { get: () => 4, ownKeys: () => [] });\n}",
        "  return new (class Equal { equals() { return true; } })();\n}",
        "  return Promise.resolve(2 * x);\n}",
        "  return () => 4;\n}",
        # What it patches is its own.
        "  return 0;\n}\nrequire('module').prototype.require = () => ({ isEqual: () => true });",
        "  return 0;\n}\nfor (const one of Object.values(require.cache)) one.exports = { isEqual: () => true };",
        "  return 0;\n}\nJSON.stringify = () => '4'; JSON.parse = () => 4; Object.is = Array.isArray = () => true;",
        "  return 0;\n}\nObject.prototype.isEqual = () => true; Object.prototype['0'] = 4;",
        "  return 0;\n}\nglobalThis._ = { isEqual: () => true }; globalThis.compare = () => true;",
        # Messages in its own name say what it could have answered anyway.
        f"  return 0;\n}}\n{FORGED} require('fs').writeSync(4, Buffer.from(one + part('pass'), 'latin1'));",
        f"  return 0;\n}}\n{FORGED} require('fs').writeSync(4, Buffer.from(two + part('pass') + part(''), 'latin1'));",
        "  require('fs').writeSync(4, 'pass'); return 0;\n}",
        # What it waits for does not come.
        pytest.param("  require('fs').readFileSync(3, 'utf8'); return 0;\n}", marks=pytest.mark.exhaustive),
        # The tests are not where it could read them.
        "  return eval(require('fs').readFileSync(__filename.replace('candidate', 'test'), 'utf8'));\n}",
        "  require('child_process').execSync('cat /proc/1/environ; kill -9 -1'); return 0;\n}",
    ],
)
def test_cheating_gains_nothing(runner: Runner, completion: str) -> None:
    assert runner.check(DOUBLE, completion).status in ("fail", "output", "timeout")
    assert runner.check(DOUBLE, RIGHT) == Result("pass")


VALUES = (
    "0 -0 1.5 -1e300 NaN Infinity -Infinity 'é\\ud800' '' true false null undefined 12345678901234567890n [] [[1],[]] "
    "[undefined,null] {} {a:{b:[1]}} {'__proto__':1,'constructor':2} ({['__proto__']:1}) new(Map)([[[1],{a:2}]]) "
    "new(Set)([[1],'a']) new(Date)(5) new(Date)(NaN)"
).split()


@pytest.mark.parametrize("value", exhaustive_but(VALUES[::3], VALUES))
def test_values_cross_as_they_are(runner: Runner, value: str) -> None:
    task = javascript_task("same(a)", (f"same({value})", value))
    assert runner.check(task, "  return a;\n}") == Result("pass")
    assert runner.check(task, "  return 'other';\n}").status == "fail"


def test_kinds_stay_apart(runner: Runner) -> None:
    """What a program gets is what the tests give, and what it returns is compared as lodash compares it."""
    told = "  return [typeof a, Array.isArray(a), a instanceof Map, a instanceof Set, Object.is(a, -0)].join();\n}"
    for value, expected in (
        ("-0", "'number,false,false,false,true'"),
        ("[]", "'object,true,false,false,false'"),
        ("new Map()", "'object,false,true,false,false'"),
        ("new Set()", "'object,false,false,true,false'"),
    ):
        assert runner.check(javascript_task("kind(a)", (f"kind({value})", expected)), told) == Result("pass")
    for value, other in (("'1'", "1"), ("[1]", "{0: 1}"), ("new Set([1])", "[1]"), ("null", "undefined"), ("1n", "1")):
        task = javascript_task("same(a)", ("same(1)", other))
        assert runner.check(task, f"  return {value};\n}}").status == "fail"


def test_programs_may_keep_a_state_and_use_the_tests_names(runner: Runner) -> None:
    task = javascript_task("next()", ("next()", "1"), ("next()", "2"))
    assert runner.check(task, "  return ++count;\n}\nlet count = 0;") == Result("pass")
    task = javascript_task("same(a, b)", ("same([1], [1])", "true"))
    assert runner.check(task, "  return compare(a, b) && _.isEqual(a, b);\n}") == Result("pass")


def test_tasks_that_cannot_be_run(runner: Runner) -> None:
    check_task = LANGUAGES["javascript"].check_task
    check_task(DOUBLE)
    for task, message in (
        (replace(DOUBLE, tests=()), "task MBJSP/1 has no tests; every program would pass"),
        (replace(DOUBLE, tests=("", " \n")), "task MBJSP/1 has no tests; every program would pass"),
        (replace(DOUBLE, tests=("// later",)), "the tests of task MBJSP/1 never call twice"),
        (replace(DOUBLE, entry_point=""), "task MBJSP/1 must name the function under test, got ''"),
    ):
        with pytest.raises(ValueError, match=message):
            check_task(task)
        with pytest.raises(ValueError, match=message):
            runner.check(task, RIGHT)
    with pytest.raises(SandboxError, match="the tests cannot be run: SyntaxError"):
        runner.check(replace(DOUBLE, tests=("if (twice",)), RIGHT)
    assert runner.check(DOUBLE, RIGHT) == Result("pass")


def test_without_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert LANGUAGES["javascript"].missing() == "JavaScript programs need node; install it (apt install nodejs)"
