"""Runs a task's tests in one sandbox, on a program in another; only here the verdict is formed.

Messages go to the host and come from it. The first one received is the job and a nonce; each one sent is ``call`` with
a request to the program, which the host hands on, or the verdict.
"""

from __future__ import annotations

import sys

from .plain import Messages, is_mutable, loads, refill
from .remote import Link, Unjudged, Untrusted

TYPE_CHECKING = False  # importing `typing` takes longer than most programs
if TYPE_CHECKING:
    from typing import Any


def main(messages: Messages) -> None:
    messages.send(b"started")
    content, nonce = messages.receive()
    job = loads(content)

    def exchange(request: bytes) -> bytes:
        messages.send(b"call", request)
        kind, content = messages.receive()
        return content if kind == b"value" else b""

    link = Link(exchange)
    scope: dict[str, Any] = {}
    sources = {"stem": job["stem"], "setup": job["setup"]}
    sources |= {f"test {number}": test for number, test in enumerate(job["tests"], 1)}
    link.expects_stop = any("StopIteration" in source for source in sources.values())
    try:
        entry_point = _prepare(job, link)
        scope = sys.modules["__main__"].__dict__
        results = _watched_results() if any("unittest" in source for source in sources.values()) else []
        _run_setup(job["setup"], scope, link)
        for name, source in list(sources.items())[2:]:
            _run_test(source, name, scope)
        if job["check"]:
            scope["check"](entry_point)
        if not all(map(_passed, results)):
            raise AssertionError("a run of unittest failed, or ran no test")
    except BaseException as error:
        outputs = link.outputs()  # before the error's text, which may ask the program for more
        doubt = link.unjudged or _doubt(job, link)
        status = b"memory" if isinstance(error, MemoryError) else b"fail"
        status, line = b"broken" if isinstance(error, Unrunnable) else status, _line(error, sources)
        if doubt and status == b"fail" and not isinstance(error, Untrusted):
            status, line = b"unjudged", f"cannot be judged: {doubt} ({line})" if line != doubt else doubt
        messages.send(status, line.encode(errors="replace"), b"", outputs)
    else:
        if link.unjudged:  # the tests caught it
            messages.send(b"unjudged", f"cannot be judged: {link.unjudged}".encode(errors="replace"), b"", b"")
        else:
            messages.send(b"pass", b"", nonce, link.outputs())


def _doubt(job: dict[str, Any], link: Link) -> str:
    """Say why tests that fail here might pass in one process; empty where nothing is known."""
    if link.narrowed:
        return f"objects of the program's {', '.join(sorted(link.narrowed))} came as plain data"
    if doubt := job["doubt"] or (job["doubt_of_objects"] if link.instances else ""):
        return doubt
    try:
        changed = job["holds"] and link.request("has_changed")
    except BaseException:  # the program is gone
        changed = False
    return "the program has changed a container of which the tests hold a copy" if changed is True else ""


def _prepare(job: dict[str, Any], link: Link) -> Any:
    """Fill the tests' namespace: helpers of the stem, and the program's names as remote objects.

    Returns the entry point, None where the task does not name it; a NameError where the program does not define it.
    """
    module = sys.modules["__main__"] = type(sys)("__main__")
    scope = module.__dict__
    try:
        _run(job["stem"], "stem", scope)
    except Exception:
        scope.clear()  # a stem need not run by itself
    for name, value in list(scope.items()):
        if name == job["entry_point"] or (value if isinstance(value, type) else type(value)).__module__ == "__main__":
            del scope[name]  # the program has another one
    wanted = [name for name in job["names"] if name not in scope]
    watched = [name for name in job["watched"] if name in wanted and name not in job["modules"]]
    given: dict[str, Any] = {}

    def changed(name: str, value: Any) -> None:
        """Follow a variable of the program, unless the tests themselves have bound its name."""
        if name not in watched or scope.get(name) is not given.get(name):
            return
        if type(scope.get(name)) is type(value) and is_mutable(value):
            refill(scope[name], value)
        else:
            scope[name] = given[name] = value

    link.on_names = changed
    for name, value in link.request("names", wanted, watched, job["captures"]):
        if name in wanted:
            # Modules of the standard library are the tests'.
            scope[name] = given[name] = __import__(name) if name in job["modules"] else value
    if job["entry_point"] and job["entry_point"] not in scope:
        raise NameError(f"name {job['entry_point']!r} is not defined")
    return scope.get(job["entry_point"])


class Unrunnable(BaseException):
    """The tests need something that is missing here, such as a module."""


def _run_setup(source: str, scope: dict[str, Any], link: Link) -> None:
    requests = link.requests
    try:
        _run(source, "setup", scope)
    except ImportError as error:
        if link.requests == requests:  # else it may be the program's
            raise Unrunnable(f"{error}, and sandboxes have the standard library only; leave the task out") from None
        raise


def _run(source: str, name: str, scope: dict[str, Any]) -> None:
    exec(compile(source, name, "exec", dont_inherit=True), scope)


def _run_test(source: str, name: str, scope: dict[str, Any]) -> None:
    try:
        _run(source, name, scope)
    except SystemExit as error:
        if not _unittest_passed(error):
            raise


def _unittest_passed(error: SystemExit) -> bool:
    """Whether `unittest.main` exits after tests that passed; the code of an exit of the program is a text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_globals.get("__name__") != "unittest.main" or error.code != 0:
        return False
    return _passed(trace.tb_frame.f_locals["self"].result)


def _passed(result: Any) -> bool:
    """Whether a run of `unittest` was successful and at least one test in it ran to its end."""
    # A skipped class or subtest is no test by itself.
    skipped = [test for test, _ in result.skipped if hasattr(test, "id") and type(test).__module__ == "__main__"]
    return bool(result.wasSuccessful() and result.testsRun > len(skipped))


def _watched_results() -> list[Any]:
    """Collect the results of all runs of `unittest` from now on, which tests need not look at."""
    import unittest

    run = unittest.TextTestRunner.run
    results: list[Any] = []

    def watched(self: Any, test: Any) -> Any:
        results.append(run(self, test))
        return results[-1]

    unittest.TextTestRunner.run = watched  # type: ignore[method-assign]
    return results


def _line(error: BaseException, sources: dict[str, str]) -> str:
    line, trace = "", error.__traceback__
    while trace is not None:
        if source := sources.get(name := trace.tb_frame.f_code.co_filename):
            line = f" in {name}: {source.splitlines()[trace.tb_lineno - 1].strip()}"
        trace = trace.tb_next
    kind = "" if isinstance(error, (Unjudged, Untrusted, Unrunnable)) else type(error).__name__
    return ": ".join(filter(None, [kind, _said(error)])) + line


def _said(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())
    except BaseException:  # it holds an object of the program, which was asked for its text
        return ""
