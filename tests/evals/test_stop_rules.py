"""Ends of completions, in whole texts and in growing ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_fastdecode.evals.prompts import BlockEnd, function_end, prompt_format
from hf_fastdecode.evals.records import Language, Task
from hf_fastdecode.evals.stop_rules import BraceEnd, Lexer, StopRule, StopWords, tokens
from hf_fastdecode.evals.tasks import TaskSet

from .example_tasks import CODE, JAVA, JAVASCRIPT, MBPP, PYTHON, pieces


def texts(program: str, language: Language) -> list[str]:
    return [token.text for token in tokens(program, language)]


@pytest.mark.parametrize(
    ("language", "program", "expected"),
    [
        ("python", "a='''x\n}''' # b", ["a", "=", "'''x\n}'''", "# b"]),
        ("python", '\'\' \'\\\'\' """a"b"""', ["''", "'\\''", '"""a"b"""']),
        ("java", 'c = \'{\'; s = "}\\""; // }', ["c", "=", "'{'", ";", "s", "=", '"}\\""', ";", "// }"]),
        ("java", 't = """\n } "x" """;/* { */', ["t", "=", '"""\n } "x" """', ";", "/* { */"]),
        ("javascript", "a = /}[/]{/g.test(b)", ["a", "=", "/}[/]{/g", ".", "test", "(", "b", ")"]),
        ("javascript", "a / b / c", ["a", "/", "b", "/", "c"]),
        ("javascript", "if (a) /}/.test(b)", ["if", "(", "a", ")", "/}/", ".", "test", "(", "b", ")"]),
        ("javascript", "(a) / 2; i++ / 2", ["(", "a", ")", "/", "2", ";", "i", "++", "/", "2"]),
        ("javascript", "`}${ {a: `{`}.a }{`", ["`}${", "{", "a", ":", "`{`", "}", ".", "a", "}{`"]),
        ("javascript", "`\\`\\${$`+''", ["`\\`\\${$`", "+", "''"]),
        ("javascript", "return /a/\n/b/", ["return", "/a/", "/", "b", "/"]),
    ],
)
def test_tokens(language: Language, program: str, expected: list[str]) -> None:
    assert texts(program, language) == expected


def test_a_token_that_may_grow_waits() -> None:
    lexer = Lexer("python")
    assert [token.text for token in lexer.feed("ab")] == []
    assert [token.text for token in lexer.feed("abc ''")] == ["abc"]
    assert [token.text for token in lexer.feed("abc '''x")] == []
    assert [token.text for token in lexer.feed("abc '''x''' ")] == ["'''x'''"]


@pytest.mark.parametrize("language", CODE)
@given(data=st.data())
def test_tokens_of_a_growing_text_are_those_of_the_whole(language: Language, data: st.DataObject) -> None:
    text = data.draw(pieces(language))
    growing = Lexer(language)
    read = [token for end in range(len(text) + 1) for token in growing.feed(text[:end])]
    assert read == list(Lexer(language).feed(text))
    assert all(text[token.start : token.end] == token.text for token in read)


@pytest.mark.parametrize("language", CODE)
@given(data=st.data())
def test_tokens_and_white_space_are_the_text(language: Language, data: st.DataObject) -> None:
    text = data.draw(pieces(language))
    position = 0
    for token in tokens(text, language):
        assert not text[position : token.start].strip()
        position = token.end


Rule = Callable[[], StopRule]
RULES: dict[str, tuple[Task, Rule]] = {
    "mbxp-python": (PYTHON, lambda: function_end(PYTHON)),
    "mbxp-java": (JAVA, lambda: function_end(JAVA)),
    "mbxp-javascript": (JAVASCRIPT, lambda: function_end(JAVASCRIPT)),
    "austin": (MBPP, lambda: StopWords(["[DONE]"], repaired=True)),
    **{
        name: (task, lambda task=task: prompt_format(TaskSet("own", "here", (task,)), "bigcode").stop_rule(task))
        for name, task in (("bigcode", MBPP), ("bigcode-stem", PYTHON))
    },
    "chat-java": (JAVA, lambda: BlockEnd(JAVA)),
    "chat-mbpp": (MBPP, lambda: BlockEnd(MBPP)),
}
STOPS = st.sampled_from(
    ["", "[DONE]", "[DO", "\n```", "\n``", "\nclass", "\nif", "\nprint", '\n"""', "\n<|/", "<file_sep>"]
)


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
def test_more_text_changes_no_finished_completion(name: str, data: st.DataObject) -> None:
    task, new = RULES[name]
    text = "".join(
        data.draw(part) for part in (pieces(task.language), STOPS, pieces(task.language), STOPS, pieces(task.language))
    )
    growing, completion, end = new(), None, None
    for length in range(len(text) + 1):
        assert growing.finished(text[:length]) == new().finished(text[:length])
        if not growing.finished(text[:length]):
            assert completion is None, "a finished text went on"
        elif completion is None:
            completion, end = new().completion(text[:length]), growing.end(text[:length])
    if completion is not None:
        assert new().completion(text) == growing.completion(text) == completion
        assert new().end(text) == growing.end(text) == end


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
def test_kept_is_a_prefix_and_only_closing_braces_are_added(name: str, data: st.DataObject) -> None:
    task, new = RULES[name]
    text = data.draw(pieces(task.language))
    rule = new()
    completion, kept = rule.completion(text), rule.kept(text)
    assert 0 <= kept <= len(text)
    assert completion[:kept] == text[:kept]
    assert set(completion[kept:]) <= set("\n}")


def test_a_rule_serves_another_text_after_one() -> None:
    rule = function_end(JAVASCRIPT)
    assert rule.completion("  return 1;\n}\nfoo()") == "  return 1;\n}"
    assert rule.completion("  return 2;\n}\nfoo()") == "  return 2;\n}"
    assert not rule.finished("  return 3;")
    # A letter of which half the bytes are there is decoded as another letter first.
    assert not rule.finished("  return '\N{REPLACEMENT CHARACTER}")
    assert rule.completion("  return 'é';\n}\nfoo()") == "  return 'é';\n}"


def test_stop_words_end_at_the_first() -> None:
    rule = StopWords(["\nclass", "\ncl", "[DONE]"])
    assert rule.completion("a [DONE]\nclass b") == "a "
    assert rule.completion("a \nclass b [DONE]") == "a "
    assert StopWords(["[DONE]"], repaired=True).completion("x = 1\ny = (") == "x = 1\n"
    assert StopWords(["[DONE]"], repaired=True).completion("x = (") == "x = ("  # nothing of it is a program


@pytest.mark.parametrize(
    ("text", "completion"),
    [
        ("    return 2 * x\n\nprint(double(2))\n", "    return 2 * x\n\n"),
        ("    return 2 * x\n# Test\n", "    return 2 * x\n"),
        ("# first\n    return 2 * x\nx = 1\n", "# first\n    return 2 * x\n"),
        ("    return 2 * x\n\n\nclass Solution:\n    pass\n", "    return 2 * x\n\n\n"),
        ("    s = '''\nprint(1)\n'''\n    return s\nprint(s)\n", "    s = '''\nprint(1)\n'''\n    return s\n"),
        ("    return sum([\n1,\nx])\nprint(1)\n", "    return sum([\n1,\nx])\n"),
        ("    y = \\\nx\n    return y\ny = 1\n", "    y = \\\nx\n    return y\n"),
        ("    return (2 * x\n\ndef other(y):\n    return y\n", "    return (2 * x\n\n"),
        # A helper that is used comes along, one that is not used ends the function.
        (
            "    return f(x)\n\ndef f(y):\n    return 2 * y\n\nf(1)\n",
            "    return f(x)\n\ndef f(y):\n    return 2 * y\n\n",
        ),
        ("    return f(x)\n\ndef g(y):\n    return 2 * y\n", "    return f(x)\n\n"),
        ("    return f(x)\nasync def f(y):\n    pass\nx = 1\n", "    return f(x)\nasync def f(y):\n    pass\n"),
        # The function written anew, and then again.
        (
            "import re\ndef double(x):\n    return 2 * x\ndef double(x):\n",
            "import re\ndef double(x):\n    return 2 * x\n",
        ),
        # Cut off: the last lines go that do not parse.
        ("    y = 2 * x\n    return (y", "    y = 2 * x\n"),
        ("    return 2 * x", "    return 2 * x"),
        ("    return (2 * x", "    return (2 * x"),
    ],
)
def test_python_function(text: str, completion: str) -> None:
    assert function_end(PYTHON).completion(text) == completion


@pytest.mark.parametrize(
    ("text", "completion"),
    [
        (JAVA.reference or "", JAVA.reference),
        ("        return 2 * x;\n    }\n}\n\nclass Main {\n}\n", "        return 2 * x;\n    }\n}"),
        (
            "        return 2 * x;\n    }\n\n    public static void main(String[] a) {",
            "        return 2 * x;\n    }\n}",
        ),
        ("        return 2 * x;\n    }", "        return 2 * x;\n    }\n}"),
        ("        return '}' + \"}\" /* } */; // }\n    }\n}", "        return '}' + \"}\" /* } */; // }\n    }\n}"),
        ("        if (x > 0) {\n            return 2 * x;", "        if (x > 0) {\n            return 2 * x;"),
        (
            "        return f(x) * K;\n    }\n    static final int K = 1, L[] = {1};\n"
            "    static <T> int f(T x) { return 2; }\n    int g() { return 1; }\n}",
            "        return f(x) * K;\n    }\n    static final int K = 1, L[] = {1};\n"
            "    static <T> int f(T x) { return 2; }\n}",
        ),
        (
            "        return new Node(x).y;\n    }\n}\nclass Node implements Foo {\n    int y;\n}\nclass Other { }",
            "        return new Node(x).y;\n    }\n}\nclass Node implements Foo {\n    int y;\n}",
        ),
        (
            "        return f(x);\n    }\n    /** Doubles. */\n    static int f(int x) { return 2 * x; }\n}\n// End\n",
            "        return f(x);\n    }\n    /** Doubles. */\n    static int f(int x) { return 2 * x; }\n}",
        ),
        ("        return 2 * x;\n    }\n    static { twice(1); }\n}", "        return 2 * x;\n    }\n}"),
        ("        return 2 * x;\n    }\n    This method doubles, as it should.\n", "        return 2 * x;\n    }\n}"),
        ("        return 2 * x;\n    }\n}\n}\n", "        return 2 * x;\n    }\n}"),
    ],
)
def test_java_method(text: str, completion: str) -> None:
    assert function_end(JAVA).completion(text) == completion


@pytest.mark.parametrize(
    ("text", "completion"),
    [
        ("  return 2 * x;\n}\nconsole.log(twice(1));", "  return 2 * x;\n}"),
        (
            "  return x.map(a => ({b: a}));\n}\n\n/**\n * next\n */\nfunction other() {",
            "  return x.map(a => ({b: a}));\n}",
        ),
        (
            "  return /}/.test(x) ? `}${ {a: 1}.a }` : '}';\n}\nlet a",
            "  return /}/.test(x) ? `}${ {a: 1}.a }` : '}';\n}",
        ),
        (
            "  return f(x);\n}\nfunction f(a) { return 2 * a; }\nf(1)",
            "  return f(x);\n}\nfunction f(a) { return 2 * a; }",
        ),
        ("  return x / 2; // }\n}\n", "  return x / 2; // }\n}"),
        ("  return x", "  return x"),
    ],
)
def test_javascript_function(text: str, completion: str) -> None:
    assert function_end(JAVASCRIPT).completion(text) == completion


def test_a_block_ends_at_its_fence_and_keeps_the_function() -> None:
    text = "        return 2 * x;\n    }\n\n    public static void main(String[] a) { }\n}\n```\nThis doubles `x`."
    rule = BlockEnd(JAVA)
    assert not rule.finished(text[:60])
    assert rule.finished(text)
    assert rule.completion(text) == "        return 2 * x;\n    }\n}"
    assert text[: rule.kept(text)] == "        return 2 * x;\n    }"
    assert (
        BlockEnd(MBPP).completion("def double(x):\n    return 2 * x\n```\nDone.") == "def double(x):\n    return 2 * x"
    )


def test_a_stem_without_an_open_brace() -> None:
    with pytest.raises(ValueError, match="must leave a brace open, got 0"):
        BraceEnd("javascript", "function f() { }", "f")


def test_asking_after_each_character_reads_each_once() -> None:
    """A rule that read from the beginning each time would lex a text of n characters n times."""
    rule = function_end(JAVA)
    text = "        x = f(x, 1);\n" * 200
    read = []
    feed = rule._lexer.feed  # type: ignore[attr-defined]
    rule._lexer.feed = lambda text: (read.append(token) or token for token in feed(text))  # type: ignore[attr-defined]
    assert not any(rule.finished(text[:length]) for length in range(len(text) + 1))
    assert len(read) == 200 * 9 == len(set(read))
