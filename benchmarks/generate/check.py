"""The check before `generate` is timed: a way's tokens in fp32, and its logits in half precision.

In fp32 tokens must be stock's, for one seed. In half precision no two kernels round alike, so the error of the logits
that the way chose its tokens by counts: against the model in fp64 it is at most twice stock's own.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from hf_fastdecode.measurement.calls import seeded, what_ran
from hf_fastdecode.measurement.rows import status_of

from ..ops.accuracy import BOUND
from .calls import load
from .cases import GenerateCase
from .inputs.shapes import INPUT_SHAPES, given_of
from .ways import GenerateWay, using

_ROWS, _TOKENS = 8, 24
_TEXT = GenerateCase("tiny", 200, _ROWS, _TOKENS)


def check_way(way: GenerateWay, device: torch.device, dtype: torch.dtype, case: GenerateCase = _TEXT) -> str | None:
    """Check one of our ways on a tiny random model; returns None when it is right, else a measurement's status.

    Args:
        way: The way.
        device: Where it runs.
        dtype: The dtype in which it is measured.
        case: Of a tiny shape, see `small_case`.
    """
    # Who draws is not checked here: the fast sampler keeps no logits, and has tests of its own. So have rows that
    # wait, of which no logits are returned.
    kept = {name: value for name, value in (way.enable or {}).items() if name not in ("sampler", "max_rows")}
    way = replace(way, enable=kept)
    try:
        if not (way.half and device.type == "cuda") and not gives_stock_tokens(way, device, case):
            return f"wrong: other tokens than stock in fp32 on {device}"
        if dtype != torch.float32 and not (ratio := logits_error(way, device, dtype, case)) <= BOUND:
            return f"wrong: logits err {ratio:.2f} times stock's error in {dtype}, at most {BOUND:g} is right"
    except Exception as error:
        return status_of(error)
    return None


def small_case(shape: str) -> GenerateCase:
    """A case for checks of ways of a shape: of a tiny one that is given the like."""
    if shape not in INPUT_SHAPES:
        return _TEXT
    small = INPUT_SHAPES[shape].small
    return GenerateCase(small, INPUT_SHAPES[small].context, _ROWS, _TOKENS)


def gives_stock_tokens(way: GenerateWay, device: torch.device, case: GenerateCase = _TEXT) -> bool:
    """Whether stock and the way draw the same tokens in fp32; NotAvailableError where the way runs stock."""
    model = _tiny(case, way, device, torch.float32)
    arguments = way.call_arguments(1 if way.single else case.samples)
    stock = _generate(model, case, arguments)
    with using(model, way):
        ours = _generate(model, case, arguments)
        what_ran(model)
    return torch.equal(stock, ours)


def logits_error(way: GenerateWay, device: torch.device, dtype: torch.dtype, case: GenerateCase = _TEXT) -> float:
    """How many times stock's error the way's logits err, on its own tokens, against the model in fp64.

    Raises NotAvailableError where the way runs stock.
    """
    model = _tiny(case, way, device, dtype)
    with using(model, way):
        record = _Recorder()
        sequences = _generate(model, case, GenerateWay().call_arguments(case.samples), logits_processor=[record])
        what_ran(model)
    found = torch.stack(record.logits, 1)  # [rows, tokens, vocabulary]
    drawn, shown = sequences[:, -case.new_tokens :], found.isfinite()  # but for suppressed tokens
    oracle = _logits(copy.deepcopy(model).double(), case, drawn)[shown]
    ours, theirs = found[shown] - oracle, _logits(model, case, drawn)[shown] - oracle
    return float(torch.maximum(ours.abs().max() / theirs.abs().max(), ours.norm() / theirs.norm()))


class _Recorder(LogitsProcessor):
    """Keeps the logits of each step, and leaves them as they are: not all calls can return them and share context."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.append(scores.double())
        return scores


def _tiny(case: GenerateCase, way: GenerateWay, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    return load(case.shape if way.slim is None else "tiny-mha", device, dtype, way.slim)


@torch.no_grad()
def _logits(model: PreTrainedModel, case: GenerateCase, sequences: Tensor) -> Tensor:
    """The logits that each drawn token was chosen by, ``[rows, tokens, vocabulary]`` fp64."""
    return given_of(case.shape).logits(model, case, sequences).double()


def _generate(model: PreTrainedModel, case: GenerateCase, arguments: dict[str, Any], **more: Any) -> Tensor:
    given = given_of(case.shape)
    inputs, drawing = given.arguments(model, case), given.drawing(arguments, case.new_tokens)
    with seeded(model.device):
        output: Any = model.generate(**inputs, **drawing, **more)
    sequences: Tensor = output if isinstance(output, Tensor) else output.sequences
    return sequences
