"""Launches of what a model computes beside attention: norms, products, experts, and the tokens that are drawn."""

from __future__ import annotations

from functools import partial
from itertools import product
from unittest.mock import patch

import torch

from hf_fastdecode.kernels.experts import api as grouped
from hf_fastdecode.kernels.experts.api import Norm, experts, largest, route
from hf_fastdecode.kernels.experts.config import MOST_OF_AN_EXPERT, MOST_PAIRS, Gate, Routing, Shared, Weights
from hf_fastdecode.kernels.latent_queries.api import Angles, Rotation, absorb
from hf_fastdecode.kernels.pointwise.api import (
    Activation,
    GatedNormForm,
    HeadNorms,
    NormForm,
    Plus,
    RotaryForm,
    gated,
    gated_gradients,
    gated_rms_norm,
    rms_norm,
    rms_norm_gradients,
    rotate,
)
from hf_fastdecode.kernels.row_products.api import gated_product, row_products
from hf_fastdecode.kernels.row_products.config import MOST_PORTABLE_ROWS
from hf_fastdecode.kernels.sampling.api import Settings, sample
from hf_fastdecode.kernels.state_scans import api as state_scans
from hf_fastdecode.kernels.state_steps.api import Gates, convolve, delta_rule, scan

from .pretended import CUDA, Claimed, made


def draw_everything() -> None:
    """A token from vocabularies of all sizes, with every feature of the sampling kernel."""
    switches = product((1000, 32_000, 151_936), (torch.bfloat16, torch.float16, torch.float32), *[(False, True)] * 5)
    for vocabulary, dtype, greedy, top_k, typical, penalty, ends in switches:
        marks = made(2, vocabulary, dtype=torch.int8) if ends else None
        features = {"top_k": top_k, "typical": typical, "penalty": penalty}
        settings = Settings("cpu", greedy=greedy, eos_token_ids=[1, 2] * ends, suppressed=marks, **features)
        logits = made(3, vocabulary, dtype=dtype)
        seen = made(3, (vocabulary + 31) // 32, dtype=torch.int32)
        sample(logits, made(3, dtype=torch.int32), settings, seen=seen)


def compute_between_products() -> None:
    """RMSNorm, rotary embedding and gated activations of models of many widths."""
    for dtype, columns in product((torch.bfloat16, torch.float16), (64, 80, 128, 1000, 4096, 16384)):
        x = made(3, columns, dtype=dtype)
        for form in NormForm:
            rms_norm(x, x[0].as_subclass(Claimed), 1e-5, form)
            for of_weight in (False, True):
                rms_norm_gradients(x, x, x[0].as_subclass(Claimed), 1e-5, form, of_weight=of_weight)
        for gated_form in GatedNormForm:
            gated_rms_norm(x, x, x[0].as_subclass(Claimed), 1e-5, gated_form)
        for activation in Activation:
            gated(x, x, activation)
            gated_gradients(x, x, x, activation)
    for dtype, (head_dim, rotary), heads in product(
        (torch.bfloat16, torch.float16), ((64, 64), (80, 32), (128, 128), (256, 256)), ((32, 8), (12, 1))
    ):
        queries, keys = (made(2, count, 5, head_dim, dtype=dtype) for count in heads)
        cos = made(1, 5, rotary, dtype=dtype)
        for form in RotaryForm:
            rotate(queries, keys, cos, cos, form)
            rotate(queries, keys, cos, cos, form, backward=True)
            for norm in NormForm:
                weight = made(head_dim, dtype=dtype)
                rotate(queries, keys, cos, cos, form, norms=HeadNorms(weight, weight, 1e-6, norm, queries, keys))
        rotate(queries, keys, cos[..., : rotary // 2], cos[..., : rotary // 2], RotaryForm.ROUNDED, halves=True)


def absorb_queries() -> None:
    """Heads of DeepSeek, GLM-4.7-Flash and MiniCPM3, of all numbers of rows."""
    sizes = ((16, 128, 64, 128, 512), (20, 192, 64, 256, 512), (40, 64, 32, 64, 256))
    for dtype, (heads, key, rotary, value, latent) in product((torch.bfloat16, torch.float16), sizes):
        weight, factor = made(heads * (key + value), latent, dtype=dtype), made(latent, dtype=dtype)
        for rows, (pairs, stays) in product((1, 32, 128), ((True, True), (True, False), (False, False))):
            query, compressed = made(rows, heads, key + rotary, dtype=dtype), made(rows, latent + rotary, dtype=dtype)
            cos = made(rows, rotary // 2, 2)[..., 0] if stays else made(1, rotary, dtype=dtype)
            rotation = Rotation(RotaryForm.WHOLE if stays else RotaryForm.ROUNDED, pairs, stays)
            absorb(query, compressed, factor, weight, 1e-6, Angles(cos, cos), rotation)


def multiply_few_rows() -> None:
    """Weights with and without biases, and gates, of all numbers of rows and of a width that 128 does not divide."""
    hopper = torch.cuda.get_device_capability(CUDA)[0] == 9
    counts = (1, 17, 33, 128) if hopper else (1, 17)
    for dtype, rows, width in product((torch.bfloat16, torch.float16), counts, (4096, 2880)):
        inputs, weight = (made(count, width, dtype=dtype) for count in (rows, 4096))
        bias = made(4096, dtype=dtype)
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
        parts = [made(*shape, dtype=dtype) for shape in shapes]
        biases = [made(count, width, dtype=dtype) for width in (2 * inner, hidden)]
        most = min(MOST_PAIRS, MOST_OF_AN_EXPERT * count) // per_row
        for rows in (1, 8, most // 4, most // 2, most):
            x = made(rows, hidden, dtype=dtype)
            chosen = made(rows, per_row, dtype=torch.int64)
            shares = made(rows, per_row, dtype=dtype)
            layouts = ((*biases, True, True), (*biases, True, False)) if transposed else ((None, None, False, False),)
            for layout, activation in product(layouts, Activation):
                sums = experts(x, Weights(*parts, *layout), chosen, shares, Gate(activation))
                for norm in (None, *(Norm(Plus(x, x), made(hidden, dtype=dtype), 1e-6, form) for form in NormForm)):
                    sums.added_up(norm)
            if not transposed:
                joint = made(2 * inner, hidden, dtype=dtype)
                shared = Shared(joint, joint, made(hidden, 2 * inner, dtype=dtype))
                experts(x, Weights(*parts), chosen, shares, Gate(Activation.SILU), shared=shared).added_up()
        largest(made(3, count, dtype=dtype), per_row)
        x, pairs = made(3, hidden, dtype=dtype), 3 * per_row
        chosen = made(3, per_row, dtype=torch.int64)
        gate_up = made(pairs, 2 * inner, dtype=dtype)
        listed = (chosen.view(-1), chosen.view(-1), chosen)
        with (
            patch.object(grouped, "_sorted", lambda *_, listed=listed: listed),
            patch.object(grouped, "_grouped_products", lambda *_, gate_up=gate_up: gate_up),
        ):
            for layout, activation in product(layouts, Activation):
                grouped.grouped_experts(x, Weights(*parts, *layout), chosen, shares, Gate(activation))
        router = made(count, hidden, dtype=dtype)
        bias = made(count, dtype=dtype)
        for rows, own, first, whole in ((1, None, True, True), (16, bias, False, False), (32, None, True, False)):
            x = made(rows, hidden, dtype=dtype)
            route(x, router, own, Routing(per_row, first, whole))
        for rows, groups, own in ((1, 1, made(count, hidden)), (128, 4, made(count, hidden)), (128, 1, router)):
            x = made(rows, hidden, dtype=dtype)
            routing = Routing(per_row, True, True, wide=True, groups=groups, kept=-(-3 * groups // 4))
            route(x, own, None, routing)
            route(x, own, made(count), routing._replace(corrected=True, normed=groups > 1))


def step_states() -> None:
    """Steps of layers with states of many sizes."""
    for dtype, kept in product((torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)):
        half = partial(made, dtype=dtype)
        for (length, taps), silu in product(((4, 4), (3, 3), (3, 4)), (False, True)):
            convolve(half(3, 8192), half(3, 8192, length), half(8192, taps), half(8192) if silu else None, silu=silu)
        for key_heads, heads, key_dim, value_dim in ((16, 32, 128, 128), (4, 4, 24, 40), (2, 2, 256, 256)):
            keys, states = half(3, key_heads, key_dim), made(3, heads, key_dim, value_dim, dtype=kept)
            for gates in (None, Gates(half(heads), half(heads))):
                delta_rule(keys, keys, half(3, heads, value_dim), half(3, heads), half(3, heads), states, gates)
        for groups, heads, width, size in ((8, 128, 64, 128), (1, 3, 24, 16), (1, 2, 128, 256)):
            inputs, rates, of_heads = half(3, groups, size), made(heads), half(heads)
            states = made(3, heads, width, size, dtype=kept)
            scan(half(3, heads, width), half(3, heads), rates, inputs, inputs, of_heads, of_heads, states)


def scan_tokens() -> None:
    """Many tokens through convolutions, the gated delta rule and Mamba-2, from zeros and from states."""
    starts = made(3, dtype=torch.int32)
    sizes = ((16, 32, 128, 128), (2, 2, 96, 192), (1, 2, 24, 40))
    for dtype, resumed in product((torch.bfloat16, torch.float16), (False, True)):
        half = partial(made, dtype=dtype)
        for channels, length, taps in ((8192, 4, 4), (96, 3, 4)):
            states, bias = half(2, channels, length) if resumed else None, half(channels) if resumed else None
            for x in (half(70, channels), half(channels, 70).mT.as_subclass(Claimed)):
                state_scans.convolve(x, starts, states, half(channels, taps), bias, silu=not resumed, length=length)
        for key_heads, heads, key_dim, value_dim in sizes:
            keys, value, beta = half(70, key_heads, key_dim), half(70, heads, value_dim), half(70, heads)
            states = made(2, heads, key_dim, value_dim) if resumed else None
            state_scans.delta_rule(keys, keys, value, made(70, heads), beta, starts, states)
            state_scans.delta_rule(keys, keys, value, beta, beta, starts, states, Gates(made(heads), half(heads)))
        for groups, heads, width, size in ((8, 128, 64, 128), (1, 3, 24, 16), (1, 2, 128, 256)):
            tokens, given = (half(70, heads, width), half(70, heads)), half(70, groups, size)
            states = made(2, heads, width, size) if resumed else None
            state_scans.scan(*tokens, made(heads), given, given, half(heads), half(heads), starts, states)
