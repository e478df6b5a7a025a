"""Runs a program in its sandbox and answers calls to its definitions; the tests run elsewhere.

Messages are read from the standard input and written to the standard output as they were at the start. The first one
is the program, the others are requests of `remote`. No answer of this process is trusted: the program shares it.
"""

from __future__ import annotations

import io
import sys

from .plain import (
    ALL_NAMES,
    COMPARISONS,
    SPECIALS,
    Messages,
    builtin_name,
    content_of,
    dumps,
    is_plain,
    loads,
    mutable_parts,
)

TYPE_CHECKING = False  # importing `typing` takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_OWN_TESTS = ("unittest", "doctest")  # whose exceptions steer the run of tests


def described(kind: Any, number_of: Any) -> list[Any]:
    """Describe a class to `remote`, which sends operations of its objects back to the program accordingly.

    ``object``, its name, its own special methods, those that compare with objects of its own class only, and its name
    among the classes of builtins. Of exceptions ``exception``, the name, its bases by name or number, and its module
    if that is of the standard library. `number_of` gives the number of a base, whose description must come first.
    """
    module = str(getattr(kind, "__module__", ""))
    of_library = module.partition(".")[0] in sys.stdlib_module_names
    if issubclass(kind, BaseException):
        bases = [builtin_name(base) or number_of(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        known = of_library and module.partition(".")[0] not in _OWN_TESTS
        return ["exception", str(kind.__qualname__), bases, module if known else ""]
    methods = {name: method for name in SPECIALS if (method := _own_method(kind, name)) is not None}
    builtin = "type" if issubclass(kind, type) else str(kind.__name__) if module == "builtins" else ""
    is_method = builtin in ("method", "builtin_function_or_method")
    files = {name: getattr(getattr(method, "__code__", None), "co_filename", "") for name, method in methods.items()}
    # The latter are made by `dataclasses`.
    narrow = [name for name in COMPARISONS if name in methods and (is_method or files[name] == "<string>")]
    return ["object", str(kind.__name__), list(methods), narrow, builtin]


def _own_method(kind: Any, name: str) -> Any:
    method = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return None if method is vars(object).get(name) else method


def may_have_plain_instances(kind: Any) -> bool:
    """Whether objects that travel as plain data, without their class, can be instances of a class."""
    return is_plain(kind) or any(
        base.__module__ == "__main__" and "__instancecheck__" in vars(base) for base in type(kind).__mro__
    )


_OPERATIONS: dict[str, Any] = {
    "call": lambda function, positional, named: function(*positional, **named),
    "special": lambda value, name, *arguments: getattr(type(value), name)(value, *arguments),
    "equal": lambda value, other: (value == other, value != other),
    "plain base": may_have_plain_instances,
    **{one.__name__: one for one in (getattr, setattr, delattr)},
}
_OF_SERVICE = ("names", "wait", "is_kind", "has_changed")

_MOST_COPIED, _MOST_BYTES = 1000, 1 << 14  # containers that are watched, and bytes of a call with some


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
    def __init__(self, scope: dict[str, Any]):
        self.scope = scope
        self.objects: list[Any] = []  # by number
        self.numbers: dict[int, int] = {}  # by identity: `objects` keeps them alive
        self.kinds: dict[Any, int] = {}  # classes that were described
        self.news: tuple[list[int], list[Any]] = [], []  # the kinds of new objects, descriptions of new kinds
        self.narrowed: set[str] = set()  # classes whose objects were sent as plain data
        self.watched: dict[str, bytes] = {}  # variables that the tests read, as they were sent last
        self.captures = False
        self.copied: list[tuple[Any, bytes]] = []  # containers that the tests have copies of, with their contents then
        self.loop: Any = None

    def answer(self, request: bytes) -> bytes:
        """Carry out a request: news of objects, changed operands, changed variables, printed text, the outcome."""
        operation, *operands = loads(request, self.objects.__getitem__, ALL_NAMES)
        parts = mutable_parts(operands)
        before = self.contents(parts)
        before_call, printed = sys.stdout, io.StringIO()
        if self.captures:
            sys.stdout = printed
        try:
            carry_out = getattr(self, operation) if operation in _OF_SERVICE else _OPERATIONS[operation]
            outcome = ["value", carry_out(*operands)]
        except BaseException as error:
            outcome = ["raise", self.raised(error)]
        finally:
            sys.stdout = before_call
        try:
            # The tests see changes of the arguments that they hold.
            changed_parts = [new for old, new in zip(before, self.contents(parts), strict=True) if old != new]
            content = self.dumps(outcome, parts)
            changed = self.changed_names() if operation != "names" else []
        except ValueError as error:  # nested too deep
            changed_parts, changed = [], []
            content = self.dumps(["raise", [["ValueError"], str(error), [str(error)], {}, None]])
        if len(request) + len(content) <= _MOST_BYTES:
            self.note_copies(parts, outcome)
        news, self.news = self.news, ([], [])
        narrowed, self.narrowed = sorted(self.narrowed), set()
        return dumps([*news, narrowed, changed_parts, changed, printed.getvalue(), content])

    def contents(self, parts: list[Any]) -> list[bytes]:
        return [self.dumps([position, content_of(part)], parts) for position, part in enumerate(parts)]

    def names(self, wanted: list[str], watched: list[str], captures: bool) -> list[tuple[str, Any]]:
        """Give the program's variables; from now on, each answer has changes of watched ones, and printed text."""
        self.captures = captures
        found = [(name, self.scope[name]) for name in wanted if name in self.scope]
        plain = [name for name in watched if not callable(self.scope.get(name))]
        self.watched = {name: self.dumps(self.scope[name]) if name in self.scope else b"" for name in plain}
        return found

    def is_kind(self, kind: Any, number: int) -> bool:
        return self.kinds.get(kind) == number

    def note_copies(self, parts: list[Any], outcome: list[Any]) -> None:
        """Note the containers among a request's operands and in its result, unless they are too many."""
        try:
            found = [*parts, *mutable_parts(outcome[1:], _MOST_COPIED)]
            if len(found) + len(self.copied) <= _MOST_COPIED:
                self.copied += [(part, self.dumps(content_of(part))) for part in found]
        except ValueError:  # one holds itself
            pass

    def has_changed(self) -> bool:
        return any(self.dumps(content_of(part)) != content for part, content in self.copied)

    def changed_names(self) -> list[Any]:
        found: list[Any] = []
        for name, before in self.watched.items():
            if name in self.scope and (after := self.dumps(self.scope[name])) != before:
                self.watched[name] = after
                found += [name, after]
        return found

    def wait(self, awaitable: Any) -> Any:
        """Run a coroutine to its end, in one loop for all, which keeps their tasks."""
        import asyncio

        async def result() -> Any:
            return await awaitable

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(result())

    def raised(self, error: BaseException) -> list[Any]:
        """Describe an exception: its builtin bases, text, arguments and attributes; itself if of another class."""
        kind = type(error)
        name = builtin_name(kind)
        classes = list(filter(None, map(builtin_name, kind.__mro__)))
        attributes = {name: one for name, one in vars(error).items() if type(one) in (int, float, str, bool)}
        arguments = list(error.args)
        try:
            self.dumps(arguments)
        except ValueError:  # nested too deep
            arguments = [_said(error)]
        return [classes, _said(error), arguments, attributes, None if name else error]

    def dumps(self, value: Any, known: Sequence[Any] = ()) -> bytes:
        return dumps(value, self.give, known=known, narrowed=self.narrowed)

    def give(self, value: Any) -> int:
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
            is_class = isinstance(value, type) and issubclass(value, BaseException)
            self.news[0].append(~self.kind(value) if is_class else self.kind(type(value)))
        return number

    def kind(self, kind: type) -> int:
        if kind not in self.kinds:
            description = described(kind, self.kind)
            self.kinds[kind] = len(self.kinds)
            self.news[1].append(description)
        return self.kinds[kind]


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "an error without text"
