"""Variants of kernels that a call of another shape adds: each takes up to two seconds to compile, once per machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import hf_fastdecode as fd
from hf_fastdecode.generation.steps import prefill_passes
from hf_fastdecode.kernels.prefill.api import prefill_attention
from hf_fastdecode.kernels.row_products.api import row_products

from ..tiny_models import tiny_model_of_type
from .launches import Variants, fuse_on_the_cpu
from .test_launches import LATENTS, SIZES
from .uncaptured import on_the_cpu

DELTA_NETS = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32},
    **{"linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
}
MAMBA = {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3, "mamba_num_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen3_5_text": {"head_dim": 32, **DELTA_NETS},
    "nemotron_h": {"head_dim": 32, **MAMBA, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32},
    "deepseek_v2": {**LATENTS, "q_lora_rank": None, "topk_method": "greedy"},
}
OF_ROWS = {
    "qwen3": "attend_suffixes" + 3 * " row_products",
    "qwen3_5_text": "attend_suffixes" + 5 * " row_products",
    "nemotron_h": "attend_suffixes" + 3 * " row_products",
    "deepseek_v2": "attend_suffixes list_pairs products products row_products row_products",
}
"""Those that four times the rows add: of the step alone, whose tiles are wider, and none of scans."""

EARLY = {"attend_suffixes", "node_partials", "sample_rows"}


@on_the_cpu
@pytest.mark.parametrize("name", MODELS)
def test_variants_of_another_shape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another length adds none. More rows add some of the step, each once."""
    fuse_on_the_cpu(monkeypatch)
    model, variants, begun = tiny_model_of_type(name, **SIZES | MODELS[name]).half(), Variants(), Variants()

    def compiling(into: Variants) -> Callable[[Callable[[], object], torch.device], None]:
        def compile_now(run: Callable[[], object], device: torch.device) -> None:
            with into.new():
                run()

        return compile_now

    def added(prompts: int, length: int, samples: int) -> str:
        ids = torch.randint(3, 90, (prompts, length), generator=torch.Generator().manual_seed(length))
        sampling = {"do_sample": True, "top_k": 0, "num_return_sequences": samples, "max_new_tokens": 2}
        with variants.new() as names:
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **sampling)
        assert {one for one in variants.seen if one[0] in EARLY} <= begun.seen
        return " ".join(names)

    monkeypatch.setattr(prefill_passes, "compile_in_background", compiling(begun))
    with fd.enabled(model, mode="graph", backend="triton", max_rows=32):
        assert added(1, 80, 8)
        assert added(1, 149, 8) == ""
        assert added(4, 77, 8) == OF_ROWS[name]


@on_the_cpu
def test_variants_of_tokens_and_columns() -> None:
    """Log-sum-exps of heads are as far apart as there are tokens; products of many columns have no parts to add up."""
    variants, made = Variants(), torch.zeros(2, 50, 64)
    with variants.new() as names:
        for tokens in (48, 50):
            query, intervals = made[:, :tokens], torch.zeros(3, tokens, dtype=torch.int32)
            prefill_attention(query, query, query, intervals, scale=1.0, earlier=(query, torch.zeros(2, tokens)))
        for columns in (16, 1024):
            row_products(torch.zeros(1, 1024).half(), [torch.zeros(columns, 1024).half()], [None])
    assert names == ["attend_intervals", "row_products"]
