"""M2M-100, NLLB, SeamlessM4T, Speech2Text and SpeechT5: sinusoidal positions that follow from a decoder's ids.

A pass counts its tokens from the length of the cache, but for those of padding, which all have one position, whose row
of the table is zeros. In a captured step that length is a tensor. The classes' own code makes positions of it, but it
asks on the host whether the table is long enough. Here the table is chosen once for each capture, by the longest row
that its steps serve: the module's own, or a longer one where the class lets its table grow with the cache. Speech2Text
and SpeechT5 do not; longer rows run eagerly, until they end or fail as in stock.

NLLB-MoE has such positions too, but is not captured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..._compat import CACHE_LENGTH
from ...attention.interface import kept_for_capture, outgrows
from ...attention.own_code import Method, OwnCode
from ...errors import Unsupported
from . import beside_encoder


def embed(table_for: Callable[[Any, int], Tensor], module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for `forward` of the positions' embeddings in captured passes: ``[rows, tokens, width]``.

    Args:
        table_for: The table of a module for rows of up to so many tokens, ``[positions, width]``.

    Raises:
        Unsupported: Rows of a captured step may outgrow the table.
    """
    length = kwargs.get(CACHE_LENGTH, args[-1])
    if not isinstance(length, Tensor):  # in a pass over prompts
        own: Tensor = type(module).forward(module, *args, **kwargs)
        # The graph reads that table, in whose place an eager pass of another thread may put a longer one.
        kept_for_capture((id(module), "prompts"), partial(own_table, module))
        return own
    table = kept_for_capture(id(module), partial(table_for, module))
    if outgrows(most := len(table) - module.padding_idx - 1):
        raise Unsupported(f"rows may outgrow its table of positions, which is for {most} tokens and does not grow")
    return F.embedding(module.create_position_ids_from_input_ids(args[0], module.padding_idx, length), table)


def own_table(module: Any, tokens: int) -> Tensor:
    """The module's table, whatever its length."""
    table: Tensor = module.weights
    return table


def long_table(module: Any, tokens: int) -> Tensor:
    """The module's table, or a longer one of the same code, with room for more tokens."""
    needed, table = module.padding_idx + 1 + tokens, own_table(module, tokens)
    if needed <= len(table):
        return table
    room = 1 << (needed - 1).bit_length()
    longer: Tensor = module.get_embedding(room, module.embedding_dim, module.padding_idx)
    return longer.to(table)


_GROWING, _FIXED = partial(embed, long_table), partial(embed, own_table)


def _of(name: str, method: Method, **more: Any) -> OwnCode:
    return OwnCode(in_captures={f"{name}SinusoidalPositionalEmbedding": {"forward": method}}, **more)


M2M_100_FAMILY = {
    "m2m_100": _of("M2M100", _GROWING),
    "nllb_moe": OwnCode(not_captured="the host reads which experts a step's tokens take"),
    "seamless_m4t": _of("SeamlessM4T", _GROWING),
    "seamless_m4t_v2": _of("SeamlessM4Tv2", _GROWING),
    "speech_to_text": _of("Speech2Text", _FIXED),
    "speecht5": _of("SpeechT5", _FIXED, stand_ins={"SpeechT5Attention": {"forward": beside_encoder.attend}}),
}
"""By folder of ``transformers.models``."""
