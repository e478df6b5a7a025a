"""Mamba-2's scan over many tokens: ``python -m benchmarks.scans.mamba`` on a GPU.

A line for each shape and way: this package's kernel, transformers' code in PyTorch, and mamba-ssm where it is
installed. Times are of a call after the first, errors of outputs and states against fp64, memory at its highest.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from hf_fastdecode.kernels.state_scans import api, reference

from ..operator_time import replays
from .delta_rule import seconds


class Shape(NamedTuple):
    """Segments of one packed row, and heads: those of Nemotron-H-8B, Falcon-H1-0.5B, and Zamba2-1.2B."""

    lengths: tuple[int, ...]
    groups: int = 8
    heads: int = 128
    width: int = 64
    size: int = 128


SHAPES = (
    Shape((4096,)),
    Shape((4095,)),
    Shape((512,) * 16),
    Shape((1, 63, 64, 65, 2048, 8191)),
    Shape((32768,)),
    Shape((4096,), 1, 24, 64, 128),
    Shape((4096,), 1, 64, 64, 64),
)
_CHUNK = 128  # of transformers' code and of mamba-ssm, as in Nemotron-H's config
_ORACLE = 4096  # tokens at most of a shape that is compared with fp64, token by token
_OF_TRANSFORMERS = 8192  # tokens at most, for its memory


def inputs_of(shape: Shape) -> list[Any]:
    """Random tokens, as a layer has them after its convolution: steps from some thousandths to a tenth."""
    tokens, channels = sum(shape.lengths), shape.groups * shape.size
    generator = torch.Generator("cuda").manual_seed(tokens)

    def half(*of: int) -> Tensor:
        return torch.randn(of, generator=generator, device="cuda").bfloat16()

    mixed = half(tokens, shape.heads * shape.width + 2 * channels)
    x, given, read = mixed.split([shape.heads * shape.width, channels, channels], 1)
    x = x.unflatten(1, (-1, shape.width))
    given, read = (one.unflatten(1, (-1, shape.size)) for one in (given, read))
    rates, biases = -torch.arange(1, shape.heads + 1, device="cuda").float(), half(shape.heads) - 4
    starts = F.pad(torch.tensor(shape.lengths, device="cuda").cumsum(0), (1, 0)).int()
    return [x, half(tokens, shape.heads), rates, given, read, half(shape.heads), biases, starts]


def ours(*arguments: Any) -> tuple[Tensor, Tensor]:
    return api.scan(*arguments)


def by_segment(run: Callable[..., Any], *arguments: Any) -> tuple[Tensor, Tensor]:
    """Transformers' function, or mamba-ssm's of the same arguments, segment by segment."""
    x, steps, rates, given, read, skips, biases, starts = arguments
    named = {"D": skips, "dt_bias": biases, "dt_softplus": True, "return_final_states": True, "chunk_size": _CHUNK}
    found = []
    for start, end in pairwise(starts.tolist()):
        number, step, one, other = (part[None, start:end] for part in (x, steps, given, read))
        found.append(run(number, step, rates, one, other, **named))
    return torch.cat([out[0] for out, _ in found]), torch.cat([state for _, state in found])


def main() -> None:
    """Measure and print."""
    ways: dict[str, Callable[..., Any]] = {"ours": ours}
    ways["transformers"] = partial(by_segment, inspect.unwrap(mamba2_chunk_scan))
    if importlib.util.find_spec("mamba_ssm"):
        package = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
        ways["mamba-ssm"] = partial(by_segment, package.mamba_chunk_scan_combined)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for shape in SHAPES:
        arguments, exact = inputs_of(shape), None
        if sum(shape.lengths) <= _ORACLE:
            wide = [one if one.dtype == torch.int32 else one.double() for one in arguments]
            exact = reference.scan(*wide)
        for name, way in ways.items():
            if name == "transformers" and sum(shape.lengths) > _OF_TRANSFORMERS:
                continue
            call = partial(way, *arguments)
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            try:
                first, times = seconds(call), sorted(replays(call, 20))
            except torch.OutOfMemoryError:
                print(f"{shape}: {name}: out of memory", flush=True)
                continue
            memory = (torch.cuda.max_memory_allocated() - held) / sum(shape.lengths) / 1e3
            line = f"{shape}: {name}: first {first:.2f} s, then {1e3 * times[10]:.3f} ms, {memory:.0f} kB per token"
            if exact is not None:
                errors = [float((one - two).norm() / two.norm()) for one, two in zip(call(), exact, strict=True)]
                line += f", errors of outputs and states {errors[0]:.2e}, {errors[1]:.2e}"
            print(line, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
