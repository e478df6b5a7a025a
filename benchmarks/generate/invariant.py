"""Log-probabilities of steps beside those of forward passes: ``python -m benchmarks.generate.invariant [SHAPE ...]``.

In bf16, for each value of ``log_probs``, and eager and captured steps where it has both: seconds of a step and of a
forward pass over the finished rows, and how many log-probabilities of the call's tokens have the bits of that pass's.
Then products by the kernel of ``log_probs="invariant"`` beside PyTorch's. Without a GPU, a tiny model by Triton's
interpreter (``TRITON_INTERPRET=1``), whose times mean nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as stock_linear
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode.kernels.invariant.api import linear
from hf_fastdecode.measurement.calls import wall_samples
from hf_fastdecode.measurement.shapes import random_model

from ..operator_time import time_operator

WAYS: dict[str, dict[str, Any]] = {
    "auto, eager": {"log_probs": "auto", "mode": "eager"},
    "auto, graph": {"log_probs": "auto", "mode": "graph"},
    "trainer": {"log_probs": "trainer"},
    "invariant": {"log_probs": "invariant"},
}

PRODUCTS: tuple[Callable[..., Any], ...] = linear.run, stock_linear


def log_probs_of_pass(model: PreTrainedModel, sequences: Tensor, context: int) -> Tensor:
    """Log-probabilities ``[rows, new tokens]`` by a forward pass, a row's logits at a time in fp32."""
    mask = torch.ones_like(sequences)
    logits = model(sequences, attention_mask=mask, use_cache=False, logits_to_keep=sequences.shape[1] - context + 1)
    rows = zip(logits.logits[:, :-1], sequences[:, context:], strict=True)
    return torch.stack([row.float().log_softmax(-1).gather(1, ids[:, None])[:, 0] for row, ids in rows])


def measure(model: PreTrainedModel, way: str, prompts: Tensor, *, samples: int, tokens: int) -> str:
    """One line about a way."""
    device, context = model.device, prompts.shape[1]

    def generate(count: int) -> tuple[Tensor, Tensor]:
        recorder = fd.TokenLogProbs()
        torch.manual_seed(0)
        drawn: Any = model.generate(
            prompts,
            do_sample=True,
            num_return_sequences=samples,
            min_new_tokens=count,
            max_new_tokens=count,
            logits_processor=[recorder],
        )
        return drawn, recorder.of(drawn[:, context:])

    with fd.enabled(model, **WAYS[way]), torch.no_grad():
        sequences, of_steps = generate(tokens)
        of_pass = log_probs_of_pass(model, sequences, context)
        long, short, forward = (
            sorted(wall_samples(run, device, repeats=3, budget_s=60))[1]
            for run in (
                lambda: generate(tokens),
                lambda: generate(1),
                lambda: log_probs_of_pass(model, sequences, context),
            )
        )
    same, most = (of_steps == of_pass).float().mean().item(), (of_steps - of_pass).abs().max().item()
    step = f"{way}: a step {1e3 * (long - short) / (tokens - 1):.2f} ms, the first token {short:.3f} s"
    return f"{step}, a pass {forward:.3f} s; same bits {same:.1%}, largest difference {most:.2g}"


def main() -> None:
    """Measure and print."""
    gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16
    calls = ((4, 1000, 16), (1, 8000, 64), (1, 1000, 1)) if gpu else ((2, 8, 2),)
    print(torch.cuda.get_device_name(device) if gpu else "CPU", torch.__version__)
    for shape in sys.argv[1:] or (["qwen3-4b", "8b-gqa"] if gpu else ["tiny"]):
        model = random_model(shape, device, dtype)
        for (count, context, samples), way in product(calls, WAYS):
            if not gpu and "graph" in WAYS[way].values():
                continue
            prompts = torch.randint(3, 500, (count, context), generator=torch.Generator().manual_seed(0)).to(device)
            found = measure(model, way, prompts, samples=samples, tokens=128 if gpu else 3)
            print(f"{shape}, {count} x {context} tokens, {samples} samples, {found}", flush=True)
        sizes = model.config.hidden_size, model.config.intermediate_size
        for (width, columns), rows in product((sizes, sizes[::-1]), (1, 64, 8192) if gpu else (1, 3)):
            x, weight = (torch.randn(size, width, device=device, dtype=dtype) for size in (rows, columns))
            times = (time_operator([partial(run, x, weight)], device)[0].p50 for run in PRODUCTS)
            ours, stock = (1e6 * seconds for seconds in times)
            print(f"{shape}, {rows} x {width} x {columns}: {ours:.0f} us, PyTorch {stock:.0f} us", flush=True)


if __name__ == "__main__":
    main()
