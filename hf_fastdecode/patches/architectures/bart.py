"""The BART family's decoders alone, and attention layers of their shape elsewhere (XGLM, CLVP).

Learned or sinusoidal positions of the family begin at the length of the cache, so that those of a prompt count its
padding, and those of a step would be constants in a captured graph. Some of these classes compute attention by their
own code; the others lack the flag that says that it may be replaced.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import EncoderDecoderCache

from ..._compat import takes_old_name
from ...attention.interface import attend_shared, given_positions
from ...attention.own_code import Method, OwnCode
from ...errors import Unsupported
from . import beside_encoder


def embed_positions(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for `forward` of the positions' embeddings: ``[rows or 1, tokens, width]``."""
    if (positions := given_positions()) is None:  # of an encoder-decoder's pass, which counts from the cache's length
        own: Tensor = type(module).forward(module, *args, **kwargs)
        return own
    return F.embedding(positions + getattr(module, "offset", 0), module.weight)


@takes_old_name
def attend(
    module: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    cache: Any = None,
    attention_mask: Any = None,
    attn_prompt: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `forward` of attention layers of their own."""
    if attn_prompt is not None:
        raise Unsupported("its layers have keys and values of trained prompts")
    if isinstance(cache, EncoderDecoderCache):
        return beside_encoder.attend(module, hidden_states, key_value_states, cache, attention_mask)
    query, key, value = (
        projection(hidden_states).unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    kv, _ = cache.update(key, value, module.layer_idx)
    return module.out_proj(attend_shared(module, query, kv, scaling=module.head_dim**-0.5).flatten(2)), None


def of_family(positions: str, attention: str | None = None) -> OwnCode:
    """The entry of a decoder, by its classes of positions' embeddings and, of those with code of their own, of
    attention."""
    stand_ins: dict[str, dict[str, Method]] = {positions: {"forward": embed_positions}}
    if attention is not None:
        stand_ins[attention] = {"forward": attend}
    return OwnCode(stand_ins, counts_padding=True)


_ATTENTION_ALONE = {"clvp": "ClvpSelfAttention", "xglm": "XGLMAttention"}

BART_FAMILY = {
    **{folder: OwnCode({name: {"forward": attend}}, reads_masks=True) for folder, name in _ATTENTION_ALONE.items()},
    "bart": of_family("BartLearnedPositionalEmbedding"),
    "bigbird_pegasus": of_family("BigBirdPegasusLearnedPositionalEmbedding", "BigBirdPegasusDecoderAttention"),
    "blenderbot": of_family("BlenderbotLearnedPositionalEmbedding"),
    "blenderbot_small": of_family("BlenderbotSmallLearnedPositionalEmbedding"),
    "marian": of_family("MarianSinusoidalPositionalEmbedding"),
    "mbart": of_family("MBartLearnedPositionalEmbedding"),
    "mvp": of_family("MvpLearnedPositionalEmbedding", "MvpAttention"),
    "pegasus": of_family("PegasusSinusoidalPositionalEmbedding"),
    "plbart": of_family("PLBartLearnedPositionalEmbedding"),
    "trocr": of_family("TrOCRLearnedPositionalEmbedding", "TrOCRAttention"),
    "whisper": of_family("WhisperPositionalEmbedding"),
}
"""By folder of ``transformers.models``."""
