"""What the attention function takes beside queries, keys and values, and what it refuses."""

import sys
from threading import Thread

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_fastdecode.attention.interface import shared_context_attention
from hf_fastdecode.attention.kv import SharedKV, SlidingWindow
from hf_fastdecode.attention.overrides import RowLengths, active
from hf_fastdecode.errors import Unsupported


class Keys(SharedKV):
    def attend(self, query, scoring):
        return query.transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, is_causal=True):
        super().__init__()
        self.is_causal = is_causal


def attend(module=None, mask=None, **arguments):
    query = torch.zeros(1, 4, 3, 16)
    return shared_context_attention(module or Attention(), query, Keys(), Keys(), mask, **arguments)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("indices", torch.zeros(1, 3, 8, dtype=torch.long), "Tensor"),
        ("block_indices", torch.zeros(1, 3, 8, dtype=torch.long), "Tensor"),
        ("position_bias", torch.zeros(1, 4, 3, 3), "Tensor"),
        ("cu_seq_lens_q", torch.tensor([0, 3]), "Tensor"),
        ("max_length_q", 3, "int"),
        ("softmax_temperature", 0.5, "float"),
        ("output_attentions", True, "bool"),
    ],
)
def test_unknown_arguments_are_refused(name, value, kind):
    with pytest.raises(Unsupported, match=rf"Attention passes '{name}' \({kind}\)"):
        attend(**{name: value})
    attend(**{name: None})


def test_arguments_without_an_effect_are_taken():
    out, weights = attend(
        position_ids=torch.arange(3)[None],
        cache_position=torch.arange(3),
        use_cache=True,
        output_attentions=False,
        is_causal=True,
    )
    assert (out.shape, weights) == ((1, 3, 4, 16), None)


@pytest.mark.parametrize(("module", "argument"), [(True, False), (False, None), (False, False)])
def test_attention_that_is_not_causal_is_refused(module, argument):
    with pytest.raises(Unsupported, match=r"Attention does not attend causally \(is_causal=False\)"):
        attend(Attention(module), is_causal=argument)


def test_a_call_says_more_than_the_module():
    assert attend(Attention(False), is_causal=True)[0].shape == (1, 3, 4, 16)


@pytest.mark.parametrize("switched", [True, False], ids=["during", "after"])
def test_a_stock_pass_beside_ours_uses_the_function_its_config_names(monkeypatch, switched):
    """Also if the config is restored between the look-up of our function and its call."""
    module = Attention()
    module.config = PreTrainedConfig(attn_implementation="eager")
    query = torch.zeros(1, 4, 3, 16)
    found = []

    def eager(module, *args, **kwargs):
        found.append(module)
        return query, None

    monkeypatch.setattr(sys.modules[__name__], "eager_attention_forward", eager, raising=False)

    def stock_pass():
        shared_context_attention(module, query, query, query, None)

    with active([module.config] if switched else [], RowLengths(3)):
        thread = Thread(target=stock_pass)
        thread.start()
        thread.join()
    assert found == [module]


def test_a_window_that_only_the_cache_keeps_is_refused(monkeypatch):
    """transformers' cache forgets what the window hides, whoever makes the mask, or none."""
    monkeypatch.setattr(SharedKV, "stored_window", 5)
    with active([], RowLengths(5)):
        attend()
    message = (
        "a sliding window of 5 tokens, beyond which transformers' cache forgets, but Attention attends without one"
    )
    with active([], RowLengths(6)), pytest.raises(Unsupported, match=message):
        attend()


@pytest.mark.parametrize("size", [0, -1])
def test_a_window_of_no_tokens_is_none(size):
    """Some configs write it, and models make the mask for it that no layer takes."""
    attend(sliding_window=size)
    with pytest.raises(Unsupported, match=f"a sliding window of None tokens, .* one of {size}"):
        attend(sliding_window=size, mask=SlidingWindow(size))
