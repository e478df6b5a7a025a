"""CodeGen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.codegen.modeling_codegen import CodeGenBlock, create_sinusoidal_positions

from hf_fastdecode._compat import CODEGEN_MAKES_TABLES_ONCE
from hf_fastdecode.patches.architectures.slim_codegen import SlimCodeGenForCausalLM
from hf_fastdecode.patches.slim_configs import SlimCodeGenConfig

from ..family import Family, Fused


def positions_table(config: Any) -> Tensor:
    """sin, then cos, of every position: ``[positions, rotated]``."""
    return create_sinusoidal_positions(config.max_position_embeddings, config.rotary_dim)


def rotary(config: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """cos and sin of positions, with an entry per rotated coordinate, as other architectures' tables have it."""

    def tables(like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        sin, cos = positions_table(config)[positions].repeat_interleave(2, -1).chunk(2, -1)
        return cos, sin

    return tables


def run_layer(layer: nn.Module, hidden: Tensor, positions: Tensor, tables: Any) -> Tensor:
    """Run a layer as `family.run_layer`, with a mask: CodeGen's attention is causal by its mask alone."""
    tokens = hidden.shape[1]
    mask = torch.full((1, 1, tokens, tokens), torch.finfo(hidden.dtype).min).triu(1)
    if not CODEGEN_MAKES_TABLES_ONCE:
        alone: Tensor = layer(hidden, position_ids=positions, attention_mask=mask)[0]
        return alone
    cos, sin = (table[..., ::2] for table in tables)  # an entry per pair, in CodeGen's own order
    out: Tensor = layer(hidden, position_ids=positions, position_embeddings=(sin, cos), attention_mask=mask)
    return out


FAMILY = Family(
    "CodeGenForCausalLM",
    SlimCodeGenForCausalLM,
    SlimCodeGenConfig,
    CodeGenBlock,
    rotary,
    layout="interleaved",
    embedding="transformer.wte.weight",
    layers="transformer.h.",
    attention="attn.",
    # Four parts, each of queries, values and keys of a quarter of the heads, whatever device trained it.
    fused=Fused("qkv_proj", blocks=lambda config: 4, order="qvk"),
    output="out_proj",
    run_layer=run_layer,
    buffers={"embed_positions": positions_table},
    left_out=(".attn.bias", ".attn.masked_bias", ".attn.causal_mask"),
)
