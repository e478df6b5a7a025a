"""OPT."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from hf_fastdecode.patches.architectures.slim_opt import SlimOPTForCausalLM
from hf_fastdecode.patches.slim_configs import SlimOPTConfig

from ..family import Family


def embed(config: Any, tensors: Mapping[str, Tensor], embedding: str, ids: Tensor) -> Tensor:
    """Embeddings of tokens, projected where they are narrower than the layers, and of positions, from row 2 on."""
    found = tensors[embedding][ids]
    if (project := tensors.get("model.decoder.project_in.weight")) is not None:
        found = F.linear(found, project)
    return found + tensors["model.decoder.embed_positions.weight"][2 : 2 + len(ids)]


FAMILY = Family(
    "OPTForCausalLM",
    SlimOPTForCausalLM,
    SlimOPTConfig,
    OPTDecoderLayer,
    None,
    embedding="model.decoder.embed_tokens.weight",
    layers="model.decoder.layers.",
    output="out_proj",
    embed=embed,
    renamed={"decoder.": "model.decoder."},
)
