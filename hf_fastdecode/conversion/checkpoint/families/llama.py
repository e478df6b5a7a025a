"""Llama."""

from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from hf_fastdecode.patches.architectures.slim_llama import SlimLlamaForCausalLM
from hf_fastdecode.patches.slim_configs import SlimLlamaConfig

from ..family import Family

FAMILY = Family("LlamaForCausalLM", SlimLlamaForCausalLM, SlimLlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding)
