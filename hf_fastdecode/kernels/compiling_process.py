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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from .ahead import Launch
from .installed import interpreted, triton_is_installed

_MOST_THREADS = 4

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
from hf_fastdecode.kernels.compiling_process import compile_given
compile_given(given, *pickle.load(messages))
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

        self._send(pickle.dumps((driver.active.get_current_target(), without_tensors(launches))))

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


@dataclass(frozen=True)
class Pointer:
    """Stands for a tensor: has what Triton reads of one."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


class Given(NamedTuple):
    """A launch whose kernel can be compiled elsewhere: its module and name, and arguments that compile alike."""

    module: str
    kernel: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def without_tensors(launches: Iterable[Launch]) -> list[Given]:
    """The launches, each kernel with arguments that compile alike once."""
    found: dict[str, Given] = {}
    for kernel, arguments, options in launches:
        given = Given(kernel.__module__, kernel.__name__, tuple(map(_that_compiles_alike, arguments)), options)
        found.setdefault(repr(given), given)
    return list(found.values())


_MOST_NUMBER = 2**31  # larger ones have another type


def _that_compiles_alike(argument: Any) -> Any:
    """What Triton compiles the same kernel for: it tells ones and multiples of 16 from other numbers."""
    if isinstance(argument, Tensor):
        return Pointer(argument.dtype, argument.data_ptr() % 16)
    if type(argument) is int and abs(argument) < _MOST_NUMBER:
        return argument if argument == 1 else 16 if argument % 16 == 0 else 2
    if type(argument) is float:
        return 0.5
    if hasattr(argument, "block_shape"):  # a descriptor
        return replace(argument, base=Pointer(argument.base.dtype, 0), shape=list(argument.block_shape))
    return argument


def compile_given(given: socket.socket, target: Any, launches: list[Given]) -> None:
    """What the process does once it has its work; it ends at once when the other end of the socket is closed."""
    import triton

    Thread(target=_end_with, args=(given,), daemon=True).start()
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _: 0
        )
    )
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2)
    with _Threads(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for launch in launches:
            kernel = getattr(import_module(launch.module), launch.kernel)
            with suppress(Exception):
                kernel.warmup(*launch.arguments, grid=(1,), **launch.options)


def _end_with(given: socket.socket) -> None:
    given.settimeout(None)
    with suppress(OSError):
        given.recv(1)
    os._exit(0)


class _Threads(ThreadPoolExecutor):
    """Threads that make the launchers of what they compile too, where these are compiled."""

    def submit(self, compile_one: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        return super().submit(_with_launcher, compile_one, *arguments, **named)


def _with_launcher(compile_one: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    kernel = compile_one(*arguments, **named)
    with suppress(Exception):  # Triton < 3.7
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)
    return kernel
