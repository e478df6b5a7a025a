"""Which processors are recognised, as generate builds them."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.decoding.sampling import Chain, read_chain

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
    ("begin_index", "step"), [(6, 0), (7, 1), (5, -1)], ids=["first token", "after a forced one", "before the call"]
)
def test_suppressed_tokens_are_read_of_all_processors(begin_index, step):
    """transformers 5.17 builds Whisper's a second time, beside those that it is given."""
    at_begin = [SuppressTokensAtBeginLogitsProcessor(tokens, begin_index) for tokens in ([4, 5], [5])]
    processors = [at_begin[0], SuppressTokensLogitsProcessor([3, 90]), SuppressTokensLogitsProcessor([7]), at_begin[1]]
    chain = read_chain(LogitsProcessorList([*processors, TemperatureLogitsWarper(0.5)]), prompt_length=6)
    assert chain.suppressed.tolist() == [3, 90, 7]
    assert chain.suppressed_at_begin.tolist() == [4, 5, 5]
    assert (chain.begin_step, chain.temperature) == (step, 0.5)


SUPPRESSED = {"suppress_tokens": [3, 9, 50, 1000], "begin_suppress_tokens": [0, 9, 17]}


@pytest.mark.parametrize("new", [0, 1], ids=["first token", "second token"])
@pytest.mark.parametrize(
    "options",
    [
        SUPPRESSED | {"repetition_penalty": 1.4, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
        SUPPRESSED | {"min_new_tokens": 4, "eos_token_id": 11},
        {"suppress_tokens": [], "begin_suppress_tokens": [5]},
        {"suppress_tokens": [5, 5]},
    ],
    ids=["all filters", "end tokens", "at the begin alone", "always alone"],
)
def test_the_distribution_is_that_of_the_processors(options, new):
    """What the kernel is specified to draw from, and what generate's own processors leave."""
    pytest.importorskip("triton")
    from hf_fastdecode.kernels.sampling import reference
    from hf_fastdecode.kernels.sampling.api import seen_tokens

    processors = built_by_generate(do_sample=True, **options)
    logits = torch.randn(7, 97, generator=torch.Generator().manual_seed(1)) * 3
    ids = torch.arange(6).expand(7, -1) + 3
    chain = read_chain(processors, prompt_length=6)
    if isinstance(chain.prompt_ignore_length, torch.Tensor):  # of one row, which the built processors are of
        logits, ids = logits[:1], ids[:1]
    seen = seen_tokens(ids[:, 2:], 97)
    settings = chain.settings("cpu", 97)
    settings.update(step=new)
    ids = torch.cat([ids, ids[:, -1:].expand(-1, new)], 1)
    expected = processors(ids, logits.clone()).softmax(-1)
    got = reference.distribution(logits, torch.arange(len(ids), dtype=torch.int32), settings, seen=seen)
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got.float(), expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"do_sample": True, "top_h": 0.4}, "TopHLogitsWarper"),
        ({"do_sample": True, "epsilon_cutoff": 0.01}, "EpsilonLogitsWarper"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
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
        ([TopPLogitsWarper(0.9), TemperatureLogitsWarper(0.8)], "TemperatureLogitsWarper comes after TopP"),
        ([TopPLogitsWarper(0.9), TopPLogitsWarper(0.8)], "TopPLogitsWarper comes after TopPLogitsWarper"),
        ([TopPLogitsWarper(0.9, filter_value=-1e4)], "TopPLogitsWarper has filter_value=-10000.0"),
        ([TopKLogitsWarper(5, filter_value=-1e4)], "TopKLogitsWarper has filter_value=-10000.0"),
        ([MinPLogitsWarper(0.1, min_tokens_to_keep=2)], "MinPLogitsWarper has min_tokens_to_keep=2"),
        ([TypicalLogitsWarper(0.1, min_tokens_to_keep=2)], "TypicalLogitsWarper has min_tokens_to_keep=2"),
        (
            [SuppressTokensAtBeginLogitsProcessor([3], 6), SuppressTokensAtBeginLogitsProcessor([3], 7)],
            "SuppressTokensAtBeginLogitsProcessor has begin_index=7, and another one has another",
        ),
        (
            [TemperatureLogitsWarper(0.8), SuppressTokensLogitsProcessor([3])],
            "SuppressTokensLogitsProcessor comes after Temp",
        ),
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
    settings = chain.settings("cpu", 97, seed=11)
    assert settings.temperature == 0.5
    assert settings.top_k == 9
    assert settings.seed == 11
    assert settings.eos_ids.tolist() == [2, 3]
    asked = {"top_k", "repetition_penalty", "min_new_tokens"}
    assert {name for name, used in settings.features.items() if used} == asked
    assert settings.suppressed is None
    assert not settings.greedy
