"""Java programs: verdicts, values that cross between processes, and programs that cheat."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hf_fastdecode.evals.sandbox import Sandbox, SandboxError
from hf_fastdecode.evals.sandbox.launch import children_of
from hf_fastdecode.evals.scoring import LANGUAGES, Result, Runner
from hf_fastdecode.evals.scoring import java as java_runner
from hf_fastdecode.evals.scoring.java_and_javascript import JavaRunner, StandIn
from hf_fastdecode.evals.scoring.runner import BrokenServerError

from ...cases import exhaustive_but
from .other_languages import java_task, usable_runner

DOUBLE = java_task("public static Object twice(int x)", ("Solution.twice(2)", "4"), ("Solution.twice(0)", "0"))
RIGHT = "        return 2 * x;\n    }\n}"


@pytest.fixture(scope="module")
def runner(any_sandbox: Sandbox) -> Iterator[Runner]:
    with usable_runner("java", any_sandbox) as found:
        yield found


def test_right_and_wrong(runner: Runner) -> None:
    assert runner.check(DOUBLE, RIGHT) == Result("pass")
    wrong = "java.lang.Exception: Exception -- test case 1 did not pass. x1 = 1"
    assert runner.check(DOUBLE, "        return x == 0 ? 1 : 2 * x;\n    }\n}") == Result("fail", wrong)


def test_each_sandbox(sandbox: Sandbox) -> None:
    with usable_runner("java", sandbox) as found:
        assert found.check(DOUBLE, RIGHT) == Result("pass")
        assert found.check(DOUBLE, RIGHT.replace("2", "3")).status == "fail"


@pytest.mark.parametrize(
    ("completion", "status", "detail"),
    [
        ("        return 2 * y;\n    }\n}", "compile", "line 8: cannot find symbol"),
        ("        return 2 * x;\n    }", "compile", "line "),
        (RIGHT + "\nclass Main { }", "compile", "line "),
        ("        return " + "(" * 30000 + "x" + ")" * 30000 + ";\n    }\n}", "compile", "the compiler "),
        ("        throw new RuntimeException(\"no\");\n    }\n}", "fail", "java.lang.IllegalStateException"),
        ("        return twice(x);\n    }\n}", "fail", "java.lang.IllegalStateException"),
        (RIGHT[:-1] + "    static { if (true) throw new Error(); }\n}", "fail", "java.lang.Error"),
        ("        for (;;) { }\n    }\n}", "timeout", "used more than 3 s of CPU time"),
        ("        List<int[]> l = new ArrayList<>(); for (;;) l.add(new int[1 << 20]);\n    }\n}", "memory", "java."),
        ("        return \"a\".repeat(3000000);\n    }\n}", "output", ""),
        ("        System.out.println(x); System.err.println(x);\n" + RIGHT, "pass", ""),
        (RIGHT[:-1] + "    static int twice(long x) { return 0; }\n    static int twice() { return 0; }}", "pass", ""),
        ("        new Thread(() -> { for (;;) { } }).start();\n" + RIGHT, "pass", ""),
    ],
)  # fmt: skip
def test_statuses(runner: Runner, completion: str, status: str, detail: str) -> None:
    result = runner.check(DOUBLE, completion)
    assert (result.status, result.detail[: len(detail)]) == (status, detail)
    assert runner.check(DOUBLE, RIGHT) == Result("pass")  # the next program is not affected


FORGED = """
        try (DataOutputStream out = new DataOutputStream(new FileOutputStream(FileDescriptor.out))) {
            out.write(new byte[] {0, 0, 0, 1, 0, 0, 0, 4, 'p', 'a', 's', 's'});
        } catch (IOException error) { }
"""


@pytest.mark.parametrize(
    "completion",
    [
        "        System.exit(0); return 0;\n    }\n}",
        "        return 0;\n    }\n    static { System.exit(0); }\n}",
        "        Runtime.getRuntime().halt(0); return 0;\n    }\n}",
        "        return new Object() { public boolean equals(Object o) { return true; } };\n    }\n}",
        "        return new AbstractList<Object>() { public int size() { return 0; } public Object get(int i) "
        "{ return 4; } public boolean equals(Object o) { return true; } };\n    }\n}",
        "        return new Equal();\n    }\n}\nclass Equal { public boolean equals(Object o) { return true; } }",
        f"        {FORGED} return 0;\n    }}\n}}",
        f"        return 0;\n    }}\n    static {{ {FORGED} }}\n}}",
        # It cannot reach the tests: neither Main nor the class that runs it is in its process.
        "        try { Class.forName(\"Main\").getMethod(\"main\", String[].class); } catch (Exception e) "
        "{ throw new RuntimeException(e); } return 0;\n    }\n}",
        "        try { Class.forName(\"evals.Server\").getMethod(\"call\", Object[].class).invoke(null, (Object) "
        "new Object[0]); } catch (Exception e) { throw new RuntimeException(e); } return 0;\n    }\n}",
        "        try { new FileInputStream(FileDescriptor.in).readAllBytes(); } catch (IOException e) { } "
        "return 0;\n    }\n}",
        "        try { new ProcessBuilder(\"sh\", \"-c\", \"kill -9 -1\").start().waitFor(); } "
        "catch (Exception e) { } return 0;\n    }\n}",
    ],
)  # fmt: skip
def test_cheating_gains_nothing(runner: Runner, completion: str) -> None:
    assert runner.check(DOUBLE, completion).status in ("fail", "timeout")
    assert runner.check(DOUBLE, RIGHT) == Result("pass")


def test_a_compiler_that_ends_is_no_program_that_does_not_compile(any_sandbox: Sandbox) -> None:
    with usable_runner("java", any_sandbox) as runner:
        assert isinstance(runner, JavaRunner)
        assert runner.check(DOUBLE, RIGHT) == Result("pass")
        os.kill(_last_descendant(runner), signal.SIGKILL)  # as the system does when memory is short
        with pytest.raises(BrokenServerError, match="the compiler ended with exit code 137") as error:
            runner.check(DOUBLE, RIGHT)
        assert error.value.result.load
        assert runner.check(DOUBLE, RIGHT) == Result("pass")


def test_a_compiler_that_does_not_end_is_a_timeout(any_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_runner, "_COMPILE_SECONDS", 0.1)
    monkeypatch.setattr(java_runner, "_OPTIONS", (*java_runner._OPTIONS, "-Xint"))
    with usable_runner("java", any_sandbox) as runner:
        result = runner.check(DOUBLE, RIGHT)
    assert result == Result("timeout", "the compiler used more than 0.1 s of CPU time")


def _last_descendant(runner: JavaRunner) -> int:
    assert runner._server is not None
    pid = runner._server.process.pid
    while children := children_of(pid):
        pid = children[0]
    return pid


VALUES = [
    ("int", "-7"),
    ("long", "1L << 40"),
    ("double", "0.1"),
    ("double", "0.0 / 0"),
    ("float", "1.5f"),
    ("short", "(short) 3"),
    ("byte", "(byte) 3"),
    ("char", "'é'"),
    ("boolean", "true"),
    ("String", '"é\\ud800"'),
    ("Object", "null"),
    ("BigInteger", 'new BigInteger("123456789012345678901234567890")'),
    ("BigDecimal", 'new BigDecimal("1.50")'),
    ("Number", "2.5"),
    ("List<List<Integer>>", "Arrays.asList(Arrays.asList(1, 2), Arrays.<Integer>asList())"),
    (
        "HashMap<String, List<Integer>>",
        'new HashMap<String, List<Integer>>(Map.of("a", List.of(1), "b", List.<Integer>of()))',
    ),
    ("HashSet<Object>", "new HashSet<Object>(Arrays.<Object>asList(null, 1, 1L, 1.0, \"1\", '1', true))"),
    ("Map<Integer, Integer>", "new TreeMap<>(Map.of(2, 1, 1, 2))"),
    ("Set<Integer>", "new LinkedHashSet<>(List.of(3, 1, 2))"),
]


@pytest.mark.parametrize(("declared", "value"), exhaustive_but(VALUES[::3], VALUES))
def test_values_cross_as_they_are(runner: Runner, declared: str, value: str) -> None:
    task = java_task(f"public static {declared} same({declared} a)", (f"Solution.same({value})", value))
    assert runner.check(task, "        return a;\n    }\n}") == Result("pass")


def test_kinds_stay_apart(runner: Runner) -> None:
    told = "        return a.getClass().getSimpleName();\n    }\n}"
    for value, expected in (
        ("Arrays.asList(1)", "ArrayList"),
        ("new LinkedList<>(List.of(1))", "LinkedList"),
        ("new HashMap<>() {{ put(1, 2); }}", "HashMap"),
        ("new TreeSet<>(List.of(1))", "TreeSet"),
        ("1L", "Long"),
    ):
        task = java_task("public static String kind(Object a)", (f"Solution.kind({value})", f'"{expected}"'))
        assert runner.check(task, told) == Result("pass")
    for value, other in (("1", "1L"), ("1", "1.0"), ("List.of(1)", "Set.of(1)"), ("new int[] {1}", "List.of(1)")):
        task = java_task("public static Object same(Object a)", ("Solution.same(1)", other))
        assert runner.check(task, f"        return {value};\n    }}\n}}").status == "fail"


def test_lists_of_tests_are_as_fixed_as_they_were(runner: Runner) -> None:
    task = java_task(
        "public static List<Integer> grow(List<Integer> a)", ("Solution.grow(Arrays.asList(1))", "List.of(1, 2)")
    )
    result = runner.check(task, "        a.add(2);\n        return a;\n    }\n}")
    assert (result.status, result.detail) == (
        "fail",
        "java.lang.IllegalStateException: java.lang.UnsupportedOperationException",
    )


def test_literals_are_the_same_object(runner: Runner) -> None:
    task = java_task("public static boolean is(String a)", ('Solution.is("a")', "true"))
    assert runner.check(task, '        return a == "a";\n    }\n}') == Result("pass")


def test_the_stand_in_reads_signatures() -> None:
    stem = "import a.B;\n/** class No { static int f(int x) { */\nclass A {\n    public static "
    found = StandIn.of_stem(
        stem + "Map<String, List<Integer>> f(final List<Map<String, Integer>> a, java.util.Set<Long> b, int c) {\n"
    )
    assert (found.holder, found.name, found.types) == ("A", "f", ("List", "Set", "int"))
    assert "return (Map<String, List<Integer>>) evals.Server.call(new Object[] {a, b, c});" in found.source
    assert StandIn.of_stem("class A { static int f() {").types == ()
    with pytest.raises(ValueError, match=r"must end with the signature of a static method, got 'class A \{'"):
        StandIn.of_stem("class A {")


def test_tasks_that_cannot_be_run(runner: Runner) -> None:
    check_task = LANGUAGES["java"].check_task
    check_task(DOUBLE)
    for task, message in (
        (replace(DOUBLE, tests=()), "task MBJP/1 has no tests; every program would pass"),
        (replace(DOUBLE, tests=("", " \n")), "task MBJP/1 has no tests; every program would pass"),
        (replace(DOUBLE, stem="class A {"), "a stem in Java must end with the signature of a static method"),
    ):
        with pytest.raises(ValueError, match=message):
            check_task(task)
        with pytest.raises(ValueError, match=message):
            runner.check(task, RIGHT)
    with pytest.raises(SandboxError, match=r"the tests cannot be run: java.lang.ClassNotFoundException: Main"):
        runner.check(replace(DOUBLE, tests=("class Other { }",)), RIGHT)
    assert runner.check(DOUBLE, RIGHT) == Result("pass")


def test_without_a_jdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    missing = LANGUAGES["java"].missing()
    assert (
        missing == "Java programs need java and javac; install a JDK of version 11 or later (apt install default-jdk)"
    )
