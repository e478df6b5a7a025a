"""The specification against transformers' own processors."""

import pytest
import torch

pytest.importorskip("triton")
from hf_fastdecode.kernels.sampling import reference

from .cases import CHAINS, assert_drawn_from, ids_of, name_of, processed_by_transformers, settings_for


@pytest.mark.parametrize("numbers", CHAINS, ids=name_of)
@pytest.mark.parametrize("vocab", [50, 1000])
def test_the_distribution_is_that_of_transformers(numbers, vocab):
    torch.manual_seed(vocab)
    logits = torch.randn(40, vocab) * torch.linspace(0.3, 6, 40)[:, None]
    expected = processed_by_transformers(logits, numbers)
    got = reference.distribution(logits, ids_of(40), settings_for(numbers))
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got.float(), expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    "numbers", [{"top_k": 3}, {"top_k": 9}, {"top_p": 0.55}, {"top_k": 9, "top_p": 0.73}], ids=name_of
)
def test_ties_are_those_of_transformers(numbers):
    torch.manual_seed(0)
    logits = torch.randint(0, 4, (60, 45)).float()
    expected = processed_by_transformers(logits, numbers)
    got = reference.distribution(logits, ids_of(60), settings_for(numbers))
    assert torch.equal((got > 0).sum(1), (expected > 0).sum(1))  # which of them stay is up to transformers' sort
    torch.testing.assert_close(got.sort().values.float(), expected.sort().values, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("numbers", CHAINS, ids=name_of)
def test_draws_have_that_distribution(numbers):
    torch.manual_seed(1)
    logits = torch.randn(1, 45) * 2
    settings = settings_for(numbers, seed=5)
    counts = torch.zeros(45)
    for step in range(8):
        settings.step.fill_(step)
        tokens, _ = reference.sample(logits.expand(4000, -1), ids_of(4000), settings, columns=16)
        counts += tokens.bincount(minlength=45)
    assert_drawn_from(counts, reference.distribution(logits, ids_of(1), settings)[0])


def test_uniform_numbers_are_philox():
    """The known answers of Random123 for counters and keys of zeros and of ones."""
    zero = reference.uniforms(0, 0, torch.zeros(1, dtype=torch.int32), 0)[0]
    words = 0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8
    assert zero[0] == words[0] * 2.0**-32 + (words[1] >> 11) * 2.0**-53
    assert zero[1] == words[2] * 2.0**-32 + (words[3] >> 11) * 2.0**-53
    ones = reference.uniforms(-1, -1, -torch.ones(1, dtype=torch.int32), 0xFFFFFFFF)[0]
    words = 0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD
    assert ones[0] == words[0] * 2.0**-32 + (words[1] >> 11) * 2.0**-53
    assert ones[1] == words[2] * 2.0**-32 + (words[3] >> 11) * 2.0**-53
