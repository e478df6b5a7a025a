"""Which processors are recognised, as generate builds them."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.decoding.processor_chain import Chain, read_chain

from ..tiny_models import tiny_model


def built_by_generate(**options):
    """The list that generate hands to a decoding loop, for a prompt of 6 tokens whose first two are padding."""
    built = {}

    def loop(model, input_ids, logits_processor=None, **_):
        built["processors"] = logits_processor
        return input_ids

    ids = torch.arange(6)[None] + 3
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0, **{"top_k": 0, **options})
    tiny_model().generate(ids, attention_mask=mask, generation_config=config, custom_generate=loop)
    return built["processors"]


@pytest.mark.parametrize(
    ("options", "chain"),
    [
        ({"do_sample": False}, Chain()),
        ({"do_sample": True}, Chain()),
        ({"do_sample": True, "top_k": None}, Chain(top_k=50)),  # what generate does with None
        ({"do_sample": True, "temperature": 0.8, "top_p": 0.95}, Chain(temperature=0.8, top_p=0.95)),
        ({"do_sample": True, "top_k": 50, "min_p": 0.1}, Chain(top_k=50, min_p=0.1)),
        (
            {"do_sample": True, "temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.7},
            Chain(temperature=0.5, top_k=9, top_p=0.9, min_p=0.01, typical_p=0.7),
        ),
        (
            {"do_sample": True, "min_new_tokens": 3, "eos_token_id": [4, 5]},
            Chain(min_new_tokens=3, eos_token_ids=(4, 5)),
        ),
        ({"do_sample": False, "min_length": 8, "eos_token_id": 4}, Chain(min_new_tokens=2, eos_token_ids=(4,))),
        ({"do_sample": True, "renormalize_logits": True, "top_p": 0.9}, Chain(top_p=0.9)),
    ],
)
def test_what_generate_builds_is_read(options, chain):
    assert read_chain(built_by_generate(**options), prompt_length=6) == chain


def test_the_penalty_is_read_with_the_prompt_it_ignores():
    processors = built_by_generate(do_sample=True, repetition_penalty=1.3)
    chain = read_chain(processors, prompt_length=6)
    assert chain.repetition_penalty == 1.3
    assert chain.prompt_ignore_length is processors[0].prompt_ignore_length


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"do_sample": True, "top_h": 0.4}, "TopHLogitsWarper"),
        ({"do_sample": True, "epsilon_cutoff": 0.01}, "EpsilonLogitsWarper"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"suppress_tokens": [3]}, "SuppressTokensLogitsProcessor"),
    ],
)
def test_others_are_named(options, name):
    with pytest.raises(Unsupported, match=name):
        read_chain(built_by_generate(**options), prompt_length=6)


class Mine(TopPLogitsWarper):
    pass


@pytest.mark.parametrize(
    ("processors", "words"),
    [
        ([Mine(0.9)], "Mine is not among"),
        ([lambda ids, scores: scores], "function is not among"),
        (
            [TopPLogitsWarper(0.9), TemperatureLogitsWarper(0.8)],
            "TemperatureLogitsWarper comes after TopP",
        ),
        ([TopPLogitsWarper(0.9), TopPLogitsWarper(0.8)], "TopPLogitsWarper comes after TopPLogitsWarper"),
        ([TopPLogitsWarper(0.9, filter_value=-1e4)], "TopPLogitsWarper has filter_value=-10000.0"),
        ([TopKLogitsWarper(5, filter_value=-1e4)], "TopKLogitsWarper has filter_value=-10000.0"),
        ([MinPLogitsWarper(0.1, min_tokens_to_keep=2)], "MinPLogitsWarper has min_tokens_to_keep=2"),
        ([TypicalLogitsWarper(0.1, min_tokens_to_keep=2)], "TypicalLogitsWarper has min_tokens_to_keep=2"),
        (
            [MinLengthLogitsProcessor(9, 3), MinNewTokensLengthLogitsProcessor(6, 2, 4)],
            "MinNewTokensLengthLogitsProcessor means other end tokens",
        ),
    ],
)
def test_what_differs_is_refused_with_a_reason(processors, words):
    with pytest.raises(Unsupported, match=f"^{words}"):
        read_chain(LogitsProcessorList(processors), prompt_length=6)


def test_top_k_keeps_what_its_constructor_made_of_it():
    chain = read_chain(LogitsProcessorList([TopKLogitsWarper(1, min_tokens_to_keep=3)]), prompt_length=0)
    assert chain.top_k == 3


def test_a_chain_makes_its_settings():
    pytest.importorskip("triton")
    chain = Chain(temperature=0.5, top_k=9, repetition_penalty=1.2, min_new_tokens=4, eos_token_ids=(2, 3))
    settings = chain.settings("cpu", seed=11)
    assert settings.temperature == 0.5
    assert settings.top_k == 9
    assert settings.seed == 11
    assert settings.eos_ids.tolist() == [2, 3]
    assert settings.features == {"top_k": True, "typical_p": False, "repetition_penalty": True, "min_new_tokens": True}
    assert not settings.greedy
