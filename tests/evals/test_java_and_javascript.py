"""Programs in Java and JavaScript are checked as MBXP checks them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hf_fastdecode.evals.records import Language, Task
from hf_fastdecode.evals.sandbox import Sandbox, SandboxError
from hf_fastdecode.evals.sandbox.launch import children_of
from hf_fastdecode.evals.scoring import LANGUAGES, Result, Runner, java_and_javascript
from hf_fastdecode.evals.scoring.java_and_javascript import Forwarder, JavaRunner
from hf_fastdecode.evals.scoring.runner import BrokenServerError

from ..cases import exhaustive_but
from .example_tasks import java_task, javascript_task, usable_runner

JAVA_DOUBLE = java_task("public static Object twice(int x)", ("Solution.twice(2)", "4"), ("Solution.twice(0)", "0"))
JAVA = "        return 2 * x;\n    }\n}"
JAVA_FAILED = "java.lang.Exception: Exception -- test"


@pytest.fixture(scope="module")
def java(any_sandbox: Sandbox) -> Iterator[Runner]:
    with usable_runner("java", any_sandbox) as found:
        yield found


@pytest.fixture(scope="module")
def node(any_sandbox: Sandbox) -> Iterator[Runner]:
    with usable_runner("javascript", any_sandbox) as found:
        yield found


@pytest.mark.parametrize(
    ("completion", "status", "detail"),
    [
        ("        return x == 0 ? 1 : 2 * x;\n    }\n}", "fail", f"{JAVA_FAILED} case 1 did not pass. x1 = 1"),
        ("        return 2 * y;\n    }\n}", "compile", "line 8: cannot find symbol"),
        ("        return 2 * x;\n    }", "compile", "line "),
        (JAVA + "\nclass Main { }", "compile", "line "),
        ("        return " + "(" * 30000 + "x" + ")" * 30000 + ";\n    }\n}", "compile", "the compiler "),
        ("        throw new RuntimeException(\"no\");\n    }\n}", "fail", "java.lang.IllegalStateException"),
        ("        return twice(x);\n    }\n}", "fail", "java.lang.IllegalStateException"),
        (JAVA[:-1] + "    static { if (true) throw new Error(); }\n}", "fail", "java.lang.Error"),
        ("        for (;;) { }\n    }\n}", "timeout", "used more than 3 s of CPU time"),
        ("        List<int[]> l = new ArrayList<>(); for (;;) l.add(new int[1 << 20]);\n    }\n}", "memory", "java."),
        ("        return \"a\".repeat(3000000);\n    }\n}", "output", ""),
        ("        System.out.println(x); System.err.println(x);\n" + JAVA, "pass", ""),
        (JAVA[:-1] + "    static int twice(long x) { return 0; }\n    static int twice() { return 0; }}", "pass", ""),
        ("        new Thread(() -> { for (;;) { } }).start();\n" + JAVA, "pass", ""),
    ],
)  # fmt: skip
def test_java_statuses(java: Runner, completion: str, status: str, detail: str) -> None:
    result = java.check(JAVA_DOUBLE, completion)
    assert (result.status, result.detail[: len(detail)]) == (status, detail)
    assert java.check(JAVA_DOUBLE, JAVA) == Result("pass")  # the next program is not affected


JAVA_FORGED = """
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
        f"        {JAVA_FORGED} return 0;\n    }}\n}}",
        f"        return 0;\n    }}\n    static {{ {JAVA_FORGED} }}\n}}",
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
def test_java_cheating_gains_nothing(java: Runner, completion: str) -> None:
    assert java.check(JAVA_DOUBLE, completion).status in ("fail", "timeout")
    assert java.check(JAVA_DOUBLE, JAVA) == Result("pass")


def test_a_compiler_that_ends_is_no_program_that_does_not_compile(any_sandbox: Sandbox) -> None:
    with usable_runner("java", any_sandbox) as java:
        assert isinstance(java, JavaRunner)
        assert java.check(JAVA_DOUBLE, JAVA) == Result("pass")
        os.kill(_last_descendant(java), signal.SIGKILL)  # as the system does when memory is short
        with pytest.raises(BrokenServerError, match="the compiler ended with exit code 137") as error:
            java.check(JAVA_DOUBLE, JAVA)
        assert error.value.result.load
        assert java.check(JAVA_DOUBLE, JAVA) == Result("pass")


def test_a_compiler_that_does_not_end_is_a_timeout(any_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_and_javascript, "_COMPILE_SECONDS", 0.1)
    monkeypatch.setattr(java_and_javascript, "_OPTIONS", (*java_and_javascript._OPTIONS, "-Xint"))
    with usable_runner("java", any_sandbox) as java:
        result = java.check(JAVA_DOUBLE, JAVA)
    assert result == Result("timeout", "the compiler used more than 0.1 s of CPU time")


def _last_descendant(java: JavaRunner) -> int:
    assert java._server is not None
    pid = java._server.process.pid
    while children := children_of(pid):
        pid = children[0]
    return pid


JAVA_VALUES = [
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


@pytest.mark.parametrize(("declared", "value"), exhaustive_but(JAVA_VALUES[::3], JAVA_VALUES))
def test_java_values_cross_as_they_are(java: Runner, declared: str, value: str) -> None:
    task = java_task(f"public static {declared} same({declared} a)", (f"Solution.same({value})", value))
    assert java.check(task, "        return a;\n    }\n}") == Result("pass")


def test_java_kinds_stay_apart(java: Runner) -> None:
    told = "        return a.getClass().getSimpleName();\n    }\n}"
    for value, expected in (
        ("Arrays.asList(1)", "ArrayList"),
        ("new LinkedList<>(List.of(1))", "LinkedList"),
        ("new HashMap<>() {{ put(1, 2); }}", "HashMap"),
        ("new TreeSet<>(List.of(1))", "TreeSet"),
        ("1L", "Long"),
    ):
        task = java_task("public static String kind(Object a)", (f"Solution.kind({value})", f'"{expected}"'))
        assert java.check(task, told) == Result("pass")
    for value, other in (("1", "1L"), ("1", "1.0"), ("List.of(1)", "Set.of(1)"), ("new int[] {1}", "List.of(1)")):
        task = java_task("public static Object same(Object a)", ("Solution.same(1)", other))
        assert java.check(task, f"        return {value};\n    }}\n}}").status == "fail"


def test_lists_of_tests_are_as_fixed_as_they_were(java: Runner) -> None:
    task = java_task(
        "public static List<Integer> grow(List<Integer> a)", ("Solution.grow(Arrays.asList(1))", "List.of(1, 2)")
    )
    result = java.check(task, "        a.add(2);\n        return a;\n    }\n}")
    assert (result.status, result.detail) == (
        "fail",
        "java.lang.IllegalStateException: java.lang.UnsupportedOperationException",
    )


def test_literals_are_the_same_object(java: Runner) -> None:
    task = java_task("public static boolean is(String a)", ('Solution.is("a")', "true"))
    assert java.check(task, '        return a == "a";\n    }\n}') == Result("pass")


def test_the_forwarder_reads_signatures() -> None:
    stem = "import a.B;\n/** class No { static int f(int x) { */\nclass A {\n    public static "
    found = Forwarder.of_stem(
        stem + "Map<String, List<Integer>> f(final List<Map<String, Integer>> a, java.util.Set<Long> b, int c) {\n"
    )
    assert (found.holder, found.name, found.types) == ("A", "f", ("List", "Set", "int"))
    assert "return (Map<String, List<Integer>>) evals.Server.call(new Object[] {a, b, c});" in found.source
    assert Forwarder.of_stem("class A { static int f() {").types == ()
    with pytest.raises(ValueError, match=r"must end with the signature of a static method, got 'class A \{'"):
        Forwarder.of_stem("class A {")


NODE_DOUBLE = javascript_task("twice(x)", ("twice(2)", "4"), ("twice([3])", "[6]"), ("twice(0)", "0"))
NODE = "  return Array.isArray(x) ? x.map(y => 2 * y) : 2 * x;\n}"


@pytest.mark.parametrize(
    ("completion", "status", "detail"),
    [
        ("  return 2 * x;\n}", "fail", "Error at 2th assert statement. Value = undefined"),
        ("  return 2 * ;\n}", "compile", "SyntaxError: "),
        ("  return 2 * x;", "compile", "SyntaxError: "),
        ("", "compile", "SyntaxError: "),
        ("  return y;\n}", "fail", "Error: ReferenceError: y is not defined"),
        ("  return twice(x);\n}", "fail", "Error: RangeError: Maximum call stack size exceeded"),
        (NODE + "\nthrow new Error('no');", "fail", "Error: no"),
        ("  for (;;) { }\n}", "timeout", "used more than 3 s of CPU time"),
        ("  const a = []; for (;;) a.push(new Array(1e5).fill(0.5));\n}", "memory", ""),
        ("  return new Array(3e6).fill(1);\n}", "output", ""),
        ("  for (;;) require('fs').writeSync(4, 'x'.repeat(1e5));\n}", "output", ""),
        ("  for (;;) require('fs').writeSync(1, 'x'.repeat(1e5));\n}", "output", ""),
        (NODE.replace("return", "console.log(x); require('fs').readFileSync(0); return"), "pass", ""),
        (NODE + "\nfunction compare() { return true; }\nconst _ = 1;", "pass", ""),
    ],
)
def test_javascript_statuses(node: Runner, completion: str, status: str, detail: str) -> None:
    result = node.check(NODE_DOUBLE, completion)
    assert (result.status, result.detail[: len(detail)]) == (status, detail)
    assert node.check(NODE_DOUBLE, NODE) == Result("pass")  # the next program is not affected


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
def test_javascript_cheating_gains_nothing(node: Runner, completion: str) -> None:
    assert node.check(NODE_DOUBLE, completion).status in ("fail", "output", "timeout")
    assert node.check(NODE_DOUBLE, NODE) == Result("pass")


NODE_VALUES = (
    "0 -0 1.5 -1e300 NaN Infinity -Infinity 'é\\ud800' '' true false null undefined 12345678901234567890n [] [[1],[]] "
    "[undefined,null] {} {a:{b:[1]}} {'__proto__':1,'constructor':2} ({['__proto__']:1}) new(Map)([[[1],{a:2}]]) "
    "new(Set)([[1],'a']) new(Date)(5) new(Date)(NaN)"
).split()


@pytest.mark.parametrize("value", exhaustive_but(NODE_VALUES[::3], NODE_VALUES))
def test_javascript_values_cross_as_they_are(node: Runner, value: str) -> None:
    task = javascript_task("same(a)", (f"same({value})", value))
    assert node.check(task, "  return a;\n}") == Result("pass")
    assert node.check(task, "  return 'other';\n}").status == "fail"


def test_javascript_kinds_stay_apart(node: Runner) -> None:
    """A program gets the values of the tests, and lodash compares its results."""
    told = "  return [typeof a, Array.isArray(a), a instanceof Map, a instanceof Set, Object.is(a, -0)].join();\n}"
    for value, expected in (
        ("-0", "'number,false,false,false,true'"),
        ("[]", "'object,true,false,false,false'"),
        ("new Map()", "'object,false,true,false,false'"),
        ("new Set()", "'object,false,false,true,false'"),
    ):
        assert node.check(javascript_task("kind(a)", (f"kind({value})", expected)), told) == Result("pass")
    for value, other in (("'1'", "1"), ("[1]", "{0: 1}"), ("new Set([1])", "[1]"), ("null", "undefined"), ("1n", "1")):
        task = javascript_task("same(a)", ("same(1)", other))
        assert node.check(task, f"  return {value};\n}}").status == "fail"


def test_programs_may_keep_a_state_and_use_the_tests_names(node: Runner) -> None:
    task = javascript_task("next()", ("next()", "1"), ("next()", "2"))
    assert node.check(task, "  return ++count;\n}\nlet count = 0;") == Result("pass")
    task = javascript_task("same(a, b)", ("same([1], [1])", "true"))
    assert node.check(task, "  return compare(a, b) && _.isEqual(a, b);\n}") == Result("pass")


@pytest.mark.parametrize(
    ("language", "task", "right"), [("java", JAVA_DOUBLE, JAVA), ("javascript", NODE_DOUBLE, NODE)]
)
def test_each_sandbox(sandbox: Sandbox, language: Language, task: Task, right: str) -> None:
    with usable_runner(language, sandbox) as found:
        assert found.check(task, right) == Result("pass")
        assert found.check(task, right.replace("2", "3")).status == "fail"


@pytest.mark.parametrize(
    ("language", "task", "right", "refused", "tests", "message"),
    [
        (
            *("java", JAVA_DOUBLE, JAVA),
            [({"stem": "class A {"}, "a stem in Java must end with the signature of a static method")],
            *("class Other { }", r"java.lang.ClassNotFoundException: Main"),
        ),
        (
            *("javascript", NODE_DOUBLE, NODE),
            [
                ({"tests": ("// later",)}, "the tests of task MBJSP/1 never call twice"),
                ({"entry_point": ""}, "task MBJSP/1 must name the function under test, got ''"),
            ],
            *("if (twice", "SyntaxError"),
        ),
    ],
    ids=["java", "javascript"],
)
def test_tasks_that_cannot_be_run(
    any_sandbox: Sandbox, language: Language, task: Task, right: str, refused: list, tests: str, message: str
) -> None:
    check_task = LANGUAGES[language].check_task
    check_task(task)
    none = f"task {task.task_id} has no tests; every program would pass"
    with usable_runner(language, any_sandbox) as runner:
        for change, said in ({"tests": ()}, none), ({"tests": ("", " \n")}, none), *refused:
            with pytest.raises(ValueError, match=said):
                check_task(replace(task, **change))
            with pytest.raises(ValueError, match=said):
                runner.check(replace(task, **change), right)
        with pytest.raises(SandboxError, match=f"the tests cannot be run: {message}"):
            runner.check(replace(task, tests=(tests,)), right)
        assert runner.check(task, right) == Result("pass")


@pytest.mark.parametrize(
    ("language", "message"),
    [
        ("java", "Java programs need java and javac; install a JDK of version 11 or later (apt install default-jdk)"),
        ("javascript", "JavaScript programs need node; install it (apt install nodejs)"),
    ],
)
def test_without_a_toolchain(monkeypatch: pytest.MonkeyPatch, language: Language, message: str) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert LANGUAGES[language].missing() == message
