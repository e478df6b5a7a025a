"""Checking Python programs: verdicts as of one process that runs program, setup and tests in order."""

from __future__ import annotations

import pytest

from hf_fastdecode.evals.sandbox import Sandbox, SandboxError
from hf_fastdecode.evals.scoring import Result
from hf_fastdecode.evals.scoring.python.job import job_of

from .python_tasks import asserts, check

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
