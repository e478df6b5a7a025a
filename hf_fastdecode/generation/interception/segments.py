"""Calls of modules that read states, in packed passes, where each segment of the row has states of its own.

Kernels in the place of a module's code, or of functions in it, may take all segments at once. Otherwise the module
runs once for each, see `StateLayer.by_segments`, as for one prompt. What is around it, such as attention, norms and
products, runs once over the whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...cache.layers.state import StateLayer
from ...cache.shared import SharedContextCache


def by_segments(
    module: Any, call: Callable[..., Any], at_once: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The call of a module with states, in which `call` runs for one segment of a packed row after another.

    `at_once` is called for packed rows with the cache's layer first; it returns None where it does not serve one.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        cache = next((one for one in (*kwargs.values(), *args) if isinstance(one, SharedContextCache)), None)
        layer = None if cache is None else cache.layers[module.layer_idx]
        if not isinstance(layer, StateLayer):
            return call(*args, **kwargs)
        output = at_once(layer, *args, **kwargs) if at_once is not None and layer.state.current.segments else None
        return layer.by_segments(call, *args, **kwargs) if output is None else output

    return run
