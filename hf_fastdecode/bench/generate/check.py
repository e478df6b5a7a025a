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
from transformers import PreTrainedModel

from ...measurement.draw import seeded
from ...measurement.runner import status_of
from ..ops.accuracy import BOUND
from .calls import load
from .ways import GenerateWay, using

_ROWS, _CONTEXT, _TOKENS = 8, 200, 24


def check_way(way: GenerateWay, device: torch.device, dtype: torch.dtype) -> str | None:
    """Check one of our ways on a tiny random model; returns None when it is right, else a measurement's status."""
    # Who draws is not checked here: the fast sampler keeps no logits, and has tests of its own. So have rows that
    # wait, of which no logits are returned.
    kept = {name: value for name, value in (way.enable or {}).items() if name not in ("sampler", "max_rows")}
    way = replace(way, enable=kept)
    try:
        if not (way.half and device.type == "cuda") and not gives_stock_tokens(way, device):
            return f"wrong: other tokens than stock in fp32 on {device}"
        if dtype != torch.float32 and not (ratio := logits_error(way, device, dtype)) <= BOUND:
            return f"wrong: logits err {ratio:.2f} times stock's error in {dtype}, at most {BOUND:g} is right"
    except Exception as error:
        return status_of(error)
    return None


def gives_stock_tokens(way: GenerateWay, device: torch.device) -> bool:
    """Whether stock and the way draw the same tokens in fp32."""
    model = _tiny(way, device, torch.float32)
    arguments = way.call_arguments(1 if way.single else _ROWS)
    stock = _generate(model, arguments)
    with using(model, way):
        ours = _generate(model, arguments)
    return torch.equal(stock.sequences, ours.sequences)


def logits_error(way: GenerateWay, device: torch.device, dtype: torch.dtype) -> float:
    """How many times stock's error the way's logits err, on its own tokens, against the model in fp64."""
    model = _tiny(way, device, dtype)
    with using(model, way):
        found = _generate(model, GenerateWay().call_arguments(_ROWS), output_logits=True)
    ours = torch.stack(found.logits, 1).double()  # [rows, tokens, vocabulary]
    oracle = _logits(copy.deepcopy(model).double(), found.sequences)
    theirs = _logits(model, found.sequences) - oracle
    return float(
        torch.maximum((ours - oracle).abs().max() / theirs.abs().max(), (ours - oracle).norm() / theirs.norm())
    )


def _tiny(way: GenerateWay, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    return load("tiny" if way.slim is None else "tiny-mha", device, dtype, way.slim)


@torch.no_grad()
def _logits(model: PreTrainedModel, sequences: Tensor) -> Tensor:
    """The logits that each drawn token was chosen by, ``[rows, tokens, vocabulary]`` fp64."""
    return model(sequences[:, :-1]).logits[:, _CONTEXT - 1 :].double()


def _generate(model: PreTrainedModel, arguments: dict[str, Any], **more: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, _CONTEXT), generator=generator).to(model.device)
    with seeded(model.device):
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_TOKENS,
            **{**arguments, **more, "return_dict_in_generate": True},
        )
