"""The `generate` calls that a program makes of a model: seconds, tokens prefilled, and which path they took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode.forward import seam
from hf_fastdecode.generation.report import ForwardReport
from hf_fastdecode.measurement.calls import begin_peak, idle_time, peak_over

CONTINUOUS_BATCHING = "continuous batching"
"""The path of transformers' `generate_batch`."""


@dataclass
class Call:
    """One `generate` call.

    Attributes:
        seconds: Wall time.
        rows: Sequences returned.
        padded_length: Length of the prompts with padding.
        prefilled_tokens: Tokens run through the model before the decode steps; of continuous batching, which does not
            tell, all tokens of the prompts.
        path: ``stock``, ``shared``, ``failed`` or `CONTINUOUS_BATCHING`.
        reason: Why this path; empty when the model is not enabled. Of continuous batching its attention.
        extra_bytes: Peak memory over what was held before, on CUDA.
        inputs: `input_ids` and `attention_mask`, where they were passed by name.
    """

    seconds: float
    rows: int
    padded_length: int
    prefilled_tokens: int
    path: str
    reason: str
    extra_bytes: int | None
    inputs: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Calls:
    """The calls of one run of a program."""

    made: list[Call] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds inside `generate`."""
        return sum(call.seconds for call in self.made)

    @property
    def prefilled_tokens(self) -> int:
        """Tokens that all calls prefilled."""
        return sum(call.prefilled_tokens for call in self.made)

    @property
    def paths(self) -> set[str]:
        """The paths that calls took; the reasons stand in `made`."""
        return {call.path for call in self.made}


@contextmanager
def recorded(model: PreTrainedModel) -> Iterator[Calls]:
    """Record an instance's `generate` and `generate_batch` calls for a block, stock or enabled, whoever makes them."""
    calls, inner, inner_batch = Calls(), model.generate, model.generate_batch

    def generate(*args: Any, **kwargs: Any) -> Any:
        output, seconds, extra_bytes = _measured(model, inner, *args, **kwargs)
        prompts = next(value for value in (*args, kwargs.get("inputs"), kwargs.get("input_ids")) if value is not None)
        rows, padded_length = (output if isinstance(output, Tensor) else output.sequences).shape[0], prompts.shape[1]
        last, tokens, path, reason = fd.explain(model).last_call, rows * padded_length, "stock", ""
        if last is not None:
            tokens, path, reason = last.prefilled_tokens if last.path == "shared" else tokens, last.path, last.reason
        inputs = {name: kwargs[name] for name in ("input_ids", "attention_mask") if kwargs.get(name) is not None}
        calls.made.append(Call(seconds, rows, padded_length, tokens, path, reason, extra_bytes, inputs))
        return output

    def generate_batch(inputs: list[list[int]], **kwargs: Any) -> Any:
        attention: set[str] = set()  # which it chooses itself
        with model.register_forward_pre_hook(lambda *_: attention.add(model.config._attn_implementation)):
            output, seconds, extra_bytes = _measured(model, inner_batch, inputs, **kwargs)
        lengths, ran = [len(prompt) for prompt in inputs], ", ".join(sorted(attention))
        made = Call(seconds, len(output), max(lengths), sum(lengths), CONTINUOUS_BATCHING, ran, extra_bytes)
        calls.made.append(made)
        return output

    with _replaced(model, "generate", generate), _replaced(model, "generate_batch", generate_batch):
        yield calls


@contextmanager
def recorded_scoring(model: PreTrainedModel) -> Iterator[Calls]:
    """Record an instance's forward calls for a block likewise, with the tokens that they computed."""
    calls, inner = Calls(), model.forward

    def forward(input_ids: Tensor, **kwargs: Any) -> Any:
        output, seconds, extra_bytes = _measured(model, inner, input_ids, **kwargs)
        last, tokens, path, reason = fd.explain(model).last_forward, input_ids.numel(), "stock", ""
        if last is not None:
            tokens, path, reason = last.computed, last.path, last.reason
        calls.made.append(Call(seconds, *input_ids.shape, tokens, path, reason, extra_bytes))
        return output

    with _replaced(model, "forward", forward):
        yield calls


def _measured(
    model: PreTrainedModel, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, float, int | None]:
    """What a call returns, its seconds, and its peak memory."""
    held, began = begin_peak(model.device), idle_time(model.device)
    output = call(*args, **kwargs)
    return output, idle_time(model.device) - began, peak_over(model.device, held)


@contextmanager
def recorded_passes() -> Iterator[list[ForwardReport]]:
    """Record the forward passes without a cache of all enabled models for a block."""
    passes: list[ForwardReport] = []

    def report() -> ForwardReport:
        passes.append(ForwardReport())
        return passes[-1]

    with mock.patch.object(seam, "ForwardReport", report):
        yield passes


@contextmanager
def _replaced(model: PreTrainedModel, name: str, method: Callable[..., Any]) -> Iterator[None]:
    own = vars(model).get(name)
    setattr(model, name, method)
    try:
        yield
    finally:
        if own is None:
            delattr(model, name)
        else:
            setattr(model, name, own)
