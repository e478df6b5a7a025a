"""The launches of a captured step: each takes microseconds, which add up over layers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from hf_fastdecode.cache.layers import latent

from ..tiny_models import ragged_prompts, tiny_model_of_type
from .launches import fuse_on_the_cpu, launches_of_a_step
from .uncaptured import on_the_cpu

SIZES = {
    **{"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"intermediate_size": 64, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
}
LATENTS = {
    **{"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    **{"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 0},
}
MODELS = {
    "deepseek_v2": {**LATENTS, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**LATENTS, "q_lora_rank": 64, "n_group": 2, "topk_group": 1},
    "qwen3_moe": {"num_experts": 4, "head_dim": 32, "decoder_sparse_step": 1, "norm_topk_prob": True},
}
ATTENTION = "node_partials attend_suffixes"
EXPERTS = "products products add_up"
LAYERS = {
    "deepseek_v2": (f"normalize row_products absorb {ATTENTION} bmm row_products normalize route {EXPERTS}"),
    "deepseek_v3": (
        f"normalize row_products normalize row_products absorb {ATTENTION} bmm row_products normalize route {EXPERTS}"
    ),
    "qwen3_moe": (f"normalize row_products rotate {ATTENTION} row_products normalize route {EXPERTS}"),
}
"""The launches of a layer with experts."""


def launches(name: str, rows: int) -> str:
    """Of a step of a model of one layer, from its first norm to its last, which the sum of experts takes along."""
    model = tiny_model_of_type(name, **SIZES, **MODELS[name]).half()
    for module in model.modules():
        if type(module).__name__.endswith("TopkRouter"):
            module.float()  # as DeepSeek's checkpoints are loaded
    sampling = {"do_sample": True, "num_return_sequences": rows, "max_new_tokens": 3}
    found = " ".join(launches_of_a_step(model, ragged_prompts(20) | sampling))
    return found[found.index("normalize") :].removesuffix(" row_products")


@on_the_cpu
@pytest.mark.parametrize("name", MODELS)
def test_launches_of_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fuse_on_the_cpu(monkeypatch)
    assert launches(name, 2) == LAYERS[name]


@on_the_cpu
def test_launches_of_a_layer_with_expanded_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose keys and values are another launch, and the merge one."""
    fuse_on_the_cpu(monkeypatch)
    for bound in ("FEWEST_ROWS", "FEWEST_ROWS_LATER", "FEWEST_TOKENS", "FEWEST_ROW_STEPS"):
        monkeypatch.setattr(latent, bound, 2)
    expected = LAYERS["deepseek_v2"].replace(" bmm ", " bmm node_partials merge_rows ")
    assert launches("deepseek_v2", 2) == expected
