"""Small tasks in three languages, made for the tests."""

from __future__ import annotations

from hf_fastdecode.evals.records import Task

PYTHON = Task(
    task_id="MBPP/3",
    language="python",
    description="Write a function to double a number.",
    stem='def double(x):\n    """\n    Write a function to double a number.\n    """\n',
    tests=("def check(candidate):\n    assert candidate(2) == 4\n",),
    entry_point="double",
    reference="    return 2 * x\n",
)
JAVA = Task(
    task_id="MBJP/3",
    language="java",
    description="Write a function to double a number.",
    stem="import java.util.*;\n\nclass Double2 {\n    /** {@code 2 * x} */\n    public static int twice(int x) {\n",
    tests=("class Main { }",),
    entry_point="twice",
    reference="        return 2 * x;\n    }\n}",
)
JAVASCRIPT = Task(
    task_id="MBJSP/3",
    language="javascript",
    description="Write a function to double a number.",
    stem="/** twice: { */\nfunction twice(x) {\n",
    tests=("if (twice(2) !== 4) { throw 'no' }",),
    entry_point="twice",
    reference="  return 2 * x;\n}",
)
MBPP = Task(
    task_id="11",
    language="python",
    description="Write a function to double a number.",
    stem="",
    tests=("assert double(2) == 4", "assert double(0) == 0"),
    reference="def double(x):\n    return 2 * x",
)
