"""Launches of what a model computes beside attention: norms, products, experts, and the tokens that are drawn."""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import torch

from hf_fastdecode.kernels.experts import api as grouped
from hf_fastdecode.kernels.experts.api import experts, largest, route
from hf_fastdecode.kernels.experts.config import MOST_OF_AN_EXPERT, MOST_PAIRS, Gate, Routing, Weights
from hf_fastdecode.kernels.pointwise.api import (
    Activation,
    GatedNormForm,
    NormForm,
    RotaryForm,
    gated,
    gated_rms_norm,
    rms_norm,
    rotate,
)
from hf_fastdecode.kernels.row_products.api import gated_product, row_products
from hf_fastdecode.kernels.row_products.config import MOST_PORTABLE_ROWS
from hf_fastdecode.kernels.sampling.api import Settings, sample
from hf_fastdecode.kernels.state_steps.api import Gates, convolve, delta_rule, scan

from .pretended import CUDA, Claimed


def draw_everything() -> None:
    """A token from vocabularies of all sizes, with every feature of the sampling kernel."""
    switches = product((1000, 32_000, 151_936), (torch.bfloat16, torch.float16, torch.float32), *[(False, True)] * 5)
    for vocabulary, dtype, greedy, top_k, typical, penalty, ends in switches:
        marks = torch.empty(2, vocabulary, dtype=torch.int8, device=CUDA) if ends else None
        features = {"top_k": top_k, "typical": typical, "penalty": penalty}
        settings = Settings("cpu", greedy=greedy, eos_token_ids=[1, 2] * ends, suppressed=marks, **features)
        logits = torch.empty(3, vocabulary, dtype=dtype, device=CUDA)
        seen = torch.empty(3, (vocabulary + 31) // 32, dtype=torch.int32, device=CUDA)
        sample(logits, torch.empty(3, dtype=torch.int32, device=CUDA), settings, seen=seen)


def compute_between_products() -> None:
    """RMSNorm, rotary embedding and gated activations of models of many widths."""
    for dtype, columns in product((torch.bfloat16, torch.float16), (64, 80, 128, 1000, 4096, 16384)):
        x = torch.empty(3, columns, dtype=dtype, device=CUDA)
        for form in NormForm:
            rms_norm(x, x[0].as_subclass(Claimed), 1e-5, form)
        for gated_form in GatedNormForm:
            gated_rms_norm(x, x, x[0].as_subclass(Claimed), 1e-5, gated_form)
        for activation in Activation:
            gated(x, x, activation)
    for dtype, (head_dim, rotary), heads in product(
        (torch.bfloat16, torch.float16), ((64, 64), (80, 32), (128, 128), (256, 256)), ((32, 8), (12, 1))
    ):
        queries, keys = (torch.empty(2, count, 5, head_dim, dtype=dtype, device=CUDA) for count in heads)
        cos = torch.empty(1, 5, rotary, dtype=dtype, device=CUDA)
        for form in RotaryForm:
            rotate(queries, keys, cos, cos, form)
        rotate(queries, keys, cos[..., : rotary // 2], cos[..., : rotary // 2], RotaryForm.ROUNDED, halves=True)


def multiply_few_rows() -> None:
    """Weights with and without biases, and gates, of all numbers of rows and of a width that 128 does not divide."""
    hopper = torch.cuda.get_device_capability(CUDA)[0] == 9
    counts = (1, 17, 33, 128) if hopper else (1, 17)
    for dtype, rows, width in product((torch.bfloat16, torch.float16), counts, (4096, 2880)):
        inputs, weight = (torch.empty(count, width, dtype=dtype, device=CUDA) for count in (rows, 4096))
        bias = torch.empty(4096, dtype=dtype, device=CUDA)
        for own in (None, bias):
            row_products(inputs, [weight] * 3, [own] * 3)
        if rows <= MOST_PORTABLE_ROWS:
            row_products(inputs, [weight] * 2, [None] * 2, dtype=torch.float32)
        for activation in Activation:
            gated_product(inputs, weight, weight, (None, None), activation)


def run_experts() -> None:
    """Experts of gpt-oss, Qwen3 and Mixtral, of all numbers of pairs."""
    models = (
        (32, 4, 2880, 2880, True),
        (128, 8, 2048, 768, False),
        (8, 2, 4096, 14336, False),
    )
    for dtype, (count, per_row, hidden, inner, transposed) in product((torch.bfloat16, torch.float16), models):
        shapes = [(count, 2 * inner, hidden), (count, hidden, inner)]
        if transposed:
            shapes = [(first, third, second) for first, second, third in shapes]
        parts = [torch.empty(shape, dtype=dtype, device=CUDA) for shape in shapes]
        biases = [torch.empty(count, width, dtype=dtype, device=CUDA) for width in (2 * inner, hidden)]
        most = min(MOST_PAIRS, MOST_OF_AN_EXPERT * count) // per_row
        for rows in (1, 8, most // 4, most // 2, most):
            x = torch.empty(rows, hidden, dtype=dtype, device=CUDA)
            chosen = torch.empty(rows, per_row, dtype=torch.int64, device=CUDA)
            shares = torch.empty(rows, per_row, dtype=dtype, device=CUDA)
            layouts = ((*biases, True, True), (*biases, True, False)) if transposed else ((None, None, False, False),)
            for layout, activation in product(layouts, Activation):
                experts(x, Weights(*parts, *layout), chosen, shares, Gate(activation))
        largest(torch.empty(3, count, dtype=dtype, device=CUDA), per_row)
        x, pairs = torch.empty(3, hidden, dtype=dtype, device=CUDA), 3 * per_row
        chosen = torch.empty(3, per_row, dtype=torch.int64, device=CUDA)
        gate_up = torch.empty(pairs, 2 * inner, dtype=dtype, device=CUDA)
        listed = (chosen.view(-1), chosen.view(-1), chosen)
        with (
            patch.object(grouped, "_sorted", lambda *_, listed=listed: listed),
            patch.object(grouped, "_grouped_products", lambda *_, gate_up=gate_up: gate_up),
        ):
            for layout, activation in product(layouts, Activation):
                grouped.grouped_experts(x, Weights(*parts, *layout), chosen, shares, Gate(activation))
        router = torch.empty(count, hidden, dtype=dtype, device=CUDA)
        bias = torch.empty(count, dtype=dtype, device=CUDA)
        for rows, own, first, whole in ((1, None, True, True), (16, bias, False, False), (32, None, True, False)):
            x = torch.empty(rows, hidden, dtype=dtype, device=CUDA)
            route(x, router, own, Routing(per_row, first, whole))


def step_states() -> None:
    """Steps of layers with states of many sizes."""
    for dtype, kept in product((torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)):

        def made(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=CUDA)

        for (length, taps), silu in product(((4, 4), (3, 3), (3, 4)), (False, True)):
            convolve(made(3, 8192), made(3, 8192, length), made(8192, taps), made(8192) if silu else None, silu=silu)
        for key_heads, heads, key_dim, value_dim in ((16, 32, 128, 128), (4, 4, 24, 40), (2, 2, 256, 256)):
            keys, states = made(3, key_heads, key_dim), made(3, heads, key_dim, value_dim, dtype=kept)
            for gates in (None, Gates(made(heads), made(heads))):
                delta_rule(keys, keys, made(3, heads, value_dim), made(3, heads), made(3, heads), states, gates)
        for groups, heads, width, size in ((8, 128, 64, 128), (1, 3, 24, 16), (1, 2, 128, 256)):
            inputs, rates, of_heads = made(3, groups, size), made(heads, dtype=torch.float32), made(heads)
            states = made(3, heads, width, size, dtype=kept)
            scan(made(3, heads, width), made(3, heads), rates, inputs, inputs, of_heads, of_heads, states)
