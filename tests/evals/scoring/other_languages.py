"""What the tests of Java and JavaScript share: a task in MBXP's form each, and a runner for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hf_fastdecode.evals.records import Language, Task
from hf_fastdecode.evals.sandbox import Limits, Sandbox
from hf_fastdecode.evals.scoring import LANGUAGES, Runner

LIMITS = Limits(cpu_seconds=3.0, wall_seconds=10.0, memory_bytes=1 << 30, output_bytes=1 << 20)

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
    with LANGUAGES[language].runner(sandbox, LIMITS) as runner:
        yield runner
