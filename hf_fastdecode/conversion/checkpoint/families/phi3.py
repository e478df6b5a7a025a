"""Phi-3."""

from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer, Phi3RotaryEmbedding

from hf_fastdecode.patches.architectures.slim_phi3 import SlimPhi3ForCausalLM
from hf_fastdecode.patches.slim_configs import SlimPhi3Config

from ..family import Family, Fused

FAMILY = Family(
    "Phi3ForCausalLM",
    SlimPhi3ForCausalLM,
    SlimPhi3Config,
    Phi3DecoderLayer,
    Phi3RotaryEmbedding,
    fused=Fused("qkv_proj"),
    longrope=True,
)
