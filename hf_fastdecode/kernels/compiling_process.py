"""Compiles kernels in a process of its own, into Triton's folder on disk, where later launches find them.

To trace a kernel takes the interpreter's lock for tenths of a second, which steps of a call on another thread would
lose. The process has a low priority. It ends with its work, when asked to, and when the process that started it
ends in whatever way: that one holds the other end of its standard input.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from inspect import getclosurevars
from pathlib import Path
from typing import Any
from weakref import finalize

import torch

from .ahead import Launch
from .compiling_worker import Source
from .installed import interpreted, triton_is_installed

_NICENESS = 10
"""Of the process: calls, also of other programs, go before it."""

_MOST_SECONDS = 300.0
"""For which the process waits for work."""

_BEGIN = f"""
import os, pickle, socket, sys
os.nice({_NICENESS})
given = socket.socket(fileno=0)
given.settimeout({_MOST_SECONDS})
messages = given.makefile("rb")
sys.path[:] = pickle.load(messages)
from hf_fastdecode.kernels.compiling_worker import compile_sources, prepare
prepare()
compile_sources(given, *pickle.load(messages))
"""


class CompilingProcess:
    """A process that has been started, and waits for launches whose kernels it compiles."""

    def __init__(self, process: subprocess.Popen[bytes], given: socket.socket):
        self._process, self._given = process, given
        self.end = finalize(self, _end, os.getpid(), process, given)
        """Ends the process, if it has not ended; called at the interpreter's exit."""

    @classmethod
    def start(cls, device: torch.device) -> CompilingProcess | None:
        """Start one, where kernels are compiled for a device and it gains: None elsewhere."""
        if device.type != "cuda" or not triton_is_installed() or interpreted():
            return None
        if sys.platform != "linux" or not sys.executable or len(os.sched_getaffinity(0)) < 2:
            return None
        # Of several processes that compute on a host, as `torchrun` starts them, one compiles for all.
        if os.environ.get("LOCAL_RANK", "0") != "0" or not _can_write(folder := _triton_folder()):
            return None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-B", "-c", _BEGIN],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"TRITON_CACHE_DIR": str(folder)},
                )
            except OSError:
                ours.close()
                return None
        ours.setblocking(False)
        started = cls(process, ours)
        started._send(pickle.dumps(sys.path))
        return started

    def compile(self, launches: Iterable[Launch]) -> None:
        """Begin to compile the kernels of these launches, in their order. It can be asked for once."""
        from triton.runtime import driver

        sources = [*sources_of(launches).values()]
        self._send(pickle.dumps((driver.active.get_current_target(), sources)))

    def is_running(self) -> bool:
        """Whether it has not ended."""
        if self.end.alive and self._process.poll() is not None:
            self.end()
        return self.end.alive

    def _send(self, message: bytes) -> None:
        """Send without waiting; what does not fit in the socket's buffer is not worth it."""
        try:
            if self.end.alive and self._given.send(message, socket.MSG_NOSIGNAL) == len(message):
                return
        except OSError:  # it has ended
            pass
        self.end()


def _end(owner: int, process: subprocess.Popen[bytes], given: socket.socket) -> None:
    if os.getpid() != owner:  # in a fork, whose parent's process it is
        return
    given.close()
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


def _triton_folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def _can_write(folder: Path) -> bool:
    """Whether files can be written in a folder, which may have to be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def sources_of(launches: Iterable[Launch]) -> dict[str, Source]:
    """What these launches would compile, by the keys under which Triton stores it; without what is loaded."""
    from triton import AsyncCompileMode

    class Asking(AsyncCompileMode):
        def submit(self, key: str, compile_one: Callable[[], Any], _: Any) -> None:
            raise _AskedError(key, compile_one)  # so that nothing is kept in the place of a kernel

    found: dict[str, Source] = {}
    with Asking(None):
        for kernel, arguments, options in launches:
            try:
                kernel.warmup(*arguments, grid=(1,), **options)
            except _AskedError as asked:
                if asked.key not in found:
                    found[asked.key] = _source(asked.compile_one)
    return found


class _AskedError(Exception):
    def __init__(self, key: str, compile_one: Callable[[], Any]):
        self.key, self.compile_one = key, compile_one


def _source(compile_one: Callable[[], Any]) -> Source:
    """What a function of Triton's would compile."""
    named = getclosurevars(compile_one).nonlocals
    source, kernel = named["src"], named["self"]
    arguments = source.signature, source.constants, source.attrs
    return Source(type(source), kernel.__module__, kernel.__name__, arguments, vars(named["options"]))
