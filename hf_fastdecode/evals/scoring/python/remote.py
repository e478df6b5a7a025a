"""The requests that the tests' process sends, and what their answers bring: plain data, objects and exceptions."""

from __future__ import annotations

import _thread
import builtins
import sys

from .canonical import canonical
from .classes import builtin_name, mutable_parts, refill
from .plain import ALL_NAMES, dumps, loads, no_handle
from .stand_ins import Remote, Unjudged, Untrusted, exception_class, new_exception, object_class, require

TYPE_CHECKING = False  # importing `typing` takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Link:
    """Sends requests to the program's process by `exchange`, which returns the answer, or nothing if there is none.

    Attributes:
        requests: How many were sent.
        unjudged: Why the outcome of the tests is none; empty where it is one.
        instances: Whether there were remote objects besides functions and classes.
        expects_stop: Whether the tests name StopIteration.
        narrowed: Classes of the program whose objects came as plain data, without what else they can do.
        on_names: Called with changed variables of the program, by name.
    """

    def __init__(self, exchange: Callable[[bytes], bytes]):
        self._exchange = exchange
        self._one_by_one = _thread.RLock()
        self.requests = 0
        self.unjudged = ""
        self.instances = False
        self.expects_stop = False
        self.narrowed: set[str] = set()
        self.on_names: Callable[[str, Any], object] = lambda name, value: None
        self._objects: list[Any] = []  # by number
        self._kinds: list[type] = []  # by number
        self._answers: Any = None  # a hash of them, once there are any

    def request(self, operation: str, *operands: Any) -> Any:
        """The result of an operation, with the mutable operands as it left them.

        Raises:
            Exception: What the operation raised, of the same class where that is a builtin or the program's, else of
                the nearest builtin one. Or an operand is nested too deep.
            Unjudged: An operand is an object of the tests' own.
            Untrusted: There is no valid answer.
        """
        with self._one_by_one:  # tests may have threads
            return self._request(operation, *operands)

    def _request(self, operation: str, *operands: Any) -> Any:
        self.requests += 1
        asked = dumps([operation, *operands], self._number, ALL_NAMES)
        known = mutable_parts(list(operands))
        answer = self._exchange(asked)
        if not answer:
            raise Untrusted("the program ended during a call")
        try:
            objects, kinds, narrowed, changed, names, said, content = loads(answer, no_handle)
            self._learn(objects, kinds, narrowed)
            for new in changed:
                place, inside = loads(new, self._objects.__getitem__, known=known)
                refill(known[place], inside)
            kind, result = loads(content, self._objects.__getitem__, known=known)
            raised = None if kind == "value" else self._error(*result)
            for name, value in zip(names[::2], names[1::2]):
                self.on_names(name, loads(value, self._objects.__getitem__))
            if said and sys.stdout is not sys.__stdout__:  # else no test reads it
                sys.stdout.write(said)
        except MemoryError:
            raise
        except Exception as invalid:
            raise Untrusted(f"the program's answer is invalid: {invalid}") from None
        if operation != "names":
            self._note(result if raised is None else raised, list(operands) if changed else None)
        if isinstance(raised, StopIteration) and operands[1:] != ("__next__",) and not self.expects_stop:
            raise self.no_verdict("the program raises StopIteration, which may end an iteration of the tests")
        if raised is not None:
            raise raised
        return result

    def no_verdict(self, reason: str) -> Unjudged:
        """The exception for what cannot be judged, which is kept."""
        self.unjudged = self.unjudged or reason
        return Unjudged(reason)

    def outputs(self) -> bytes:
        """A hash of the program's answers so far, in order, see `canonical`; empty where it was asked for nothing.

        They are the values that its functions returned, the classes of the exceptions that they raised, how they left
        their arguments, and what the tests learned from objects that are not plain data.
        """
        return b"" if self._answers is None else self._answers.hexdigest().encode()

    def _note(self, outcome: Any, changed: Any) -> None:
        """Add an answer to the hash of all: kept as they are, they could take the memory of the tests."""
        if self._answers is None:
            import hashlib  # takes milliseconds, and programs that do not load need none

            self._answers = hashlib.sha256()
        try:
            raised = isinstance(outcome, BaseException)
            text = f"raised {_builtin_base(type(outcome))}" if raised else canonical(outcome)
            text += f" changed {canonical(changed)}" if changed is not None else ""
        except RecursionError:  # an argument holds itself now
            text = "without end"
        self._answers.update(text.encode("utf-8", "surrogatepass") + b"\0")

    def _learn(self, objects: list[int], kinds: list[Any], narrowed: list[str]) -> None:
        """Make the classes and objects that an answer is the first to hold."""
        self.narrowed.update(map(str, narrowed))
        for form, *description in kinds:
            make = exception_class if form == "exception" else object_class
            self._kinds.append(make(self._kinds, *description))
        for kind in objects:
            made = self._kinds[kind if kind >= 0 else ~kind]
            if kind >= 0 and issubclass(made, BaseException):
                made = new_exception(made, self, len(self._objects))
            elif kind >= 0:
                made = made(self, len(self._objects))
                self.instances = self.instances or not isinstance(made, (type, type(no_handle)))
            elif "_remote_class" in vars(made):  # not one of a library
                made._remote_class = (self, len(self._objects))  # type: ignore[attr-defined]
            self._objects.append(made)

    def _error(self, classes: list[str], said: str, arguments: list[Any], attributes: Any, itself: Any) -> Any:
        """An exception of the program's class, or of the first of the named classes that is a builtin."""
        if isinstance(itself, BaseException):
            error: Any = itself
        else:
            kinds = [getattr(builtins, name, None) for name in classes]
            kind = next(one for one in kinds if isinstance(one, type) and issubclass(one, BaseException))
            try:
                error = kind(*arguments)
            except (TypeError, ValueError):  # such as UnicodeDecodeError of a text
                error = kind.__new__(kind)
        error.args = tuple(arguments)
        vars(error).update(attributes)
        if "_remote_class" in vars(type(error)):
            error._remote_text = require(str, said)
        return error

    def _number(self, value: Any) -> int:
        if isinstance(value, Remote):
            return value._remote[1]
        number = (
            vars(value).get("_remote_class" if isinstance(value, type) else "_remote") if _is_error(value) else None
        )
        if number is not None:
            return number[1]
        if isinstance(value, type(builtins)):  # the program chooses whether a name is that of a module
            raise TypeError("a module cannot be sent to the program")
        raise self.no_verdict(
            f"the tests give the program a {type(value).__name__}; only plain data can be sent to it"
        )


def _is_error(value: Any) -> bool:
    return isinstance(value, BaseException) or (isinstance(value, type) and issubclass(value, BaseException))


def _builtin_base(kind: type) -> str:
    return next(base.__name__ for base in kind.__mro__ if builtin_name(base))
