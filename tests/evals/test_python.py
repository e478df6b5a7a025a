"""Checking Python programs: verdicts as of one process that runs program, setup and tests in order."""

from __future__ import annotations

import pytest

from hf_fastdecode.evals.records import Task
from hf_fastdecode.evals.sandbox import Limits, Sandbox, SandboxError
from hf_fastdecode.evals.scoring import Result
from hf_fastdecode.evals.scoring.python import PythonRunner, job_of

from .example_tasks import asserts, check

DOUBLE = asserts("assert double(2) == 4", "assert double(-3) == -6")


@pytest.mark.parametrize(
    ("program", "status", "detail"),
    [
        ("def double(x):\n    return 2 * x", "pass", ""),
        ("double = lambda x: x + x", "pass", ""),
        ("def double(x):\n    return x", "fail", "AssertionError in test 1: assert double(2) == 4"),
        ("def double(x):\n    return abs(2 * x)", "fail", "AssertionError in test 2: assert double(-3) == -6"),
        ("def double(x)", "compile", "SyntaxError: expected ':' (completion.py, line 1)"),
        ("double = '\0'", "compile", ""),
        ("(" * 10000, "compile", "SyntaxError: too many nested parentheses (completion.py, line 1)"),
        (
            "def other(x):\n    return x",
            "fail",
            "NameError: name 'double' is not defined in test 1: assert double(2) == 4",
        ),
        ("import nosuch", "fail", "ModuleNotFoundError: No module named 'nosuch' in the program"),
        (
            "def double(x):\n    return [][x]",
            "fail",
            "IndexError: list index out of range in test 1: assert double(2) == 4",
        ),
        ("def double(x):\n    return double(x)", "fail", "RecursionError: maximum recursion depth exceeded in test 1"),
        ("x = bytearray(1 << 40)", "memory", "MemoryError in the program"),
        ("def double(x):\n    return bytearray(1 << 40)", "memory", "MemoryError in test 1: assert double(2) == 4"),
        ("input()", "fail", "EOFError: EOF when reading a line in the program"),
    ],
)
def test_statuses(any_sandbox: Sandbox, program: str, status: str, detail: str) -> None:
    result = check(any_sandbox, DOUBLE, program)
    assert (result.status, result.load) == (status, False)
    assert result.detail.startswith(detail)


def test_both_back_ends_agree(sandbox: Sandbox) -> None:
    assert check(sandbox, DOUBLE, "def double(x):\n    return 2 * x").status == "pass"
    assert check(sandbox, DOUBLE, "def double(x):\n    return 3 * x").status == "fail"


# Each line is a value; a program that returns it and tests that look at it agree as they do in one process.
VALUES = """
None; f() is None
[1, 2.5, 'x', b'y', 1j]; f() == [1, 2.5, 'x', b'y', 1j]
(1, [2, {3}]); f() == (1, [2, {3}]) and f()[1][1] == {3}
float('nan'); f() != f()
-0.0; str(f()) == '-0.0'
10 ** 5000; f() == 10 ** 5000
__import__('collections').Counter('aab'); f()['a'] == 2 and f()['z'] == 0
__import__('collections').defaultdict(int, a=1); f() == {'a': 1} and f()['b'] == 0
__import__('collections').OrderedDict(a=1); f() == {'a': 1} and list(f()) == ['a']
__import__('collections').deque([1, 2]); list(f()) == [1, 2] and f() != [1, 2]
__import__('collections').namedtuple('P', 'x y')(1, 2); f() == (1, 2)
__import__('fractions').Fraction(1, 2); f() == 0.5
__import__('decimal').Decimal(4); f() == 4
range(3); f() == range(3) and f() != [0, 1, 2]
map(str, [1, 2]); list(f()) == ['1', '2'] and f() != ['1', '2']
(one for one in 'abc'); next(f()) == 'a' and list(f()) == ['a', 'b', 'c'] and 'b' in f()
zip([1, 2], 'ab'); dict(f()) == {1: 'a', 2: 'b'}
{1: 2}.keys(); f() == {1} and list(f()) == [1]
{1: 2}.values(); list(f()) == [2] and f() != [2]
iter([]); list(f()) == []
int; f() == int and f() is int
lambda x: x + 1; f()(3) == 4
__import__('math'); f().floor(2.5) == 2
type('T', (), {'__len__': lambda self: 3, '__getitem__': lambda self, i: 'abc'[i]})(); len(f()) == 3 and f()[1] == 'b'
type('T', (), {'a': 5})(); f().a == 5
type('T', (), {'__bool__': lambda self: False})(); not f()
type('T', (), {'__str__': lambda self: 'text'})(); str(f()) == 'text'
__import__('sys').getsizeof((1, 2)); f() == __import__('sys').getsizeof((1, 2))
"""


@pytest.mark.parametrize("line", VALUES.strip().splitlines())
def test_returned_values_behave_as_in_one_process(any_sandbox: Sandbox, line: str) -> None:
    value, _, test = line.partition("; ")
    program = f"def f():\n    return {value}"
    scope: dict[str, object] = {}
    exec(program, scope)
    assert eval(test, scope), "the expectation itself, in one process"
    assert check(any_sandbox, asserts(f"assert {test}"), program) == Result("pass")


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): return sorted(x)", "assert f([3, 1]) == [1, 3]"),
        ("def f(x): x.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]"),
        (
            "def f(x): x[0].append(1); x.append(2)",
            "inner = []\nx = [inner]\nf(x)\nassert (x, inner) == ([[1], 2], [1])",
        ),
        (
            "def f(x): x['a'] = 1; del x['b']; x['c'].add(3)",
            "s = set()\nx = {'b': 2, 'c': s}\nf(x)\nassert x == {'a': 1, 'c': {3}} and s == {3}",
        ),
        ("def f(*a, **k): return a, k", "assert f(1, *[2], k=[3]) == ((1, 2), {'k': [3]})"),
        ("def f(x, kind): return [one for one in x if type(one) == kind]", "assert f([1, 'a'], int) == [1]"),
        ("def f(g, x): return g(x)", "assert f(len, [1, 2]) == 2"),
        (
            "def f(x): raise ValueError(f'bad {x}')",
            "try:\n    f(3)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'bad 3'",
        ),
        (
            "class Own(KeyError): pass\ndef f(): raise Own(1)",
            "try:\n    f()\n    assert False\nexcept LookupError as e:\n    assert isinstance(e, KeyError)",
        ),
        ("import math\ndef f(x): return x / 3", "assert math.isclose(f(1), 1 / 3)"),
        (
            "import math as m, os.path\ndef f(x): return x",
            "assert m.pi > 3 and os.path.join('a', 'b') == 'a/b' and f(1)",
        ),
        (
            "class Node: left = None\ndef depth(n): return 0 if n is None else 1 + depth(n.left)",
            "root = Node()\nroot.left = Node()\nassert (depth(root), depth(root.left)) == (2, 1)",
        ),
        (
            "class Pair:\n    def __init__(self, a, b): self.c = a * b\ndef total(ps): return sum(p.c for p in ps)",
            "assert total([Pair(1, 2), Pair(3, 4)]) == 14",
        ),
        (
            "count = 0\ndef f():\n    global count\n    count += 1\n    return count",
            "assert [f(), f(), f()] == [1, 2, 3]",
        ),
        ("f = {'a': [1]}", "assert f['a'] == [1]"),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int = 3\ndef f(): return P()",
            "assert f().x == 3",
        ),
        ("thing = object()\ndef f(): return thing", "assert f() is f() and f() == f() and f() in [f()]"),
        ("print('noise' * 100)\nimport sys\ndef f(): print('more', file=sys.stderr); return 1", "assert f() == 1"),
        ("if __name__ == '__main__':\n    def f(): return 1", "assert f() == 1"),
    ],
)
def test_programs_behave_as_in_one_process(any_sandbox: Sandbox, program: str, test: str) -> None:
    exec(f"{program}\n{test}", {"__name__": "__main__"})
    assert check(any_sandbox, asserts(test), program) == Result("pass")


def test_names_are_those_of_the_tests_own_modules(any_sandbox: Sandbox) -> None:
    fake = "class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x): return 'wrong'"
    assert check(any_sandbox, asserts("assert math.isclose(f(1), 2)"), fake).detail.startswith("TypeError")
    missing = check(any_sandbox, asserts("assert math.isclose(f(1), 2)"), "def f(x): return 2")
    assert missing.detail.startswith("NameError: name 'math' is not defined")


def test_a_program_cannot_replace_builtins_of_the_tests(any_sandbox: Sandbox) -> None:
    program = "def f(x): return 'wrong'\ndef set(x): return None\ndef len(x): return 0\ndef abs(x): return 0"
    assert check(any_sandbox, asserts("assert set(f(1)) == set('right')"), program).status == "fail"
    assert check(any_sandbox, asserts("assert abs(len(f(1)) - 9) < 1"), program).status == "fail"
    named_so = asserts("assert sum(10, 15) == 6", "assert sum(4, 6) == 3")
    assert check(any_sandbox, named_so, "def sum(a, b): return 6 if a == 10 else 3").status == "pass"


def test_setup_runs_after_the_program_and_may_use_it(any_sandbox: Sandbox) -> None:
    task = asserts("assert six == 6", setup="six = double(3)")
    assert check(any_sandbox, task, "def double(x): return 2 * x").status == "pass"
    failing = check(any_sandbox, task, "def other(x): return 2 * x")
    assert failing.detail == "NameError: name 'double' is not defined in setup: six = double(3)"


CHECKED = """
METADATA = {}

def check(candidate):
    assert candidate([1, 2]) == 3
    assert total([5]) == 5
"""


def test_a_stem_is_continued_and_check_is_called(any_sandbox: Sandbox) -> None:
    stem = 'def total(xs):\n    """The sum."""\n'
    task = asserts(CHECKED, entry_point="total", stem=stem)
    assert check(any_sandbox, task, "    return sum(xs)\n") == Result("pass")
    wrong = check(any_sandbox, task, "    return 3\n")
    assert wrong == Result("fail", "AssertionError in test 1: assert total([5]) == 5")
    called = asserts(CHECKED + "\ncheck(total)\n", entry_point="total", stem=stem)
    assert check(any_sandbox, called, "    return sum(xs)\n") == Result("pass")
    assert check(any_sandbox, task, "return 3").status == "compile"
    undefined = asserts(CHECKED, entry_point="total")
    assert check(any_sandbox, undefined, "x = 1").detail == "NameError: name 'total' is not defined"


def test_an_entry_point_may_be_named_check(any_sandbox: Sandbox) -> None:
    task = asserts("def check(candidate):\n    assert candidate(4) is True", entry_point="check")
    assert check(any_sandbox, task, "def check(n): return n == 4") == Result("pass")
    assert check(any_sandbox, task, "def check(n): return n == 5").status == "fail"


def test_helpers_of_the_stem_are_the_tests_own(any_sandbox: Sandbox) -> None:
    stem = "import math\n\ndef encode(text):\n    return text[::-1]\n\ndef decode(text):\n"
    test = "def check(candidate):\n    assert candidate(encode('abc')) == 'abc' and math.pi > 3"
    for docstring in ("", "    'The text.'\n"):
        task = asserts(test, entry_point="decode", stem=stem + docstring)
        assert check(any_sandbox, task, "    return text[::-1]\n") == Result("pass")
        assert check(any_sandbox, task, "    return encode(text)\n") == Result("pass")
        own = "    return text\ndef encode(text):\n    return text\n"
        assert check(any_sandbox, task, own).status == "fail", "the tests encode for themselves"


def test_classes_of_the_stem_are_the_programs_own(any_sandbox: Sandbox) -> None:
    stem = "class Node:\n    def __init__(self, x):\n        self.x = x\n\nroot = Node(7)\n\ndef value(node):\n"
    task = asserts("assert value(root) == 7 and value(Node(8)) == 8", entry_point="value", stem=stem)
    assert check(any_sandbox, task, "    assert isinstance(node, Node)\n    return node.x\n") == Result("pass")


def test_what_cannot_travel_is_no_failure_of_the_program(any_sandbox: Sandbox) -> None:
    task = asserts("assert f(lambda x: x + 1) == 4")
    result = check(any_sandbox, task, "def f(g): return g(3)")
    assert result.status == "unjudged"
    assert "the tests give the program a function; only plain data can be sent to it" in result.detail


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("import math\ndef f(x): return x", "assert math.pi and f(math) == 1"),
        ("def f(x):\n    y = []\n    for _ in range(99): y = [y]\n    return y", "assert f([[f(1)]]) == 1"),
        ("class T:\n    def __str__(self): raise KeyboardInterrupt\ndef f(x): return T()", "assert f(1) == 2, f(1)"),
        ("class T:\n    def __str__(self): return 1\ndef f(x): return T()", "assert f(1) == 2, f(1)"),
    ],
    ids=["module", "depth", "text-of-an-assert", "no-text-of-an-assert"],
)
def test_a_program_cannot_make_its_failure_one_of_the_sandbox(any_sandbox: Sandbox, program: str, test: str) -> None:
    assert check(any_sandbox, asserts(test), program).status == "fail"


def test_a_result_that_holds_itself_is_refused(any_sandbox: Sandbox) -> None:
    result = check(any_sandbox, asserts("assert f() is None"), "def f():\n    x = []\n    x.append(x)\n    return x")
    assert result.status == "fail"
    assert "one that holds itself" in result.detail


@pytest.mark.parametrize("tests", [(), ("assert (",)])
def test_tasks_that_cannot_be_tested(tests: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="task 1"):
        job_of(asserts(*tests))


def test_the_program_is_never_told_the_tests(any_sandbox: Sandbox) -> None:
    program = "import sys\ndef f(x): return [x, sys.argv, 'expected' in open('/proc/self/cmdline').read()]"
    task = asserts("assert f(1) == [1, ['-c'], False], 'expected'")
    assert check(any_sandbox, task, program) == Result("pass")


def test_a_setup_that_lacks_a_module_is_no_failure_of_the_program(any_sandbox: Sandbox) -> None:
    task = asserts("assert f() == 1", setup="import nosuchmodule")
    with pytest.raises(ValueError, match="the tests of task 1 import nosuchmodule, and sandboxes have"):
        check(any_sandbox, task, "def f(): return 1")
    hidden = asserts("assert f() == 1", setup="__import__('nosuchmodule')")
    with pytest.raises(SandboxError, match="No module named 'nosuchmodule', and sandboxes have the standard library"):
        check(any_sandbox, hidden, "def f(): return 1")
    blamed = asserts("assert f() == 1", setup="f()")
    assert check(any_sandbox, blamed, "def f(): raise ImportError('not here')").status == "fail"


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


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("def f(): return 1", "pass"),
        ("def f(): return 2", "fail"),
        ("import sys\ndef f(): sys.exit(0)", "fail"),
        ("def f(): raise SystemExit(False)", "fail"),
        ("import sys\nsys.exit(0)", "fail"),
    ],
)
def test_unittest_main_ends_tests_that_passed(any_sandbox: Sandbox, program: str, status: str) -> None:
    case = "class Case(unittest.TestCase):\n    def test(self): self.assertEqual(f(), 1)\nunittest.main()"
    assert check(any_sandbox, asserts(case, setup="import unittest"), program).status == status
    after = asserts(case, "assert f() == 1", "assert f() == 3", setup="import unittest")
    assert check(any_sandbox, after, program).status == "fail", "what follows is run too"


@pytest.mark.parametrize(
    "run",
    [
        "unittest.main(exit=False)",
        "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Case))",
    ],
)
@pytest.mark.parametrize(
    ("test", "passes"),
    [
        ("self.assertEqual(f(), 1)", True),
        ("self.assertEqual(f(), 2)", False),
        ("self.skipTest(str(f()))", False),
        ("with self.subTest(): self.skipTest('one')\n        with self.subTest(): self.skipTest('two')", True),
    ],
)
def test_a_run_of_unittest_that_nothing_looks_at_must_pass(
    any_sandbox: Sandbox, run: str, test: str, passes: bool
) -> None:
    case = f"class Case(unittest.TestCase):\n    def test(self):\n        {test}\n{run}"
    status = check(any_sandbox, asserts(case, setup="import unittest"), "def f(): return 1").status
    assert status == ("pass" if passes else "fail")


@pytest.mark.parametrize(
    "tests",
    [
        "class Case(unittest.TestCase):\n    def check(self): self.assertEqual(f(), 1)\nunittest.main()",
        "class Case(unittest.TestCase):\n    def test(self): self.skipTest(str(f()))\nunittest.main()",
        "import sys\nf()\nsys.exit(0)",
        "import sys\nsys.exit(f())",
    ],
)
def test_an_exit_without_tests_that_passed_fails(any_sandbox: Sandbox, tests: str) -> None:
    assert check(any_sandbox, asserts(tests, setup="import unittest"), "def f(): return 0").status == "fail"
