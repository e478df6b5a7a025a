"""Ways in which models compute the same formula: they differ in where numbers are rounded to the input's dtype."""

from __future__ import annotations

from enum import Enum


class NormForm(Enum):
    """How ``x / rms(x)``, computed in fp32, is multiplied by the weight."""

    ROUNDED = 0
    """``weight * normalized.to(dtype)``, as in Llama."""

    WHOLE = 1
    """``(weight * normalized).to(dtype)``, as in OLMo 2."""

    PLUS_ONE = 2
    """``((1 + weight) * normalized).to(dtype)``, as in Gemma."""


class GatedNormForm(Enum):
    """Where ``silu(gate)``, computed in fp32, comes in; the weight multiplies rounded numbers, as `ROUNDED`."""

    AFTER = 0
    """``(weight * normalized) * silu(gate)``, as in Qwen3-Next."""

    BEFORE = 1
    """``weight * normalized(x * silu(gate))``, in groups of numbers, as in Mamba-2."""


class RotaryForm(Enum):
    """How ``x * cos + rotate_half(x) * sin`` is rounded."""

    ROUNDED = 0
    """Products and sum, as PyTorch's operators on half precision do; most models."""

    WHOLE = 1
    """The sum alone: the model rotates in fp32."""


class Activation(Enum):
    """The function of the gate, whose value is rounded before it is multiplied."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
