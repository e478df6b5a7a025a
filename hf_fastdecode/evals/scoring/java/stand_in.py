"""The class that tests call in a program's stead."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

_SIGNATURE: Final = re.compile(
    r"\bclass\s+(?P<holder>\w+)[^{}]*\{(?:(?!\bclass\b).)*?"
    r"\bstatic\s+(?:<[^{}()]*>\s+)?(?P<type>[\w.<>,?\[\]\s]+?)\s+(?P<name>\w+)\s*\((?P<parameters>[^{}]*)\)"
    r"[^(){};]*\{\s*$",
    re.S,
)
_COMMENT: Final = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_BOXED: Final = {
    "int": "Integer",
    "long": "Long",
    "double": "Double",
    "float": "Float",
    "short": "Short",
    "byte": "Byte",
    "char": "Character",
    "boolean": "Boolean",
}


@dataclass(frozen=True)
class StandIn:
    """A static method of a class, as a stem declares it.

    Attributes:
        holder: The class.
        name: The method.
        types: Of its parameters, without type arguments.
        source: The class with a method that passes its arguments on.
    """

    holder: str
    name: str
    types: tuple[str, ...]
    source: str

    @classmethod
    def of_stem(cls, stem: str) -> Self:
        """The stand-in for the method that a stem leaves open.

        Args:
            stem: Imports, a class and the signature of a static method up to its brace.

        Raises:
            ValueError: It does not end so.
        """
        found = _SIGNATURE.search(_COMMENT.sub(" ", stem))
        if found is None:
            raise ValueError(f"a stem in Java must end with the signature of a static method, got {stem[-80:]!r}")
        parameters = [one.split() for one in _split(found["parameters"])]
        names = ", ".join(words[-1] for words in parameters)
        types = tuple(_erased(" ".join(words[:-1])) for words in parameters)
        boxed = _BOXED.get(found["type"], found["type"])
        body = f"return ({boxed}) evals.Server.call(new Object[] {{{names}}});"
        return cls(found["holder"], found["name"], types, f"{stem}{body}\n}}\n}}\n")


def _split(parameters: str) -> list[str]:
    """Parameters, separated by the commas outside of type arguments."""
    parts, depth = [""], 0
    for letter in parameters:
        depth += (letter == "<") - (letter == ">")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _erased(declared: str) -> str:
    """A type's simple name: without annotations, `final`, package and type arguments."""
    plain = re.sub(r"<.*>", "", declared).split()[-1]
    return plain.rpartition(".")[2]
