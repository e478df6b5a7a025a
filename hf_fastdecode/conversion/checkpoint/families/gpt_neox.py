"""GPT-NeoX (Pythia)."""

from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer, GPTNeoXRotaryEmbedding

from hf_fastdecode.patches.architectures.slim_gpt_neox import SlimGPTNeoXForCausalLM
from hf_fastdecode.patches.slim_configs import SlimGPTNeoXConfig

from ..family import Family, Fused

FAMILY = Family(
    "GPTNeoXForCausalLM",
    SlimGPTNeoXForCausalLM,
    SlimGPTNeoXConfig,
    GPTNeoXLayer,
    GPTNeoXRotaryEmbedding,
    embedding="gpt_neox.embed_in.weight",
    layers="gpt_neox.layers.",
    attention="attention.",
    fused=Fused("query_key_value", blocks=lambda config: config.num_attention_heads),
    output="dense",
    left_out=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    renamed={"embed_out.": "lm_head."},
)
