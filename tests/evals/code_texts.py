"""Texts that look like programs: pieces of code in any order, where lexers and stop rules err if they err."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from hf_fastdecode.evals.records import Language

LANGUAGES: Final[tuple[Language, ...]] = ("python", "java", "javascript")

_ALL: Final = [
    "\n",
    "\n\n",
    "    ",
    " ",
    "x",
    "helper",
    "twice",
    "double",
    "(",
    ")",
    "[",
    "]",
    "'",
    '"',
    "\\",
    "+",
    "é",
    "0",
    "`",
]
_PIECES: Final[dict[Language, list[str]]] = {
    "python": [
        "    return helper(x)\n", "def helper(a):\n", "def other(a):\n", "def double(x):\n", "class A:\n",
        "import re\n",
        "# a\n", "    # b\n", '"""', "'''", "print(", "async ", "async def helper(b):\n    pass\n", "x = 1\n", "@a\n",
    ],
    "java": [
        "{", "}", ";", "}\n", "        return helper(x);\n    }\n", "    static int helper(int a) {\n",
        "class Node {\n",
        "int helper = 2;", "// {\n", "/* } */", "/", "*", '"""', "'}'", '"{"', "@Override ", "import a.b;", "static {",
        "Node n;", "public class Main {",
    ],
    "javascript": [
        "{", "}", ";", "}\n", "  return helper(x);\n}\n", "function helper(a) {\n", "class Node {\n", "async ",
        "// {\n", "/* } */", "/", "/}/", "${", "return ", "if (x) ", "++", "'}'", "new Node()",
        "console.log(1)\n", "const a = ",
    ],
}  # fmt: skip


def pieces(language: Language) -> st.SearchStrategy[str]:
    """Texts of up to 25 pieces."""
    return st.lists(st.sampled_from(_PIECES[language] + _ALL), max_size=25).map("".join)
