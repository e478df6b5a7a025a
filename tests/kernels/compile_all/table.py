"""The table of GPUs in documentation: which kernels run on each, in how much shared memory, or what does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from unittest.mock import patch

import torch
import triton

from hf_fastdecode.conversion.fit.cached_numbers import EIGHT_BITS
from hf_fastdecode.kernels.failures import Kernel
from hf_fastdecode.kernels.row_products.config import _refusal_here
from hf_fastdecode.kernels.slim_decode.api import ClusterConfig, choose_config
from hf_fastdecode.kernels.slim_decode.cluster import ClusterShape
from tools.pages import DOCS, replace_table

from .launches import Launch, launches
from .pretended import CUDA, GPUS, LARGEST, made, pretending

_HOPPER, _UNMEASURED, _REDUCED = "Hopper only", "not measured", "reduced"


def cells(
    capability: tuple[int, int], found: Iterable[Launch], compiled: Iterable[tuple[Launch, int]]
) -> dict[str, str]:
    """A cell for each group of kernels on a GPU.

    Args:
        found: What is launched there.
        compiled: Those launches that were compiled, and the bytes of shared memory that each takes.
    """
    most: dict[Kernel, int] = {}
    for launch, used in compiled:
        most[launch.group] = max(most.get(launch.group, 0), used)
    own = other = _by_group(found)
    with pretending(capability):
        if clusters := _bytes_of_clusters():
            most[Kernel.CLUSTER] = clusters
        few_rows = _refusal_here(made(1, 4096, dtype=torch.half), [made(4096, 4096)], 1) is None
    if GPUS[capability].shared_memory < LARGEST:
        with pretending(capability, LARGEST):
            other = _by_group(launches())
    shown = {}
    for group in Kernel:
        if group is Kernel.ROWS and not few_rows:
            cell = _UNMEASURED
        elif group not in most:
            cell = _HOPPER
        else:
            cell = f"{-(-most[group] // 1024)}" + f", {_REDUCED}" * (own.get(group) != other.get(group))
        shown[group.name] = cell
    return shown


def _by_group(found: Iterable[Launch]) -> dict[Kernel, set[str]]:
    groups: dict[Kernel, set[str]] = {}
    for launch in found:
        groups.setdefault(launch.group, set()).add(str(launch))
    return groups


def _bytes_of_clusters() -> int:
    """The most shared memory of slim layers on clusters, which are CUDA C++; 0 where the GPU has none."""
    found = [0]
    with patch("hf_fastdecode.kernels.slim_decode.api.cuda_bindings_are_installed", lambda: True):
        for (heads, head_dim), rank, dtype in product(
            ((32, 64), (32, 128), (16, 256)), (0, 512), (torch.half, *EIGHT_BITS)
        ):
            config = choose_config(heads, head_dim, rank, dtype, CUDA)
            if isinstance(config, ClusterConfig):
                found.append(ClusterShape(heads, head_dim, rank, 0, False, True, dtype, config).shared_bytes)
    return max(found)


def write(found: Mapping[tuple[int, int], Mapping[str, str]]) -> None:
    """Write the page's table of the cells of each GPU."""
    heads = [f"{'.'.join(map(str, one))}: {gpu.cards} ({gpu.shared_memory} KiB)" for one, gpu in GPUS.items()]
    lines = [[f"kernels (Triton {triton.__version__})", *heads, "where they do not run"], ["---"] * (len(heads) + 2)]
    for group in Kernel:
        name, other = group.value
        lines.append([name.removeprefix("the "), *(found[one][group.name] for one in GPUS), other])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    replace_table(DOCS / "limits.md", "tests.kernels.compile_all", table)
