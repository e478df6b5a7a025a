"""Models to measure: named shapes with random weights, which are as fast as trained ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ..patches.config_base import SlimLayer

MAX_POSITIONS = 131072
"""The positions of every named shape."""


def _shape(
    vocabulary: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    """The fields of a config, of a Llama unless `more` names another model type."""
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "7b-mha": _shape(32016, 4096, 11008, 32, 32, 32),  # CodeLlama-7B's
    "7b-gqa": _shape(32000, 4096, 14336, 32, 32, 8),  # Mistral-7B's
    "8b-gqa": _shape(128256, 4096, 14336, 32, 32, 8),  # Llama-3.1-8B's
    "8b-mqa": _shape(128256, 4096, 14336, 32, 32, 1),  # the same with one KV head
    "13b-mha": _shape(32016, 5120, 13824, 40, 40, 40),  # CodeLlama-13B's
    "1b-gqa": _shape(128256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True),  # Llama-3.2-1B's
    "qwen3-4b": _shape(
        *(151936, 2560, 9728, 36, 32, 8),
        model_type="qwen3",
        head_dim=128,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    # Layers with states beside attention.
    "qwen3.5-4b": _shape(
        *(248320, 2560, 9216, 32, 16, 4),
        model_type="qwen3_5_text",
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
    ),
    "nemotron-h-8b": _shape(
        *(131072, 4096, 21504, 52, 32, 8),
        model_type="nemotron_h",
        hybrid_override_pattern=f"M-M-M-M*-{'M-M-M-M-M*-' * 3}M-M-M-M-M-",
    ),
    # Layers with windows, all or some.
    "mistral-7b": _shape(32000, 4096, 14336, 32, 32, 8, model_type="mistral", sliding_window=4096),
    "gemma2-9b": _shape(256000, 3584, 14336, 42, 16, 8, model_type="gemma2", head_dim=256, sliding_window=4096),
    "gemma3-12b": _shape(262144, 3840, 15360, 48, 16, 8, model_type="gemma3_text", head_dim=256, sliding_window=1024),
    "gpt-oss-20b": _shape(
        *(201088, 2880, 2880, 24, 64, 8),
        model_type="gpt_oss",
        head_dim=64,
        sliding_window=128,
        num_local_experts=32,
    ),
    # Layers that attend by themselves.
    "falcon-7b": _shape(65024, 4544, 18176, 32, 71, 1, model_type="falcon", multi_query=True, parallel_attn=True),
    # Latents and experts: DeepSeek-V2-Lite's.
    "deepseek-v2-lite": _shape(
        *(102400, 2048, 10944, 27, 16, 16),
        model_type="deepseek_v2",
        q_lora_rank=None,
        n_routed_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        routed_scaling_factor=1.0,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "qwen3-30b-a3b": _shape(
        *(151936, 2048, 6144, 48, 32, 4),
        model_type="qwen3_moe",
        head_dim=128,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "tiny": _shape(512, 128, 256, 2, 4, 2),
    "tiny-mha": _shape(512, 128, 256, 2, 4, 4),
    "tiny-experts": _shape(512, 128, 256, 2, 4, 2, model_type="gpt_oss", head_dim=32, num_local_experts=4),
    "tiny-8-heads": _shape(512, 256, 256, 2, 8, 8),
}


def random_model(
    shape: str,
    device: torch.device | str,
    dtype: torch.dtype,
    slim: SlimLayer | None = None,
    positions: int = MAX_POSITIONS,
) -> PreTrainedModel:
    """A model of one of `SHAPES` with random weights, in eval mode, that never stops; with `slim` a slim one."""
    from transformers import AutoModelForCausalLM  # here, since names of shapes are read where its seconds are lost

    from ..patches.layers.slim_values import StoredMatrix

    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    model = random_weights(AutoModelForCausalLM, config_of(shape, dtype, slim, positions), device, dtype)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # transformers 5.17 chooses sdpa, which leaves the soft cap out
    for module in model.modules():
        if isinstance(module, StoredMatrix):  # a buffer, which no initialization fills
            module.values.normal_(std=len(module.values) ** -0.5)
    return model


def random_weights(auto_class: Any, config: Any, device: torch.device | str, dtype: torch.dtype) -> PreTrainedModel:
    """The model that one of transformers' auto classes makes of a config, with random weights, in eval mode."""
    import torch

    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = auto_class.from_config(config, dtype=dtype)
    return model.eval()


def config_of(shape: str, dtype: torch.dtype, slim: SlimLayer | None = None, positions: int = MAX_POSITIONS) -> Any:
    """The config of one of `SHAPES`; arguments as for `random_model`."""
    from transformers import AutoConfig

    fields = SHAPES[shape] | {"max_position_embeddings": positions, "pad_token_id": 0, "eos_token_id": None}
    model_type = fields.pop("model_type")
    if slim is not None:
        model_type = f"slim_{model_type}"
        fields["slim_layers"] = [slim.to_dict()] * fields["num_hidden_layers"]
        fields["slim_matrix_dtype"] = "float16" if dtype.itemsize == 2 else "float32"  # as in conversion
    return AutoConfig.for_model(model_type, **fields)


def parameters(shape: str) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape, torch.bfloat16))
    return sum(parameter.numel() for parameter in model.parameters())
