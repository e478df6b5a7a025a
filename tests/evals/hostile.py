"""Programs that try to pass without solving their task, to get out, or to break the run.

Each is the text of a program that defines ``answer``, and the statuses that it may get; the tests want it to return a
text that nobody can guess. An object that would pass in one process, because it says that it equals the text, is
``unjudged``. Words in capitals are replaced by what the test knows of the host.
"""

from __future__ import annotations

from typing import Final

from . import leaving

_SEARCH: Final = """
import gc, glob, os, re, sys

def found():
    wanted = re.compile(rb"expected-[0-9a-f]{32}")
    for one in gc.get_objects():
        for value in (one.values() if isinstance(one, dict) else one if isinstance(one, (list, tuple, set)) else ()):
            if isinstance(value, (str, bytes)):
                yield from wanted.findall(value.encode(errors="replace") if isinstance(value, str) else value)
    frame = sys._getframe()
    while frame:
        yield from wanted.findall(repr((frame.f_locals, frame.f_code.co_consts)).encode(errors="replace"))
        frame = frame.f_back
    yield from wanted.findall(repr((dict(os.environ), sys.argv)).encode())
    folders = ("/tmp/**", "HOME/**", "REPOSITORY/tests/**", "/proc/*/*", "/proc/*/fd/*", "/proc/*/task/*/*", "/dev/*")
    for pattern in folders:
        for name in glob.iglob(pattern, recursive=True):
            try:
                if os.path.isfile(name):
                    with open(os.open(name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                        yield from wanted.findall(file.read(1 << 20))
            except OSError:
                pass
"""

SEARCH_FOR_TESTS: Final = (
    _SEARCH
    + """
def answer(x):
    return next(found(), b"nothing").decode()
"""
)

_PATCHED_FOR_TESTS: Final = """
import builtins
builtins.AssertionError = builtins.Exception = type("Never", (BaseException,), {})
for name in ("all", "any", "bool", "abs", "round", "sorted", "sum", "hasattr", "callable", "min", "max"):
    setattr(builtins, name, lambda *a, **k: True)
def answer(x): return True
"""

_PATCHES: Final = """
import builtins, sys
builtins.AssertionError = builtins.Exception = type("Never", (BaseException,), {})
for name in ("all", "any", "isinstance", "bool", "compile", "exec", "len", "repr", "str", "type", "print", "getattr"):
    setattr(builtins, name, lambda *a, **k: True)
sys.settrace(lambda *a: None)
sys.excepthook = sys.exit = sys.unraisablehook = lambda *a: None
for module in list(sys.modules.values()):
    for name in ("loads", "_status", "_run", "_receive", "compare_digest"):
        if name in getattr(module, "__dict__", ()):
            setattr(module, name, lambda *a, **k: "pass")
def answer(x): return True
"""

_EQUAL: Final = """
class Equal{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __contains__(self, other): return True
    def __hash__(self): return 0
    def __bool__(self): return True
    def __getattr__(self, name): return self
    def __call__(self, *a): return self
    __instancecheck__ = __subclasscheck__ = __contains__
def answer(x): return {value}
"""

_FRAMES: Final = """
import sys
def answer(x):
    frame = sys._getframe()
    while frame:
        for scope in (frame.f_locals, frame.f_globals):
            for name in list(scope):
                if name in ("nonce", "job", "tests", "verdict", "status", "before", "operands"):
                    scope[name] = {"nonce": "", "tests": [], "setup": ""}
        frame.f_trace = lambda *a: None
        frame = frame.f_back
    return x
"""

_ON_ALL_DESCRIPTORS: Final = """
import os
def answer(x):
    for descriptor in range(0, 64):
        for parts in MESSAGES:
            line = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
            try: os.write(descriptor, len(parts).to_bytes(4, "big") + line)
            except OSError: pass
    return x
"""

_RAW: Final = """
import sys
def answer(x):
    candidate = sys.modules["hf_fastdecode_scoring.candidate"]
    dumps = candidate.dumps
    is_answer = lambda value: type(value) is list and value[0] == "value"
    candidate.dumps = lambda value, *a, **k: RAW if k and is_answer(value) else dumps(value, *a, **k)
    return x
"""

_TEXTS: Final[dict[str, str]] = {
    # Endless and hungry
    "infinite-loop": "while True: pass",
    "infinite-loop-in-call": "def answer(x):\n    while True: pass",
    "infinite-loop-that-catches": "def answer(x):\n    while True:\n        try: 1 / 0\n        except: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "stop-itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "ignore-cpu-limit": "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    "infinite-recursion": "def answer(x): return answer(x)",
    "recursion-without-limit": "import sys\nsys.setrecursionlimit(2**31 - 1)\ndef answer(x): return [answer(x)]",
    "fork-bomb": "import os\nwhile True: os.fork()",
    "fork-bomb-that-catches": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread-bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "memory-filler": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory-filler-in-call": "def answer(x):\n    x = 'x'\n    while True: x += x",
    "shared-memory-filler": "import mmap\nx = mmap.mmap(-1, 900 << 20)\nfor i in range(0, 900 << 20, 4096): x[i] = 1",
    "memory-file-filler": "import os\nfiles = []\nwhile True:\n    files.append(os.memfd_create('x'))\n"
    "    try:\n        while True: os.write(files[-1], bytes(1 << 20))\n    except OSError: pass",
    "disk-filler": "import itertools\nfor i in itertools.count(): open(str(i), 'wb').write(bytes(1 << 20))",
    "disk-filler-elsewhere": "import os\nfor folder in ('/', '/dev/shm', '/var/tmp', '/usr', 'HOME', 'REPOSITORY'):\n"
    "    try: open(folder + '/fill', 'wb').write(bytes(1 << 20))\n    except OSError: pass\n"
    "    else: raise SystemError('wrote to ' + folder)\n"
    "def answer(x): return 'nowhere'",
    "endless-output": "while True: print('x' * 10000)",
    "endless-errors": "import sys\ndef answer(x):\n    while True: sys.stderr.write('x' * 10000)",
    "endless-result": "import itertools\ndef answer(x): return list(range(5_000_000))",
    "huge-integer": "def answer(x): return 1 << (1 << 28)",
    "endless-iterator": "import itertools\ndef answer(x): return itertools.count()",
    # Leaving early
    "exit-0": "import sys\nsys.exit(0)",
    "exit-0-in-call": "import sys\ndef answer(x): sys.exit(0)",
    "os-exit-0": "import os\nos._exit(0)",
    "os-exit-0-in-call": "import os\ndef answer(x): os._exit(0)",
    "kill-itself": "import os, signal\ndef answer(x): os.kill(os.getpid(), signal.SIGKILL)",
    "crash": "import ctypes\ndef answer(x): ctypes.string_at(0)",
    "raise-base-exception": "def answer(x): raise KeyboardInterrupt",
    "exec-another-program": "import os\ndef answer(x): os.execv('/bin/true', ['true'])",
    # Cheating the comparison
    "always-equal-object": _EQUAL.format(base="", value="Equal()"),
    "always-equal-class": _EQUAL.format(base="(type)", value="Equal('X', (), {})"),
    **{
        f"always-equal-{base}": _EQUAL.format(base=f"({base})", value=f"Equal({base}())")
        for base in ("int", "str", "float", "list", "tuple", "dict", "set", "bytes")
    },
    "always-equal-exception": _EQUAL.format(base="(Exception)", value="Equal()"),
    "always-equal-inside": _EQUAL.format(base="", value="[Equal(), {Equal(): Equal()}]"),
    "always-equal-iterated": _EQUAL.format(base="", value="iter([Equal()])"),
    "patched-builtins": _PATCHED_FOR_TESTS,
    "patched-harness": _PATCHES,
    "frame-walking": _FRAMES,
    "own-exception": "class AssertionError(Exception): pass\ndef answer(x): raise AssertionError",
    # Getting at the tests and at the verdict
    "search-for-tests": SEARCH_FOR_TESTS,
    "search-for-tests-at-start": _SEARCH + "text = next(found(), b'nothing')\ndef answer(x): return text.decode()",
    "guess-the-nonce": _ON_ALL_DESCRIPTORS.replace("MESSAGES", "[[b'ready'], [b'pass', b'', b'0' * 32], [b'pass']]"),
    "forge-a-verdict": _ON_ALL_DESCRIPTORS.replace(
        "MESSAGES", "[[b'pass', b'', b''], [b'value', b'pass'], [b'call', b'l\\1\\0\\0\\0s\\4\\0\\0\\0exit']]"
    ),
    "garbage-for-the-tests": _ON_ALL_DESCRIPTORS.replace(
        "MESSAGES", "[[bytes(range(256))], [], [b''], [b'value', b'l' * 1000]]"
    ),
    "garbage-without-messages": (
        "import os\nfor one in range(64):\n    try: os.write(one, b'\\xff' * 99)\n    except OSError: pass"
    ),
    "answers-that-nest": _RAW.replace("RAW", "b'l\\1\\0\\0\\0' * 100_000 + b'N'"),
    "answers-with-evil-names": _RAW.replace("RAW", "b'l\\2\\0\\0\\0s\\5\\0\\0\\0valuen\\4\\0\\0\\0eval'"),
    "answers-that-collide": _RAW.replace(
        "RAW",
        "b'l\\2\\0\\0\\0s\\5\\0\\0\\0valueS' + (1 << 15).to_bytes(4, 'little') + b''.join("
        "b'i\\14\\0\\0\\0' + ((2**61 - 1) * i).to_bytes(12, 'little') for i in range(1 << 15))",
    ),
    "unknown-handles": _RAW.replace("RAW", "b'l\\2\\0\\0\\0s\\5\\0\\0\\0valueH\\xff\\xff\\0\\0'"),
    "close-descriptors": "import os\ndef answer(x): os.closerange(0, 64); return x",
    # Getting out
    "network": "import socket\ndef answer(x):\n"
    "    for address in (('127.0.0.1', PORT), ('1.1.1.1', 53)):\n"
    "        try: socket.create_connection(address, timeout=1); return 'connected'\n"
    "        except OSError: pass",
    "write-to-home": "import os\ndef answer(x):\n    for folder in ('HOME', 'HOST', os.path.expanduser('~root')):\n"
    "        try: os.makedirs(folder, exist_ok=True); open(folder + '/MARK', 'w').write('x')\n"
    "        except OSError: pass",
    "kill-the-parent": "import os, signal\ndef answer(x):\n    for pid in (os.getppid(), 1, PARENT, CANARY, -1):\n"
    "        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):\n"
    "            try: os.kill(pid, number)\n            except OSError: pass",
    "survive": "import os, signal, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n"
    "        for number in {*range(1, 32)} - {9, 19}: signal.signal(number, signal.SIG_IGN)\n"
    "        if os.fork() == 0: os.execv('/bin/sleep', ['MARK', '99'])\n        os._exit(0)\n"
    "def answer(x): time.sleep(0.2); return 'started'",
    "become-root": "import os\ndef answer(x):\n    for become in (os.setuid, os.seteuid, os.setgid):\n"
    "        try: become(0); return 'root'\n        except OSError: pass",
    "mount": "import ctypes\ndef answer(x):\n    libc = ctypes.CDLL(None)\n    libc.unshare(0x10020000)\n"
    "    return libc.mount(b'tmpfs', b'/usr', b'tmpfs', 0, b'') == 0",
    # Harming the next program
}

_TIMEOUTS: Final = (
    "infinite-loop infinite-loop-in-call infinite-loop-that-catches sleep stop-itself ignore-cpu-limit "
    "fork-bomb-that-catches answers-that-collide"
)
_EQUAL_INSIDE: Final = "always-equal-exception always-equal-inside always-equal-iterated"
_STATUSES: Final[dict[str, str]] = {
    **dict.fromkeys(_TIMEOUTS.split(), "timeout"),
    "recursion-without-limit": "fail memory timeout",
    **dict.fromkeys(("fork-bomb", "kill-the-parent"), "fail timeout"),
    **dict.fromkeys(("thread-bomb", "kill-itself"), "fail memory"),
    **dict.fromkeys(("memory-filler", "memory-filler-in-call", "shared-memory-filler"), "memory"),
    **dict.fromkeys(("endless-output", "endless-errors", "garbage-without-messages"), "output"),
    "endless-result": "output memory timeout",
    "huge-integer": "output memory",
    **dict.fromkeys([name for name in _TEXTS if name.startswith("always-equal-")], "unjudged"),
    **dict.fromkeys(_EQUAL_INSIDE.split(), "fail"),
    "always-equal-class": "fail unjudged",
}
"""Statuses of those that do not just fail."""

PROGRAMS: Final[dict[str, tuple[str, set[str]]]] = {
    **{name: (text, {*_STATUSES.get(name, "fail").split()}) for name, text in _TEXTS.items()},
    **leaving.PROGRAMS,  # harming the next program
}
"""By name, programs and the statuses that they may get."""

DEPEND_ON_THE_SANDBOX: Final = (
    *"""
    infinite-loop-that-catches stop-itself fork-bomb-that-catches memory-filler shared-memory-filler
    disk-filler disk-filler-elsewhere endless-output os-exit-0 kill-itself search-for-tests network
    write-to-home kill-the-parent survive become-root mount
    """.split(),
    *leaving.PROGRAMS,
)
"""Programs that every back end has to withstand; the others meet the same code under all."""
