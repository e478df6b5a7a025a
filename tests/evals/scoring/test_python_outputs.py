"""Outputs of Python programs: equal for programs of which the tests learn the same."""

from __future__ import annotations

import pytest

from hf_fastdecode.evals.records import Task
from hf_fastdecode.evals.sandbox import Limits, Sandbox
from hf_fastdecode.evals.scoring import Result
from hf_fastdecode.evals.scoring.python import PythonRunner

from .python_tasks import asserts, check


def outputs_of(sandbox: Sandbox, task: Task, program: str) -> str:
    return check(sandbox, task, program).outputs


def test_programs_that_return_the_same_have_equal_outputs(any_sandbox: Sandbox) -> None:
    """In whatever order sets hold their items; up to the first test that fails."""
    task = asserts("assert f('abc') == {'a', 'b', 'c'}", "assert f('x') == {'x'}")

    def outputs(body: str) -> str:
        return outputs_of(any_sandbox, task, f"def f(x):\n    {body}")

    right = outputs("return set(x)")
    assert right
    assert right == outputs("return {one for one in reversed(x)}")
    wrong = outputs("return set(x[:1])")
    assert wrong == outputs("return {'a'} if x else 3")
    assert right == outputs("return frozenset(x)") == outputs("return dict.fromkeys(x).keys()")
    assert len({right, wrong, outputs("return list(x)"), outputs("return tuple(x)")}) == 4
    assert outputs("while True: pass") == outputs("return (") == outputs("return 1\nraise ValueError") == ""


def test_dicts_have_equal_outputs_in_any_order(any_sandbox: Sandbox) -> None:
    task = asserts("assert f() == {'a': 1, 'b': [2]}")
    values = (
        "{'a': 1, 'b': [2]}",
        "{'b': [2], 'a': True}",
        "__import__('collections').OrderedDict(b=[2], a=1)",
        "__import__('collections').defaultdict(list, b=[2], a=1.0)",
    )
    found = {outputs_of(any_sandbox, task, f"def f(): return {value}") for value in values}
    assert len(found) == 1
    assert found != {outputs_of(any_sandbox, task, "def f(): return {'a': [2], 'b': 1}")}


def test_what_a_call_did_to_its_arguments_is_of_its_outputs(any_sandbox: Sandbox) -> None:
    task = asserts("a = [2, 3, 1]\nf(a)\nassert a == [1, 2, 3]")
    bodies = ("a.sort()", "a.reverse()", "a.clear()", "pass", "a[:] = sorted(a)")
    sorting, *others, again = [outputs_of(any_sandbox, task, f"def f(a): {body}") for body in bodies]
    assert sorting == again
    assert len({sorting, *others}) == 4
    assert all(others)


def test_exceptions_are_outputs_by_their_class(any_sandbox: Sandbox) -> None:
    task = asserts("try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass", "assert f(2) == 4")

    def program(error: str, value: str = "2 * x") -> str:
        return f"class Own(ValueError): pass\ndef f(x):\n    if x < 0: raise {error}\n    return {value}"

    results = [check(any_sandbox, task, program(error)) for error in ("ValueError('no')", "ValueError(x)", "Own")]
    assert [result.status for result in results] == ["pass"] * 3
    assert len({result.outputs for result in results}) == 1
    assert results[0].outputs
    assert results[0].outputs != outputs_of(any_sandbox, task, program("ValueError", "3 * x"))
    assert results[0].outputs != outputs_of(any_sandbox, task, program("TypeError"))


def test_objects_count_by_what_tests_learn_from_them(any_sandbox: Sandbox) -> None:
    task = asserts("assert list(f()) == [0, 1, 2]")
    values = ("(i for i in range(3))", "map(int, '012')", "iter([0, 1, 2])", "(i for i in range(2))", "iter([0, 1])")
    *right, wrong, again = [outputs_of(any_sandbox, task, f"def f(): return {value}") for value in values]
    assert len(set(right)) == 1
    assert right[0] != wrong == again
    said = asserts("assert f() == 1, f'got {f()}'")
    assert len({outputs_of(any_sandbox, said, "def f(): return object()") for _ in range(2)}) == 1, "without addresses"


@pytest.mark.parametrize("body", ["return 5", "while True: pass", "raise SystemExit", "import os; os._exit(0)"])
@pytest.mark.parametrize("container", ["deque([A()])", "deque([[A()]])", "{1: A()}.values()", "{1: A()}.items()"])
def test_outputs_never_run_the_program(any_sandbox: Sandbox, container: str, body: str) -> None:
    methods = "".join(
        f"    def {name}(self, *a):\n        {body}\n" for name in ("__repr__", "__str__", "__len__", "__bool__")
    )
    program = f"from collections import deque\nclass A:\n{methods}def f(): return {container}"
    result = check(any_sandbox, asserts("assert len(f()) == 1"), program)
    assert result == Result("pass")
    assert result.outputs


def test_large_results_are_not_kept_for_their_outputs(any_sandbox: Sandbox) -> None:
    limits = Limits(cpu_seconds=20, wall_seconds=60, memory_bytes=128 << 20, output_bytes=1 << 30)
    task = asserts("for _ in range(20):\n    assert len(f()) == 8 << 20")
    with PythonRunner(any_sandbox, limits) as runner:
        result = runner.check(task, "def f(): return 'x' * (8 << 20)")
    assert result == Result("pass")
    assert result.outputs
