"""Python tasks that run unittest or exit: only tests that passed are a pass."""

from __future__ import annotations

import pytest

from hf_fastdecode.evals.sandbox import Sandbox

from .python_tasks import asserts, check


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
