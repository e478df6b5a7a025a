"""Fields that the generic shrinking of configs does not get right, by class, and their values.

A mapping stands for a config inside a config. Classes that share a config share its entry.
"""

from __future__ import annotations

from typing import Any

# By transformers' own defaults their layers come in longer periods than a tiny model has layers.
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_CONV = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
_CODEC = {"upsample_groups": 64, "codebook_dim": 64, "vector_quantization_hidden_dimension": 64, "num_filters": 8}
_CODEC |= {"num_quantizers": 8, "codebook_size": 128}
_VQ = {"latent_channels": 32, "base_channels": 32, "channel_multiplier": [1, 1], "resolution": 32}


def _sections(*sizes: int, **rope: Any) -> dict[str, Any]:
    """Parts of the rotary embedding for time, height and width: together half the dimensions that are rotated."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes), **rope}}


_ROPE3 = {"text_config": _sections(2, 3, 3)}
_OMNI_TALKER = {"text_config": {**_sections(2, 3, 3), "shared_expert_intermediate_size": 96}, "spatial_merge_size": 2}
_VISION_IDS = {"vision_start_token_id": 120, "vision_end_token_id": 121}

_SOUND = {"audio_config": {"max_source_positions": 50}}
_TILES = {"image_grid_pinpoints": [[56, 56], [56, 112]]}

OVERRIDES: dict[str, dict[str, Any]] = {
    "Apertus1p5ForConditionalGeneration": {
        **{"image_token_offset": 104, "vision_config": {"codebook_size": 8, "base_channels": 32}},
        **{"audio_token_offset": 112, "audio_config": {"codebook_dim": 64, "codebook_size": 8}},
    },
    "AudioFlamingo3ForConditionalGeneration": _SOUND,
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "Blip2ForConditionalGeneration": {"image_token_index": 100, "text_config": {"bos_token_id": 1}},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 128, "num_hidden_layers": 2},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 100}, "image_token_id": 100, "vq_config": _VQ},
    "CohereCompassForCausalLM": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "CohereCompassForConditionalGeneration": {
        "text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}
    },
    "CsmForConditionalGeneration": {"codec_config": _CODEC},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "DeepseekOcr2ForConditionalGeneration": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {"sam_config": {"downsample_channels": [32, 64]}},
    },
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "DoryForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        **{"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    },
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteForCausalLM": {
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "conv_output_size": 64},
    },
    "Emu3ForConditionalGeneration": {
        "vocabulary_map": {"<image>": 100, "<|extra_200|>": 101},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 4, "codebook_size": 32},
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {**_sections(3, 3, 2), "moe_intermediate_size": [32, 32]}
    },
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
    "FunAsrNanoForConditionalGeneration": {"adaptor_config": {"intermediate_size": 16}},
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 4},
    "Gemma4ForConditionalGeneration": {
        "vision_config": {
            **{"model_type": "gemma4_vision", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "position_embedding_size": 64},
        }
    },
    "GlmAsrForConditionalGeneration": {"audio_config": {"intermediate_size": 128}},
    "HYV4VLForConditionalGeneration": {"text_config": _sections(2, 1, 1)},
    "Glm46VForConditionalGeneration": _ROPE3,
    "Glm4vForConditionalGeneration": _ROPE3,
    "Glm4vMoeForConditionalGeneration": {"text_config": _sections(1, 1, 2, partial_rotary_factor=0.5)},
    "GlmImageForConditionalGeneration": _ROPE3,
    "GlmOcrForConditionalGeneration": _ROPE3,
    "Granite4VisionForConditionalGeneration": {"deepstack_layer_map": [[1, 0]], "downsample_rate": "1/4"},
    "GraniteMoeHybridForCausalLM": _HYBRID,
    "HrmTextForCausalLM": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "InternVLForConditionalGeneration": {"vision_config": {"image_size": [56, 56]}},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "HunYuanVLForConditionalGeneration": _ROPE3,
    "JanusForConditionalGeneration": {"vq_config": {k: v for k, v in _VQ.items() if k != "resolution"}},
    "KyutaiSpeechToTextForConditionalGeneration": {"codec_config": _CODEC},
    "Lfm2ForCausalLM": _CONV,
    "Lfm2MoeForCausalLM": _CONV,
    "Lfm2VlForConditionalGeneration": {"text_config": _CONV},
    "LlavaNextForConditionalGeneration": _TILES,
    "LlavaNextVideoForConditionalGeneration": _TILES,
    "LlavaOnevisionForConditionalGeneration": _TILES,
    "Mamba2ForCausalLM": {"num_heads": 8, "time_step_rank": 8},
    "MiniCPM3ForCausalLM": {"scale_emb": 1, "dim_model_base": 64},
    "MllamaForConditionalGeneration": {
        "vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 192}  # of 64 numbers each
    },
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 4},
    "MoshiForCausalLM": {"sliding_window": 512},  # by which its cache forgets tokens that its attention would read
    "MoshiForConditionalGeneration": {"audio_encoder_config": _CODEC, "depth_decoder_config": {"input_size": 64}},
    "MuseSparkForConditionalGeneration": {"audio_config": {"hidden_sizes": [8, 16, 32, 64]}},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "PaddleOCRVLForConditionalGeneration": _ROPE3,
    "Qwen2AudioForConditionalGeneration": _SOUND,
    "Qwen2VLForConditionalGeneration": _ROPE3,
    "Qwen2_5OmniTalkerForConditionalGeneration": _sections(2, 3, 3),
    "Qwen2_5OmniThinkerForConditionalGeneration": {**_ROPE3, **_VISION_IDS},
    "Qwen2_5_VLForConditionalGeneration": _ROPE3,
    "Qwen3OmniMoeTalkerForConditionalGeneration": _OMNI_TALKER,
    "Qwen3OmniMoeThinkerForConditionalGeneration": {**_ROPE3, **_VISION_IDS},
    "Qwen4ExpForConditionalGeneration": {
        "text_config": {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
            "ngram_vocab_size_base": 128,
            "split_ngram_parts": 1,
        }
    },
    "RecurrentGemmaForCausalLM": {"block_types": ["recurrent", "attention"]},
    "ReformerModelWithLMHead": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 24}},
    "VipLlavaForConditionalGeneration": {"vision_feature_layers": [-1, -2]},
    "VoxtralForConditionalGeneration": {
        "audio_token_id": 100,
        "audio_config": {"max_source_positions": 48, "intermediate_size": 128},
    },
    "Zamba2ForCausalLM": {
        "mamba_headdim": 16,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "hybrid_layer_ids": [1],
    },
    "ZambaForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "mamba_dt_rank": 8,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
    },
    "Qwen3OmniMoeForConditionalGeneration": {"talker_config": _OMNI_TALKER, "thinker_config": _ROPE3},
    "XmodForCausalLM": {"languages": ["en"], "default_language": "en"},
    "xLSTMForCausalLM": {"embedding_dim": 64, "qk_dim_factor": 1.0},
}
OVERRIDES["Dots3NoteForConditionalGeneration"] = OVERRIDES["Dots3NoteForCausalLM"]
OVERRIDES["Ernie4_5_VL_MoeForConditionalGeneration"] = OVERRIDES["Ernie4_5_VLMoeForConditionalGeneration"]
OVERRIDES["Qwen4ExpForCausalLM"] = OVERRIDES["Qwen4ExpForConditionalGeneration"]["text_config"]

INPUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "Blip2ForConditionalGeneration": {"pixel_values": (3, 3, 56, 56)},
    "BlipForConditionalGeneration": {"pixel_values": (3, 3, 64, 64)},
    "BlipForQuestionAnswering": {"pixel_values": (3, 3, 64, 64)},
    "CanaryForConditionalGeneration": {"input_features": (3, 60, 128)},
    "CohereAsrForConditionalGeneration": {"input_features": (3, 60, 128)},
    "GraniteSpeech5ForCTC": {"input_features": (3, 60, 320)},
    "IdeficsForVisionText2Text": {"pixel_values": (3, 1, 3, 56, 56), "image_attention_mask": (3, 71, 1)},
    "LasrForCTC": {"input_features": (3, 60, 128)},
    "MoonshineForConditionalGeneration": {"input_values": (3, 4000)},
    "ParakeetForCTC": {"input_features": (3, 60, 80)},
    "MoonshineStreamingForConditionalGeneration": {"input_values": (3, 4000)},
    "Nemotron3_5AsrForRNNT": {"input_features": (3, 60, 80)},
    "NemotronAsrStreamingForRNNT": {"input_features": (3, 60, 80)},
    "OmniASRForCTC": {"input_values": (3, 1, 4000)},
    "PPFormulaNetForConditionalGeneration": {"pixel_values": (3, 3, 64, 64)},
    "ParakeetForRNNT": {"input_features": (3, 60, 80)},
    "ParakeetForTDT": {"input_features": (3, 60, 80)},
    "SeamlessM4TForSpeechToText": {"input_features": (3, 60, 160)},
    "SeamlessM4Tv2ForSpeechToText": {"input_features": (3, 60, 160)},
    "Speech2TextForConditionalGeneration": {"input_features": (3, 60, 80)},
    "SpeechEncoderDecoderModel": {"inputs": (3, 4000)},
    "SpeechT5ForSpeechToText": {"input_values": (3, 4000)},
    "VisionEncoderDecoderModel": {"pixel_values": (3, 3, 64, 64)},
    "VoxtralRealtimeForConditionalGeneration": {"input_features": (3, 128, 1600)},
    "WhisperForConditionalGeneration": {"input_features": (3, 80, 3000)},
}
"""Shapes of random inputs, for classes that `generate` is not called for with text alone."""
