"""`decoder_of` finds the module that returns the last hidden states of a causal text model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    DecisionTransformerConfig,
    DecisionTransformerModel,
    PreTrainedModel,
    T5Config,
    T5Model,
)
from transformers.models.llama.modeling_llama import LlamaModel

from hf_fastdecode.forward.decoder import decoder_of

from ..architectures.classes import tiny_model_of
from ..tiny_models import ARCHITECTURES, ragged_prompts, tiny_model

PATHS = {"gpt2": "transformer", "gpt_neox": "gpt_neox", "gpt_bigcode": "transformer", "opt": "model.decoder"}


def path_of(model: nn.Module) -> str:
    decoder = decoder_of(model)
    return next(name for name, module in model.named_modules() if module is decoder)


def check(decoder: PreTrainedModel) -> None:
    """Hidden states come in the asked shape, and depend on no later token."""
    prompts = ragged_prompts(9, 12)
    with torch.no_grad():
        states = decoder(**prompts).last_hidden_state
        assert states.shape == (2, 12, decoder.config.hidden_size)
        prompts["input_ids"][:, -3:] = 3
        later = decoder(**prompts).last_hidden_state
    assert torch.equal(states[:, 3:9], later[:, 3:9])
    assert not torch.equal(states[:, 9:], later[:, 9:])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tiny_model_has_one(name):
    model = tiny_model(name)
    assert path_of(model) == PATHS.get(ARCHITECTURES[name][0], "model")
    decoder = decoder_of(model)
    assert decoder_of(decoder) is decoder
    check(decoder)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("BartForCausalLM", "model.decoder"),  # in a wrapper, whose forward names no arguments
        ("BertLMHeadModel", "bert"),
        ("BloomForCausalLM", "transformer"),
        ("MambaForCausalLM", "backbone"),
        ("OPTForCausalLM", "model.decoder"),  # which its head calls past the model
        ("LlavaForConditionalGeneration", "model.language_model"),
        ("Qwen2VLForConditionalGeneration", "model.language_model"),
        ("CwmForCausalLM", "model"),
        ("Gemma3ForCausalLM", "model"),  # of a family with images
    ],
)
def test_names_differ(name, path):
    assert path_of(tiny_model_of(name)) == path


def test_models_without_a_head_or_with_another():
    config = AutoConfig.for_model(*ARCHITECTURES["llama-gqa"][:1], **ARCHITECTURES["llama-gqa"][1], vocab_size=97)
    reward = AutoModelForSequenceClassification.from_config(config)
    assert decoder_of(reward) is reward.model
    check(decoder_of(AutoModel.from_config(config).eval()))


def test_a_compiled_decoder_is_found_in_its_wrapper():
    model = tiny_model()
    inner = model.model
    model.model = torch.compile(inner)
    assert decoder_of(model) is inner


@pytest.mark.parametrize(
    "name",
    [
        "T5ForConditionalGeneration",
        "BarkSemanticModel",  # which has a head itself
        "BlipTextLMHeadModel",  # whose calls say whether tokens attend to later ones
        "FlaubertWithLMHeadModel",  # as its config says
    ],
)
def test_models_without_one(name):
    assert decoder_of(tiny_model_of(name)) is None


def test_a_decoder_inside_a_model_of_other_inputs():
    """It predicts actions of states, for which a GPT-2 within is given embeddings."""
    config = DecisionTransformerConfig(hidden_size=64, n_layer=1, n_head=1)
    assert decoder_of(DecisionTransformerModel(config)) is None


def test_models_whose_tokens_attend_to_later_ones():
    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    for kind in ("bert", "big_bird", "deberta", "modernbert"):
        assert decoder_of(AutoModel.from_config(AutoConfig.for_model(kind, **small))) is None
    small |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 97}
    two_ways = AutoConfig.for_model("gemma3_text", **small, use_bidirectional_attention=True)
    assert decoder_of(AutoModel.from_config(two_ways)) is None
    assert decoder_of(T5Model(T5Config(d_model=64, num_layers=1, num_heads=4, vocab_size=97))) is None


def test_code_without_annotations():
    """As in models of the hub: the module inside is taken, but no model without a head."""

    class Bare(LlamaModel):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            return super().forward(input_ids, attention_mask, **kwargs)

    class Named(LlamaModel):
        def forward(self, input_ids=None, attention_mask=None, **kwargs) -> Missing:  # noqa: F821
            return super().forward(input_ids, attention_mask, **kwargs)

    for kind in (Bare, Named):
        model = tiny_model()
        model.model = kind(model.config)
        assert decoder_of(model) is model.model
        assert decoder_of(model.model) is None
