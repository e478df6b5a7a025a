"""Calls of modules that read states, in packed passes: once for each segment of the row, see `StateLayer.by_segments`.

The module's own code, or a kernel in its place, then runs as for one prompt. What is around it, such as attention,
norms and products, runs once over the whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...cache.layers.state import StateLayer
from ...cache.shared import SharedContextCache


def by_segments(module: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """What is called in the place of a module with states, of whose rows `call` runs one after another."""

    def run(*args: Any, **kwargs: Any) -> Any:
        cache = next((one for one in (*kwargs.values(), *args) if isinstance(one, SharedContextCache)), None)
        layer = None if cache is None else cache.layers[module.layer_idx]
        return layer.by_segments(call, *args, **kwargs) if isinstance(layer, StateLayer) else call(*args, **kwargs)

    return run
