"""Tests that use objects of the program: as in one process, or said to be unjudged, and never passed by a lie."""

from __future__ import annotations

import pytest

from hf_fastdecode.evals.sandbox import Sandbox
from hf_fastdecode.evals.scoring import Result

from .example_tasks import asserts, check

V = "class V:\n    def __init__(self, x=0): self.x = x\n"
ADDS = V + "    def __add__(self, o): return V(self.x + o.x)\n"
ENDS = "class C:\n    def __enter__(self): return 4\n    def __exit__(self, *a): {}\n"

RIGHT = {
    "date": (
        "from datetime import *\ndef f(): return date(2020, 1, 2)",
        "import datetime\nassert f() == datetime.date(2020, 1, 2)",
    ),
    "time": (
        "import datetime as d\ndef f(x): return x.astimezone(d.timezone.utc) + d.timedelta(1)",
        "from datetime import *\nx = datetime(2020, 1, 2, 3, tzinfo=timezone(timedelta(hours=1)))\n"
        "assert f(x) == datetime(2020, 1, 3, 2, tzinfo=timezone.utc) and isinstance(f(x), datetime)",
    ),
    "uuid": ("import uuid\ndef f(): return uuid.UUID(int=3)", "import uuid\nassert f() == uuid.UUID(int=3)"),
    "slice": ("class S:\n    def __getitem__(self, i): return 'abc'[i]", "assert S()[1:] == 'bc'"),
    "operators": (ADDS, "assert (V(1) + V(2)).x == 3"),
    "in place": (V + "    def __iadd__(self, o): self.x += o.x; return self", "v = V(1)\nv += V(2)\nassert v.x == 3"),
    "order": (
        V + "    def __lt__(self, o): return self.x < o.x",
        "assert sorted([V(3), V(1)])[0].x == 1 and V(1) < V(3)",
    ),
    "equality": (
        V + "    def __eq__(self, o): return self.x == o.x\n    def __hash__(self): return 1",
        "assert V(1) == V(1) and V(1) != V(2) and len({V(1), V(1)}) == 1 and V(2) in [V(1), V(2)]",
    ),
    "data class": (
        "from dataclasses import dataclass\n@dataclass(order=True)\nclass D:\n    x: int",
        "assert D(1) == D(1) != D(2) > D(1) and D(1) != 1 and not D(1) == (1,) and repr(D(1)) == 'D(x=1)'",
    ),
    "length": (
        V + "    def __len__(self): return 3\n    def __iter__(self): return iter('ab')",
        "assert len(V()) == 3 and [*V()] == ['a', 'b']",
    ),
    "isinstance": (
        V + "class W(V): pass",
        "assert isinstance(W(), V) and issubclass(W, V) and not isinstance(V(), W) and not isinstance(3, V)",
    ),
    "type": (V, "assert type(V()) == V and type(V()).__name__ == 'V' and V.__name__ == 'V'"),
    "attributes": (V, "v = V(2)\nv.y = 3\ndel v.x\nassert v.__dict__ == {'y': 3} == vars(v) and not hasattr(v, 'x')"),
    "named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert f().x == 1 and f() == (1, 2) and f()._replace(x=3) == (3, 2) and P(3, y=4).y == 4",
    ),
    "enum": (
        "import enum\nclass Color(enum.Enum):\n    RED = 1\ndef f(): return Color.RED",
        "assert f() is Color.RED and f() == Color.RED and f().name == 'RED' and [c.value for c in Color] == [1]",
    ),
    "exception": (
        "class E(ValueError):\n    def __init__(self, code): super().__init__('no'); self.code = code\n"
        "def f(): raise E(5)",
        "try:\n    f()\n    assert False\nexcept E as e:\n    assert (e.code, e.args, str(e)) == (5, ('no',), 'no')",
    ),
    "class of exceptions": (
        "class Base(Exception): pass\nclass E(Base, KeyError): pass\ndef f(): raise E('k')",
        "for kind in (E, Base, KeyError):\n    try:\n        f()\n        assert False\n"
        "    except kind as e:\n        assert isinstance(e, E)",
    ),
    "exception's arguments": (
        "def f(): raise KeyError('k', 1)",
        "try:\n    f()\nexcept KeyError as e:\n    assert e.args == ('k', 1)",
    ),
    "exception's own text": (
        "class E(Exception):\n    def __str__(self): return f'code {self.args[0]}'\n"
        "def f(kind): return kind.__name__\ndef g(): raise E(3)",
        "assert f(E) == 'E'\ntry:\n    g()\n    assert False\nexcept E as e:\n    assert str(e) == 'code 3'",
    ),
    "exception of a library": (
        "import json\ndef f(): json.loads('{')",
        "import json\ntry:\n    f()\n    assert False\nexcept json.JSONDecodeError as e:\n    assert e.pos == 1",
    ),
    "coroutine": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x",
        "import asyncio\nasync def all(): return await asyncio.gather(f(1), f(2)), await f(3)\n"
        "assert asyncio.run(all()) == ([1, 2], 3)",
    ),
    "generic class": (
        "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass S(Generic[T]): 'A stack.'",
        "assert isinstance(S[int](), S) and S.__doc__ == S[str]().__doc__ == 'A stack.'",
    ),
    "threads": (
        V + "    def add(self): self.x += 1",
        "import threading\nv = V()\nthreads = [threading.Thread(target=v.add) for _ in range(4)]\n"
        "for one in threads: one.start()\nfor one in threads: one.join()\nassert v.x == 4",
    ),
    "end of a generator": (
        "def f():\n    x = yield 1\n    return x",
        "g = f()\nnext(g)\ntry:\n    g.send(5)\n    assert False\nexcept StopIteration as e:\n    assert e.value == 5",
    ),
    "iterator of coroutines": (
        "async def f():\n    yield 1\n    yield 2",
        "import asyncio\nasync def g(): return [x async for x in f()]\nassert asyncio.run(g()) == [1, 2]",
    ),
    "variable": (
        "count, seen = 0, []\ndef f():\n    global count\n    count += 1\n    seen.append(count)",
        "f()\nassert count == 1 and seen == [1]",
    ),
    "same object": (
        "def f(a, b):\n    a.append(1)\n    return [b, a]",
        "a, b = [], {}\nx, y = f(a, b)\nassert x is b and y is a and a == [1]",
    ),
    "sorted lists": (
        "def f(x):\n    x.sort()\n    x[0].append(3)\n    return x[:1]",
        "a, b = [2], [1]\nx = [a, b]\nassert f(x)[0] is b and x == [[1, 3], [2]] and x[1] is a and b == [1, 3]",
    ),
    "a list that holds itself": ("def f(x): x.append(x)", "x = []\nf(x)\nassert x[0] is x"),
    "a returned list that holds itself": (
        "def f(x):\n    x.append(x)\n    return x",
        "x = []\nassert f(x) is x and x[0] is x",
    ),
    "a sorted variable": ("xs = [[2], [1]]\ndef f(): xs.sort()", "a = xs\nf()\nassert a == [[1], [2]]"),
    "context": (ENDS.format("self.done = True"), "c = C()\nwith c as x:\n    assert x == 4\nassert c.done"),
    "context of a generator": (
        "import contextlib\n@contextlib.contextmanager\ndef f(x):\n    x.append(1)\n    yield 2\n",
        "with f([]) as x:\n    assert x == 2",
    ),
    "printed": (
        "def f(): print('hi')",
        "import contextlib, io\nb = io.StringIO()\nwith contextlib.redirect_stdout(b): f()\n"
        "assert b.getvalue() == 'hi\\n'",
    ),
}


@pytest.mark.parametrize(("program", "test"), RIGHT.values(), ids=RIGHT)
def test_right_programs_pass_as_in_one_process(any_sandbox: Sandbox, program: str, test: str) -> None:
    exec(f"{program}\n{test}", {"__name__": "__main__"})
    assert check(any_sandbox, asserts(test), program) == Result("pass")


WRONG = {
    "operator": (ADDS.replace("+ o", "- o"), "assert (V(1) + V(2)).x == 3"),
    "no operator": (V, "assert (V(1) + V(2)).x == 3"),
    "date": (
        "import datetime\ndef f(): return datetime.date(2020, 1, 3)",
        "import datetime\nassert f() == datetime.date(2020, 1, 2)",
    ),
    "data class": ("from dataclasses import dataclass\n@dataclass\nclass D:\n    x: int", "assert D(1) == (1,)"),
    "generator": ("def f(): return (x for x in [1])", "assert f() == [1]"),
    "exception": ("class E(Exception): pass\ndef f(): raise ValueError", "try:\n    f()\nexcept E: pass"),
    "method": ("def f(x): return x.copy", "assert f([1]) == [1]"),
    "attribute named like a builtin": (V + "    id = 3", "assert V().id == 4"),
    "default argument": (
        "def f(x, found=[]):\n    found.append(x)\n    return found",
        "assert f(1) == [1]\nassert f(2) == [2]",
    ),
    "changed argument": ("def f(x):\n    x.clear()\n    return x", "x = [1]\nassert f(x) == [1]"),
}


@pytest.mark.parametrize(("program", "test"), WRONG.values(), ids=WRONG)
def test_wrong_programs_fail(any_sandbox: Sandbox, program: str, test: str) -> None:
    assert check(any_sandbox, asserts(test), program).status == "fail"


NEEDS_ONE_PROCESS = {
    "equals a number": (V + "    def __eq__(self, o): return self.x == o", "assert V(3) == 3"),
    "operator with a number": (V + "    def __mul__(self, k): return V(self.x * k)", "assert (V(3) * 2).x == 6"),
    "methods of a list": ("class S(list):\n    def top(self): return self[-1]", "s = S([1, 2])\nassert s.top() == 2"),
    "a function of the tests": ("def f(g): return g(3)", "assert f(lambda x: x + 1) == 4"),
    "a changed attribute": (V + "    y = []\n", "v = V()\nv.y.append(1)\nassert v.y == [1]"),
    "a returned list": ("d = []\ndef f(): return d\ndef g(): d.append(1)", "x = f()\ng()\nassert x == [1]"),
    "a kept argument": (
        "class A:\n    def __init__(self, x): self.x = x\n    def add(self, y): self.x.append(y)",
        "x = []\na = A(x)\na.add(1)\nassert x == [1]",
    ),
    "input": ("def f(): return input()", "import io, sys\nsys.stdin = io.StringIO('a')\nassert f() == 'a'"),
    "type": (V, "assert type(V()) is V"),
    "object of a library": (
        "from array import array\ndef f(): return array('i', [1])",
        "from array import array\nassert f() == array('i', [1])",
    ),
    "fold": (
        "import datetime\ndef f(): return datetime.datetime(2020, 1, 1, fold=1)",
        "import datetime\nassert f() == datetime.datetime(2020, 1, 1) and f().fold == 1",
    ),
    "identity": ("import functools\n@functools.cache\ndef f(x): return [x]", "assert f(1) is f(1)"),
    "exception of the tests": (
        "class E(Exception):\n    def __init__(self, code): self.code = code",
        "assert E(3).code == 3",
    ),
    "cause": (
        "def f():\n    try: 1 / 0\n    except ArithmeticError as e: raise ValueError from e",
        "try:\n    f()\nexcept ValueError as e:\n    assert isinstance(e.__cause__, ArithmeticError)",
    ),
    "coroutines at once": (
        "import asyncio\nasync def f(order):\n    order.append(1)\n    await asyncio.sleep(0)\n    order.append(2)",
        "import asyncio\norder = []\nasync def all(): await asyncio.gather(f(order), f(order))\n"
        "asyncio.run(all())\nassert order == [1, 1, 2, 2]",
    ),
    "copy": (V, "import copy\nassert copy.copy(V(3)).x == 3"),
    "suppresses": (ENDS.format("return True"), "with C():\n    raise ValueError"),
    "subclass": (V, "class W(V): pass\nassert W(3).x == 3"),
}


@pytest.mark.parametrize(("program", "test"), NEEDS_ONE_PROCESS.values(), ids=NEEDS_ONE_PROCESS)
def test_what_needs_one_process_is_unjudged(any_sandbox: Sandbox, program: str, test: str) -> None:
    exec(f"{program}\n{test}", {"__name__": "__main__"})
    result = check(any_sandbox, asserts(test), program)
    assert (result.status, result.detail[:17]) == ("unjudged", "cannot be judged:"), result


_ALL = "".join(
    f"    def __{name}__(self, *a): return {value}\n"
    for value, names in {
        "True": "eq ne lt le gt ge contains instancecheck subclasscheck exit bool",
        "0": "sub rsub mod rmod hash abs round and rand xor rxor floordiv",
        "None": "init",
        "self": "enter add radd call getitem iter getattr",
    }.items()
    for name in names.split()
)
LIAR = f"class L:\n{_ALL}    def stop(self): raise StopIteration\nclass f(L): pass\n"

LIES = {
    "equal": "assert f(1) == 3",
    "equal from the right": "assert 3 == f(1)",
    "equal and not": "assert f(1) == f(2) and f(1) != f(3)",
    "difference": "assert abs(f(1) - 3.5) < 1e-6",
    "difference from the right": "assert abs(3.5 - f(1)) < 1e-6",
    "remainder": "assert f(1) % 7 == 0",
    "order": "assert f(1) < 3",
    "order from the right": "assert 3 < f(1)",
    "in": "assert 3 in f(1)",
    "in a set": "assert f(1) in {0, 3}",
    "in a list": "assert f(1) in [0, 3]",
    "index": "assert [2, 3].index(f(1)) == 0",
    "with": "with f(1):\n    assert False",
    "with a call": "with f(1) as x:\n    assert x.missing(3) == 3",
    "caught": "try:\n    right = f(1) == 3\nexcept:\n    right = True\nassert right",
    "end of an iteration": "assert all(map(lambda x: f(x).stop() == 3, [1]))",
    "caught exit": "try:\n    with f(1):\n        assert False\nexcept BaseException:\n    pass",
}


@pytest.mark.parametrize("test", LIES.values(), ids=LIES)
def test_objects_that_lie_pass_nothing(any_sandbox: Sandbox, test: str) -> None:
    exec(f"{LIAR}{test}", {"__name__": "__main__"})  # in one process they pass
    assert check(any_sandbox, asserts(test), LIAR).status in ("unjudged", "fail")


@pytest.mark.parametrize(
    "kind",
    [
        "E = AssertionError",
        "E = Exception",
        "E = BaseException",
        "E = (ValueError, Exception)",
        "E = [Exception][0]",
        "class M(type): __subclasscheck__ = __instancecheck__ = lambda *a: True\n"
        "class E(Exception, metaclass=M): pass",
        "class E(AssertionError): __module__, __qualname__ = 'builtins', 'AssertionError'",
        "class E(Exception): __module__, __qualname__ = 'builtins', 'Exception'",
        "class E(Exception): __module__, __qualname__ = 'unittest.case', 'SkipTest'",
    ],
)
def test_a_class_of_exceptions_never_catches_failures_of_the_tests(any_sandbox: Sandbox, kind: str) -> None:
    test = "try:\n    f()\n    assert False\nexcept E:\n    pass"
    assert check(any_sandbox, asserts(test), f"{kind}\ndef f(): pass").status == "fail"


def test_a_program_cannot_skip_tests(any_sandbox: Sandbox) -> None:
    test = (
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 1)\n"
        "    def test_b(self): self.assertEqual(f(2), 5)\nunittest.main()"
    )
    for program in (
        "import unittest\ndef f(x):\n    if x == 2: raise unittest.SkipTest\n    return x",
        "class S(Exception): __module__, __qualname__ = 'unittest.case', 'SkipTest'\n"
        "def f(x):\n    if x == 2: raise S\n    return x",
    ):
        assert check(any_sandbox, asserts(test), program).status == "fail"


def test_variables_of_the_tests_are_theirs(any_sandbox: Sandbox) -> None:
    program = "wrong = 0\ndef f(x):\n    global wrong\n    wrong = 0\n    return 0"
    test = "wrong = 0\nfor x in (1, 2):\n    if f(x) != x: wrong += 1\n    f(x)\nassert wrong == 0"
    assert check(any_sandbox, asserts(test), program).status == "fail"


@pytest.mark.parametrize(("kind", "end"), [("", "exit"), ("async ", "aexit")])
def test_a_program_replaces_no_failure_of_the_tests(any_sandbox: Sandbox, kind: str, end: str) -> None:
    enter = end.replace("exit", "enter")
    program = (
        f"class C:\n    {kind}def __{enter}__(self): pass\n"
        f"    {kind}def __{end}__(self, *a): raise ValueError\ndef f(x): return 0"
    )
    test = f"import asyncio\nasync def g():\n    {kind}with C():\n        assert f(1) == 3\n        raise ValueError\n"
    test += "try:\n    asyncio.run(g())\nexcept ValueError: pass"
    exec(f"{program}\n{test}", {"__name__": "__main__"})  # in one process it passes
    assert check(any_sandbox, asserts(test), program).status == "unjudged"


@pytest.mark.parametrize(
    ("setup", "own"),
    [
        ("from math import *", ""),
        ("", "try:\n    from math import isclose\nexcept ImportError: pass\n"),
        ("", "if True:\n    def isclose(a, b): return abs(a - b) < 1e-6\n"),
    ],
)
def test_a_program_changes_no_name_that_the_tests_bind(any_sandbox: Sandbox, setup: str, own: str) -> None:
    program = (
        "import sys\nservice = sys.modules['hf_fastdecode_scoring.candidate']._Service\n"
        "service.changed_names = lambda self: ['isclose', self.dumps(lambda *a: True)]\ndef f(x): return 0"
    )
    test = f"{own}f(1)\nassert isclose(f(1), 3)"
    assert check(any_sandbox, asserts(test, setup=setup), program).status == "fail"
