"""Launches of Triton kernels, and their compilation on threads before they are launched.

Triton compiles a kernel when it is first launched with other compile-time arguments: up to some seconds each, one
after another. Here launches can be left out, and their kernels compile all at once: Triton's passes, ptxas and the
compiler of its launchers leave the interpreter to other threads. What fails here is tried again at the launch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from threading import Event, Thread
from typing import Any, TypeVar

import torch

from ..log import logger
from .device import interpreted, stream_for, triton_is_installed
from .failures import Kernel, launching

_MOST_THREADS = 8

Result = TypeVar("Result")


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> bool:
    """Launch a Triton kernel over a grid of programs, or only compile it, see `compiled_ahead`.

    Launch parameters are chosen so that the tiles in flight fit the GPU's shared memory. Where a compiler takes more
    of it than was counted, the kernel is compiled with fewer in flight (the option ``STAGES``).

    Args:
        arguments: None for tensors that the kernel does not read with these options.

    Returns:
        Whether it was launched. Otherwise its outputs are what memory held: indices in them must be made valid.
    """
    left_out = _left_out.get()
    if left_out is not None and left_out.covers(kernel, grid, arguments, options):
        return False
    try:
        kernel[grid](*arguments, **options)
    except Exception as error:
        stages = options.get("STAGES", 1)
        if stages < 2 or not _is_out_of_resources(error):
            raise
        logger.debug("%s: %d tiles in flight instead of %d", error, stages - 1, stages)
        return launch(kernel, grid, *arguments, **options | {"STAGES": stages - 1})
    return True


def _is_out_of_resources(error: Exception) -> bool:
    from triton.runtime.errors import OutOfResources

    return isinstance(error, OutOfResources)


def launch_named(
    group: Kernel, name: str, device: torch.device, grid: tuple[int, ...], *arguments: Any, **options: Any
) -> bool:
    """`launch` a kernel on a device, whose module imports Triton, which may be missing.

    Args:
        group: The group of kernels that fails with this one.
        name: The kernel's name within this package, such as ``pointwise.kernel.rotate``.

    Raises:
        KernelFailedError: The kernel cannot be compiled or launched on this device.
    """
    with launching(group, device):
        return launch(_named(name), grid, *arguments, **options)


@lru_cache
def _named(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(import_module(f"{__package__}.{module}"), function)


def compiled_ahead(run: Callable[[], Result], device: torch.device, agree: Callable[[bool], bool] = bool) -> Result:
    """The result of `run`, whose missing kernels are compiled all at once.

    Args:
        run: Launches kernels by `launch`. If one is missing it runs twice, first without that and later launches: what
            it then computes and writes must not matter.
        agree: Whether to run twice, given whether a kernel was missing here: processes whose runs communicate must
            run equally often.
    """
    if not _compiles_for(device):
        return run()
    for listed in _listing:  # else both would compile what both find missing
        listed.wait()
    with _compiling(_LeftOut(), device) as left_out:
        result = run()
    for thread in _background:  # which loads kernels, as no thread should during a capture
        thread.join()
    return run() if agree(left_out.everything) else result


def compile_in_background(run: Callable[[], object], device: torch.device) -> None:
    """Begin to compile the kernels that `run` launches, in a thread in which no launch takes place.

    While they compile, they are missing to `compiled_ahead`, which waits for them once it has found what else is.
    """
    if not _compiles_for(device):
        return
    listed = Event()

    def compile_all() -> None:
        try:
            with _beside_the_call(device), _compiling(_LeftOut(everything=True), device):
                run()
                listed.set()
        finally:
            listed.set()

    if started := _start(compile_all):
        _background[:] = [other for other in _background if other.is_alive()] + started
        _listing[:] = [other for other in _listing if not other.is_set()] + [listed]


_background: list[Thread] = []
_listing: list[Event] = []
"""Set once the kernels of a thread in the background have begun to compile."""


@contextmanager
def _beside_the_call(device: torch.device) -> Iterator[None]:
    """Context of a thread that lists kernels, which compile when they are launched where it fails.

    It has a stream of its own: a copy from the host would wait for the prefill that the call has queued.
    """
    try:
        with torch.cuda.stream(stream_for(device, "lists of kernels")):
            yield
    except Exception as error:
        logger.debug("kernels are compiled when they are launched: %s", error)


def _start(target: Callable[[], None]) -> list[Thread]:
    """The thread, if it can be started."""
    thread = Thread(target=target, name="hf_fastdecode_compile")
    with suppress(RuntimeError):  # no more threads can be started
        thread.start()
        return [thread]
    return []


def _compiles_for(device: torch.device) -> bool:
    return device.type == "cuda" and triton_is_installed() and not interpreted()


class _LeftOut:
    """Launches that are left out: those of missing kernels, and with `everything` all from now on."""

    def __init__(self, *, everything: bool = False) -> None:
        self.everything = everything

    def covers(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether to leave this launch out; begins to compile a missing kernel."""
        found = kernel.warmup(*arguments, grid=grid, **options)
        self.everything |= hasattr(found, "future")  # Triton's FutureKernel
        return self.everything


_left_out: ContextVar[_LeftOut | None] = ContextVar("hf_fastdecode_left_out", default=None)


@contextmanager
def _compiling(left_out: _LeftOut, device: torch.device) -> Iterator[_LeftOut]:
    """Context in which `launch` compiles missing kernels on threads; waits for them at its end."""
    from triton import AsyncCompileMode

    with _Threads(device) as threads:
        mode = AsyncCompileMode(threads, ignore_errors=True)
        try:
            mode.__enter__()
        except RuntimeError:  # the caller's mode is active
            if left_out.everything:
                raise
            yield left_out
            return
        token = _left_out.set(left_out)
        try:
            yield left_out
        finally:
            _left_out.reset(token)
            mode.__exit__(None, None, None)


class _Threads(ThreadPoolExecutor):
    """Executor for functions that return Triton's compiled kernel; does the work itself where no thread can start."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(min(_MOST_THREADS, os.cpu_count() or 1), "hf_fastdecode_compile")
        self._device = device

    def submit(self, compile_one: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        def compile_and_load() -> Any:
            kernel = compile_one()
            with suppress(Exception), torch.cuda.device(self._device):
                _ = kernel.run  # makes its launcher, and loads it
            return kernel

        try:
            return super().submit(compile_and_load)
        except RuntimeError:  # no more threads can be started
            done = Future[Any]()
            done.set_result(compile_and_load())
            return done
