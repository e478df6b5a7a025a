"""The gated delta rule and its convolution over many tokens: ``python -m benchmarks.scans.delta_rule`` on a GPU.

A line for each shape and way: this package's kernels, transformers' code in PyTorch, and flash-linear-attention where
it is installed. The first call of the first shape compiles and tunes; those of others should not. Errors are against
fp64.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, torch_chunk_gated_delta_rule

from hf_fastdecode.kernels.state_scans import api, reference

from ..operator_time import replays


class Shape(NamedTuple):
    """Segments of one packed row, and heads: those of Qwen3.5-4B and Qwen3-Next-80B-A3B."""

    lengths: tuple[int, ...]
    key_heads: int = 16
    heads: int = 32
    width: int = 128


SHAPES = (
    Shape((4096,)),
    Shape((4095,)),
    Shape((512,) * 16),
    Shape((256,) * 8),
    Shape((1, 63, 64, 65, 2048, 8191)),
    Shape((32768,)),
)
_ORACLE = 4096  # tokens at most of a shape that is compared with fp64, token by token


class Inputs:
    """Random tokens of a shape, as a layer has them after its projections."""

    def __init__(self, shape: Shape):
        tokens, sizes = sum(shape.lengths), (2 * shape.key_heads, shape.heads)
        generator = torch.Generator("cuda").manual_seed(sum(shape.lengths))

        def half(*of: int) -> Tensor:
            return torch.randn(of, generator=generator, device="cuda").bfloat16()

        self.starts = F.pad(torch.tensor(shape.lengths, device="cuda").cumsum(0), (1, 0)).int()
        self.mixed, self.weight = half(tokens, sum(sizes) * shape.width), half(sum(sizes) * shape.width, 4)
        split = self.mixed.view(tokens, -1, shape.width).split([shape.key_heads, shape.key_heads, shape.heads], 1)
        self.query, self.key, self.value = split
        self.decay = -half(tokens, shape.heads).float().exp() / 8
        self.beta = half(tokens, shape.heads).sigmoid()

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value, self.decay, self.beta

    @property
    def arguments(self) -> list[Any]:
        return [*self.tokens, self.starts, None]


def ours(x: Inputs) -> tuple[Tensor, Tensor]:
    return api.delta_rule(*x.arguments)


def transformers(x: Inputs) -> tuple[Tensor, Tensor]:
    """Segment by segment."""
    run, found = inspect.unwrap(torch_chunk_gated_delta_rule), []
    for start, end in pairwise(x.starts.tolist()):
        query, key, value, decay, beta = (one[None, start:end] for one in x.tokens)
        query, key = (one.repeat_interleave(value.shape[2] // one.shape[2], 2) for one in (query, key))
        named = {"g": decay, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        found.append(run(query, key, value, **named))
    return torch.cat([out[0] for out, _ in found]), torch.cat([state for _, state in found])


def fla(x: Inputs) -> tuple[Tensor, Tensor]:
    run = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    query, key, value, decay, beta = (one[None] for one in x.tokens)
    named = {"g": decay, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, state = run(query, key, value, cu_seqlens=x.starts.long(), **named)
    return out[0], state


def convolution(x: Inputs) -> tuple[Tensor, Tensor]:
    return api.convolve(x.mixed, x.starts, None, x.weight, None, silu=True, length=4)


def convolution_of_transformers(x: Inputs) -> Tensor:
    """Over the row as one segment."""
    out: Tensor = inspect.unwrap(causal_conv1d_fn)(x.mixed.T[None], x.weight, None, activation="silu")
    return out


def seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    """Measure and print."""
    ways: dict[str, Callable[[Inputs], Any]] = {"ours": ours, "transformers": transformers}
    if importlib.util.find_spec("fla"):
        ways["fla"] = fla
    ways |= {"convolution: ours": convolution, "convolution: transformers": convolution_of_transformers}
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for shape in SHAPES:
        x = Inputs(shape)
        exact = None
        if sum(shape.lengths) <= _ORACLE:
            wide: list[Any] = [one.double() for one in x.tokens]
            exact = reference.delta_rule(*wide, *x.arguments[-2:])
        for name, way in ways.items():
            first, times = seconds(partial(way, x)), sorted(replays(partial(way, x), 20))
            line = f"{shape}: {name}: first {first:.2f} s, then {1e3 * times[10]:.3f} ms"
            if exact is not None and "convolution" not in name:
                errors = [float((one - two).norm() / two.norm()) for one, two in zip(way(x), exact, strict=True)]
                line += f", errors of outputs and states {errors[0]:.2e}, {errors[1]:.2e}"
            print(line, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
