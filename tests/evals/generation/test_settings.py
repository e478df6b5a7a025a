"""Digests that tell runs apart."""

import copy

import torch
from torch import nn

from hf_fastdecode.evals.rescore import model_digest, weights_digest
from hf_fastdecode.evals.run_folder import prompts_digest


def digest_of(**parameters):
    module = nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return weights_digest(module)


def test_weights_are_told_apart():
    weight = torch.arange(1000.0)
    changed = weight.clone()
    changed[613] += 1e-4
    swapped = weight.clone()
    swapped[:2] = weight[:2].flip(0)
    others = [
        digest_of(weight=changed),
        digest_of(weight=swapped),
        digest_of(other=weight),
        digest_of(weight=weight.reshape(10, 100)),
        digest_of(weight=weight.bfloat16()),
        digest_of(weight=weight, more=torch.ones(1)),
    ]
    assert digest_of(weight=weight) == digest_of(weight=weight.clone())
    assert len({digest_of(weight=weight), *others}) == 7


def test_weights_of_any_size():
    assert digest_of(weight=torch.ones(1).expand(2**24 + 3_000_001))  # more than float32 can count
    assert digest_of(weight=torch.ones(()), empty=torch.ones(0))


def test_configs_and_tokenizers_are_told_apart(small):
    model, before = small.model, model_digest(small.model, small.tokenizer)
    assert model_digest(model, small.tokenizer) == before
    for config, name, value in (
        (model.config, "rms_norm_eps", 0.5),
        (model.generation_config, "eos_token_id", 7),
        (model.config, "_name_or_path", "elsewhere"),
    ):
        kept = getattr(config, name)
        setattr(config, name, value)
        try:
            assert (model_digest(model, small.tokenizer) == before) == (name == "_name_or_path")
        finally:
            setattr(config, name, kept)
    other = copy.deepcopy(small.tokenizer)
    other.add_tokens(["something new"])
    assert model_digest(model, other) != before


def test_prompts_are_told_apart():
    assert prompts_digest(["1", "2"], [[1], [2]]) == prompts_digest(["1", "2"], [[1], [2]])
    assert (
        len({prompts_digest(ids, texts) for ids in (["1", "2"], ["2", "1"]) for texts in ([[1], [2]], [[1, 2], []])})
        == 4
    )
