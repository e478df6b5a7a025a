"""The ways of a pass over rows that begin alike: each gives the hidden states that predict the completions' tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode.generation.options import Options
from hf_fastdecode.measurement.rows import NotAvailableError

from .cases import ForwardCase


class Rows(NamedTuple):
    """The rows of a case, those of a prompt one after the other: ``[rows, context + completion]`` int64."""

    ids: Tensor
    prompts: int
    context: int

    @classmethod
    def of(cls, case: ForwardCase, vocabulary: int, device: torch.device) -> Rows:
        torch.manual_seed(1)
        prompts = torch.randint(1, vocabulary, (case.prompts, case.context)).repeat_interleave(case.samples, 0)
        completions = torch.randint(1, vocabulary, (case.rows, case.completion))
        return cls(torch.cat([prompts, completions], 1).to(device), case.prompts, case.context)

    @property
    def completions(self) -> Tensor:
        """``[rows, completion]``"""
        return self.ids[:, self.context :]


Hidden = Callable[[], Tensor]
"""A pass: the decoder's last states where the completions' tokens are predicted, ``[rows, completion, hidden]``."""

PEERS: dict[str, Callable[[PreTrainedModel, Rows], Hidden]] = {}
"""Passes of other programs, see `FORWARD_WAYS`; they change the attention implementation."""


@contextmanager
def using(model: PreTrainedModel, way: str, rows: Rows, **options: Any) -> Iterator[Hidden]:
    """Within, a function that runs the pass this way, ours with options; on leaving, the model is as it was.

    Raises NotAvailableError where the way does not run here.
    """
    if way in PEERS:
        before: Any = model.config._attn_implementation
        try:
            yield PEERS[way](model, rows)
        finally:
            model.set_attn_implementation(before)
        return
    if way == "enabled" and "share_forward" not in {field.name for field in fields(Options)}:
        raise NotAvailableError("this version has no share_forward")
    mask = torch.ones_like(rows.ids)

    def hidden() -> Tensor:
        out = model.get_decoder()(input_ids=rows.ids, attention_mask=mask, use_cache=False)
        states: Tensor = out.last_hidden_state
        return states[:, rows.context - 1 : -1]

    with nullcontext() if way == "stock" else fd.enabled(model, share_forward=True, **options):
        yield hidden
