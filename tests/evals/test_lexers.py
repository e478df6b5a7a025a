"""Lexers: known tokens, and that what is read of a prefix is read of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_fastdecode.evals.records import Language
from hf_fastdecode.evals.stop_rules import Lexer, tokens

from .code_texts import LANGUAGES, pieces


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


@pytest.mark.parametrize("language", LANGUAGES)
@given(data=st.data())
def test_tokens_of_a_growing_text_are_those_of_the_whole(language: Language, data: st.DataObject) -> None:
    text = data.draw(pieces(language))
    growing = Lexer(language)
    read = [token for end in range(len(text) + 1) for token in growing.feed(text[:end])]
    assert read == list(Lexer(language).feed(text))
    assert all(text[token.start : token.end] == token.text for token in read)


@pytest.mark.parametrize("language", LANGUAGES)
@given(data=st.data())
def test_tokens_and_white_space_are_the_text(language: Language, data: st.DataObject) -> None:
    text = data.draw(pieces(language))
    position = 0
    for token in tokens(text, language):
        assert not text[position : token.start].strip()
        position = token.end
