"""A cache layout is one file: an attention layer that follows `AttendsByItself`, which nothing else need know of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE, takes_cache
from hf_fastdecode.attention.kv import Scoring, Segment
from hf_fastdecode.attention.torch_operators.decode_ops import forest_attention
from hf_fastdecode.cache.shared import SharedContextCache

from ..generation.calls import as_in_stock
from ..tiny_models import ragged_prompts, tiny_model


class FlatAttention(LlamaAttention):
    """Multi-head attention whose suffixes hold all heads of a token in one vector."""

    attends_by_itself = True
    suffixes_read = "flat suffixes by PyTorch"
    no_captured_steps = "PyTorch's operators read flat suffixes"

    def suffixes_take_prompts(self, rows, room, tokens, backend):
        return False

    def as_nodes(self, keys, coordinates, positions, dtype):
        return Segment(self.with_heads(keys), self.with_heads(coordinates))

    def with_heads(self, part):
        return part[:, 0].unflatten(2, (-1, self.head_dim)).transpose(1, 2)

    @takes_cache
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        if not isinstance(cache, SharedContextCache):
            return super().forward(hidden_states, position_embeddings, attention_mask, cache, **kwargs)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, keys, values = (
            one(hidden_states).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for one in projections
        )
        query, keys = apply_rotary_pos_emb(query, keys, *position_embeddings)
        flat = Segment(*(part.transpose(1, 2).flatten(2)[:, None].contiguous() for part in (keys, values)))
        if cache.state.current.items:  # prefill of nodes, in the layout of ordinary layers
            handle, _ = cache.update(keys, values, self.layer_idx, suffix_parts=flat)
            out = handle.attend(query, Scoring(self.scaling, None, None, None)).transpose(1, 2)
        else:
            handle, _ = cache.update(*flat, self.layer_idx)
            kv = handle.append()
            kv = replace(kv, suffix=Segment(*map(self.with_heads, kv.suffix)))
            part = forest_attention(query, kv, self.scaling, backend=cache.state.torch_backend)
            out = handle.step.division.merge(part).out
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class FlatLlama(LlamaForCausalLM):
    """Modules of the model's own file count as known code."""


@pytest.fixture
def model() -> FlatLlama:
    model = tiny_model("llama-mha")
    model.__class__ = FlatLlama
    for layer in model.model.layers:
        layer.self_attn.__class__ = FlatAttention
    return model


HOW = {"sampled": {"do_sample": True, "num_return_sequences": 4}, "beams": {"do_sample": False, "num_beams": 3}}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_tokens_are_those_of_stock(model: FlatLlama, how: dict) -> None:
    inputs = ragged_prompts(90, 70, shared=50)
    as_in_stock(model, lambda: model.generate(**inputs, **how, max_new_tokens=12), "shared", min_saved_tokens=1)


def test_a_returned_cache_goes_on(model: FlatLlama) -> None:
    inputs = ragged_prompts(90)
    how = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 8}
    stock = model.generate(**inputs, **how | {"max_new_tokens": 16}).sequences
    with fd.enabled(model):
        cache = fd.prefill(model, inputs)
        first = model.generate(**inputs, **how, **{CACHE: cache})
        second = model.generate(first.sequences, **how, **{CACHE: first[CACHE]})
        assert torch.equal(second.sequences, stock)
