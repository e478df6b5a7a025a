"""Calls of `generate` whose tokens are compared with one process's, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.parallel.shards import SUFFIX_BLOCK

from ..tiny_models import VOCABULARY, ragged_prompts, tiny_model
from .processes import FEW_TOKENS

TEXT = ragged_prompts(87)["input_ids"]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
SAMPLING: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 12}
ENDS = list(range(5, 25))
"""End tokens that random models draw soon."""


def levels() -> dict[str, Tensor]:
    """Two problems behind one system prompt of an odd length, the first of them twice: rows share at two levels."""
    prompts = ragged_prompts(70, 63, shared=41)
    return {name: torch.cat([part[:1], part]) for name, part in prompts.items()}


@dataclass(frozen=True)
class Call:
    """A call, and how it is to run."""

    prompts: dict[str, Tensor]
    arguments: dict[str, Any]
    model: str = "llama-gqa"  # a tiny model; "slim" is a conversion's
    config: dict[str, Any] = field(default_factory=dict)  # overrides of its config
    options: dict[str, Any] = field(default_factory=dict)  # of `enable`
    path: str = "shared: "  # which runs, and how its reason begins
    seeds_differ: bool = False  # ranks have other random seeds, of which rank 0's counts
    divides_prefill: bool = False  # passes of a few tokens are divided too
    block: int = FEW_TOKENS  # consecutive tokens of a suffix on one rank
    ranks: tuple[int, ...] = (2,)  # numbers of processes

    def make_model(self) -> PreTrainedModel:
        if self.model != "slim":
            return tiny_model(self.model, **self.config)
        text = torch.randint(3, VOCABULARY, (256,), generator=torch.Generator().manual_seed(5))
        return to_slim(tiny_model("llama-mha"), text, plan=(("k+r", 4), ("k+r", 9)))


def ones(ids: Tensor) -> dict[str, Tensor]:
    """Prompts without padding."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def text(length: int = 87) -> dict[str, Tensor]:
    return ones(TEXT[:, :length])


WIDE: dict[str, Any] = {"sliding_window": 300}  # of which no row here has as many tokens
BEAMS: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8}

CALLS: dict[str, Call] = {
    "one-row": Call(text(), GREEDY, ranks=(2, 3, 4)),
    "samples": Call(text(), SAMPLING | {"num_return_sequences": 5}, seeds_differ=True, ranks=(2, 3, 4)),
    "ragged": Call(ragged_prompts(5, 60, 33), GREEDY, ranks=(2, 3)),
    "two-levels": Call(levels(), SAMPLING | {"num_return_sequences": 2}, seeds_differ=True, ranks=(2, 4)),
    "long-suffix": Call(
        text(20), GREEDY | {"max_new_tokens": 200}, config={"num_hidden_layers": 1}, block=SUFFIX_BLOCK, ranks=(2, 3)
    ),
    "fewer-tokens-than-ranks": Call(text(2), SAMPLING | {"num_return_sequences": 3}, ranks=(2, 3, 4)),
    "one-token": Call(text(1), GREEDY),
    "rows-end-early": Call(
        text(), SAMPLING | {"num_return_sequences": 8, "max_new_tokens": 40, "eos_token_id": ENDS}, seeds_differ=True
    ),
    "beams": Call(text(), BEAMS | {"do_sample": False}, seeds_differ=True, ranks=(2, 3)),
    "beam-samples": Call(text(), BEAMS | {"do_sample": True}),
    "prompt-lookup": Call(
        ones(TEXT[:, :30].repeat(1, 3)), GREEDY | {"max_new_tokens": 20, "prompt_lookup_num_tokens": 4}, ranks=(2, 3)
    ),
    "prompt-lookup-by-kernels": Call(
        ones(TEXT[:, :30].repeat(1, 3)),
        GREEDY | {"max_new_tokens": 20, "prompt_lookup_num_tokens": 4},
        config={"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},  # they are interpreted
        options={"backend": "triton"},
        block=8,
        ranks=(2, 3),
    ),
    "chunked-prefill": Call(levels(), GREEDY, options={"max_prefill_tokens": 7}, ranks=(2, 3)),
    "prefill": Call(levels(), GREEDY, divides_prefill=True, ranks=(2, 3, 4)),
    "prefill-in-chunks": Call(levels(), GREEDY, options={"max_prefill_tokens": 7}, divides_prefill=True, ranks=(2, 3)),
    "prefill-ragged": Call(ragged_prompts(5, 60, 33), SAMPLING, seeds_differ=True, divides_prefill=True),
    "prefill-of-beams": Call(text(), BEAMS | {"do_sample": False}, divides_prefill=True),
    "prefill-of-all-logits": Call(
        ones(TEXT[:, :30].repeat(1, 3)), GREEDY | {"prompt_lookup_num_tokens": 4}, divides_prefill=True
    ),
    "prefill-with-sinks": Call(levels(), GREEDY, model="gpt_oss", config=WIDE, divides_prefill=True),
    "prefill-slim": Call(levels(), GREEDY, model="slim", divides_prefill=True),
    "one-kv-head": Call(text(), GREEDY, model="llama-mqa", ranks=(2, 4)),
    "multi-head": Call(text(), GREEDY, model="llama-mha"),
    "sinks": Call(levels(), GREEDY, model="gpt_oss", config=WIDE),
    "soft-cap": Call(levels(), GREEDY, model="gemma2", config=WIDE),
    "slim": Call(levels(), SAMPLING | {"num_return_sequences": 2}, model="slim", seeds_differ=True, ranks=(2, 3)),
    "slim-beams": Call(text(), BEAMS | {"do_sample": False}, model="slim"),
    "values-of-another-width": Call(text(), GREEDY, model="mimo_v2_flash", config=WIDE),
    "parallel-residual": Call(text(), GREEDY, model="gpt_neox"),
    "binding-window": Call(
        text(),
        GREEDY,
        model="gpt_oss",
        path="stock: a window of 40 tokens hides some of a row, whose context is divided",
    ),
}
