"""The `generate` calls that a program makes of a model: seconds, tokens prefilled, and which path they took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

import hf_fastdecode as fd


@dataclass
class Call:
    """One `generate` call.

    Attributes:
        seconds: Wall time.
        rows: Sequences returned.
        padded_length: Length of the prompts with padding.
        prefilled_tokens: Tokens run through the model before the decode steps.
        path: ``stock``, ``shared`` or ``failed``.
        reason: Why this path; empty when the model is not enabled.
    """

    seconds: float
    rows: int
    padded_length: int
    prefilled_tokens: int
    path: str
    reason: str


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
    """Record the `generate` calls of an instance for a block, stock or enabled, whoever makes them."""
    calls, inner, own = Calls(), model.generate, vars(model).get("generate")

    def generate(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        output = inner(*args, **kwargs)
        seconds = perf_counter() - began
        prompts = next(value for value in (*args, kwargs.get("inputs"), kwargs.get("input_ids")) if value is not None)
        rows = (output if isinstance(output, Tensor) else output.sequences).shape[0]
        calls.made.append(_call(model, seconds, rows, prompts.shape[1]))
        return output

    model.generate = generate
    try:
        yield calls
    finally:
        if own is None:
            del model.generate
        else:
            model.generate = own


def _call(model: PreTrainedModel, seconds: float, rows: int, padded_length: int) -> Call:
    last, stock_tokens = fd.explain(model).last_call, rows * padded_length
    if last is None:
        return Call(seconds, rows, padded_length, stock_tokens, "stock", "")
    tokens = last.prefilled_tokens if last.path == "shared" else stock_tokens
    return Call(seconds, rows, padded_length, tokens, last.path, last.reason)
