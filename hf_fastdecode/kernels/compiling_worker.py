"""What the process of `compiling_process` runs: it compiles kernels into Triton's folder on disk.

It imports Triton but not PyTorch, whose import takes longer than most kernels.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from threading import Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

_MOST_THREADS = 8


class Source(NamedTuple):
    """A kernel of the package, and what Triton compiles it for.

    Attributes:
        kind: Triton's class of such sources.
        module: Where the kernel is.
        kernel: Its name.
        arguments: Types of its arguments, values of those that are compiled in, and what is known of others.
        options: Of the compilation.
    """

    kind: Any
    module: str
    kernel: str
    arguments: tuple[Any, Any, Any]
    options: dict[str, Any]


def prepare() -> None:
    """What takes a while before the first kernel, and can be done before it is known: imports, and Triton's hash."""
    with suppress(ImportError):  # internal to Triton
        from triton.runtime.cache import triton_key

        triton_key()
    for module in ("forest_decode.suffix", "row_products.kernel"):
        import_module(f".{module}", __package__)


def compile_sources(given: socket.socket, target: Any, sources: Sequence[Source]) -> None:
    """Compile for a GPU, in this order; the process ends at once when the other end of the socket is closed."""
    from triton.runtime import driver

    Thread(target=_end_with, args=(given,), daemon=True).start()
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))  # finding one would import PyTorch
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for source in sources:
            pool.submit(_compile, source, target)


def _compile(source: Source, target: Any) -> None:
    import triton

    kernel = getattr(import_module(source.module), source.kernel)
    compiled = triton.compile(source.kind(kernel, *source.arguments), target=target, options=source.options)
    with suppress(Exception):  # Triton < 3.7 compiles launchers too
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)


def _end_with(given: socket.socket) -> None:
    given.settimeout(None)
    with suppress(OSError):
        given.recv(1)
    os._exit(0)
