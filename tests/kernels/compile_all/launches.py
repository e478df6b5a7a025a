"""What the package launches, and which of it is to be compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from hf_fastdecode.kernels.failures import Kernel, launching

from .attention import attend_everything, attend_to_latents, prefill_everything
from .other_parts import (
    absorb_queries,
    compute_between_products,
    draw_everything,
    multiply_few_rows,
    run_experts,
    scan_tokens,
    step_states,
)
from .slim_layers import append_to_slim_caches, attend_to_slim_caches, multiply_by_stored_matrices


class Launch(NamedTuple):
    """One launch of a kernel, and the group that fails with it; tensors are their dtypes."""

    group: Kernel
    kernel: JITFunction
    arguments: tuple[Any, ...]
    grid: tuple[int, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({self.dtype}, {self.options})"

    @property
    def name(self) -> str:
        """The kernel's, in this package: several are called ``scan``."""
        return f"{self.kernel.__module__.partition('.kernels.')[2]}.{self.kernel.__name__}"

    @property
    def dtype(self) -> torch.dtype:
        """Of the first tensor: queries or logits."""
        return next(argument for argument in self.arguments if isinstance(argument, torch.dtype))

    @property
    def everything(self) -> dict[str, Any]:
        """All options, the dtype and the fields of the sampling kernel's form among them."""
        form = self.options.get("FORM")
        return {**self.options, "FORM": None, "dtype": self.dtype, **(form._asdict() if form is not None else {})}

    @property
    def tile(self) -> list[int]:
        """What decides how much shared memory a program takes."""
        names = ("BLOCK_D", "BLOCK_N", "STAGES", "columns", "HALF", "OWN", "BLOCK_H", "BLOCK_R", "BLOCK_T")
        names += ("BLOCK_M", "BLOCK_C", "BLOCK_K", "BLOCK_P", "BLOCK_S", "BLOCK_V", "BLOCK_W", "DISTANCES")
        return [self.everything.get(name, 1) for name in names]

    def facets(self) -> Iterator[tuple[Any, ...]]:
        """What is compiled at least once: every value of an option, and every pair of sizes of a tile."""
        yield from ((self.name, *option) for option in self.everything.items() if option[0] != "vocab")
        yield from ((self.name, *pair) for pair in combinations(enumerate(self.tile), 2))


def launches() -> list[Launch]:
    """What the package launches on the GPU that is pretended."""
    found: list[Launch] = []
    entered: list[Kernel] = []

    def record(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        tensors = tuple(part.dtype if isinstance(part, Tensor) else part for part in arguments)
        found.append(Launch(entered[-1], kernel, tensors, grid, options))

    with (
        patch.object(JITFunction, "run", record),
        patch.object(launching, "__enter__", lambda scope: entered.append(scope._kernel)),
    ):
        attend_everything()
        attend_to_latents()
        prefill_everything()
        draw_everything()
        attend_to_slim_caches()
        append_to_slim_caches()
        multiply_by_stored_matrices()
        compute_between_products()
        absorb_queries()
        multiply_few_rows()
        run_experts()
        step_states()
        scan_tokens()
    return found


def to_compile(found: Sequence[Launch]) -> list[Launch]:
    """As few of these launches as show every facet, and the largest tiles."""
    unique = {str(launch): launch for launch in sorted(found, key=lambda launch: -prod(launch.tile))}
    facets = {name: set(launch.facets()) for name, launch in unique.items()}
    missing = set().union(*facets.values())
    largest = {(launch.name, launch.tile[0]): name for name, launch in reversed(unique.items())}
    kept = list(largest.values())
    missing.difference_update(*(facets[name] for name in kept))
    while missing:
        kept.append(max(facets, key=lambda name: len(facets[name] & missing)))
        missing -= facets[kept[-1]]
    return [unique[name] for name in kept]
