"""Runs a program in its sandbox and answers calls to what it defines; the tests are not here.

Messages are read from the standard input and written to the standard output as they were at the start. The first one
is the program, the others are requests of `remote`. No answer of this process is trusted: the program shares it.
"""

from __future__ import annotations

import sys

from .messages import Messages
from .plain import ALL_NAMES, builtin_name, dumps, loads

TYPE_CHECKING = False  # importing `typing` takes longer than most programs
if TYPE_CHECKING:
    from typing import Any

_OPERATIONS: dict[str, Any] = {
    "call": lambda function, positional, named: function(*positional, **named),
    "getitem": lambda container, key: container[key],
    "setitem": lambda container, key, value: container.__setitem__(key, value),
    **{one.__name__: one for one in (getattr, setattr, len, iter, next, bool, str, repr)},
}


def main(messages: Messages) -> None:
    """Run the program, then serve until the requests end."""
    messages.send(b"started")
    (program,) = messages.receive()
    module = sys.modules["__main__"] = type(sys)("__main__")
    try:
        code = compile(program.decode("utf-8", "surrogatepass"), "completion.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # a null byte; nested too deep to parse
        messages.send(b"compile", f"{type(error).__name__}: {error}".encode(errors="replace"))
        return
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        said = ": ".join(filter(None, [type(error).__name__, " ".join(_said(error).split())]))
        kind = b"memory" if isinstance(error, MemoryError) else b"error"
        messages.send(kind, f"{said} in the program".encode(errors="replace"))
        return
    messages.send(b"ready")
    service = _Service(module.__dict__)
    while request := messages.receive():
        messages.send(b"value", service.answer(request[0]))


class _Service:
    """Carries out requests, and keeps the objects that were sent as handles."""

    def __init__(self, scope: dict[str, Any]):
        self.scope = scope
        self.objects: list[Any] = []  # by number
        self.numbers: dict[int, int] = {}  # by identity: `objects` keeps them alive

    def answer(self, request: bytes) -> bytes:
        operation, *operands = loads(request, self.objects.__getitem__, ALL_NAMES)
        before = self.dumps(operands)
        try:
            result = self.names(*operands) if operation == "names" else _OPERATIONS[operation](*operands)
            answer = "value", result
        except BaseException as error:
            classes = [builtin_name(one) for one in type(error).__mro__]
            answer = "raise", [list(filter(None, classes)), _said(error)]
        # What a program does to its arguments is seen by whoever holds them.
        after = self.dumps(operands)
        return self.dumps([*answer, None if after == before else operands])

    def names(self, wanted: list[str]) -> list[tuple[str, Any]]:
        return [(name, self.scope[name]) for name in wanted if name in self.scope]

    def dumps(self, value: Any) -> bytes:
        try:
            return dumps(value, self.give)
        except ValueError as error:
            return dumps(["raise", [["ValueError"], str(error)], None], self.give)

    def give(self, value: Any) -> int:
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return number


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "an error without text"
