"""Bounds of options, and defaults that depend on others."""

import math

import pytest

from hf_fastdecode.cli.checks import parse_counts
from hf_fastdecode.cli.sampling import Sampling, SamplingOptions
from hf_fastdecode.errors import InputError, one_line


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("n", 0, "--n must be at least 1, got 0"),
        ("max_new_tokens", -3, "--max-new-tokens must be at least 1, got -3"),
        (
            "temperature",
            0.0,
            "--temperature must be at least 1e-06 and finite, got 0; `hf-fastdecode generate --greedy` takes",
        ),
        ("temperature", 1e-38, "got 1e-38"),
        ("temperature", -1.0, "got -1"),
        ("temperature", math.inf, "got inf"),
        ("temperature", math.nan, "got nan"),
        ("top_p", 0.0, "--top-p must be above 0 and at most 1, got 0"),
        ("top_p", 1.01, "got 1.01"),
        ("top_p", math.nan, "got nan"),
        ("top_k", -1, "--top-k must be at least 0, got -1"),
        ("seed", -1, "--seed must be at least 0"),
        ("seed", 2**63, "below 2\\*\\*63"),
    ],
)
def test_out_of_bounds(option, value, message):
    with pytest.raises(InputError, match=message):
        Sampling(**{option: value})


def test_defaults_depend_on_greedy():
    assert SamplingOptions(max_new_tokens=8).sampling() == Sampling(max_new_tokens=8)
    assert SamplingOptions(greedy=True).sampling() == Sampling(n=1, greedy=True)


@pytest.mark.parametrize("option", ["temperature", "top_p", "top_k"])
def test_greedy_contradicts_sampling_options(option):
    flag = "--" + option.replace("_", "-")
    with pytest.raises(InputError, match=f"{flag} 1 has no effect with --greedy"):
        SamplingOptions(greedy=True, **{option: 1}).sampling()


def test_greedy_samples_are_all_equal():
    with pytest.raises(InputError, match="got n = 3; use --n 1"):
        SamplingOptions(greedy=True, n=3).sampling()


def test_counts_rise():
    assert parse_counts("questions", "16,1, 4,16") == [1, 4, 16]


@pytest.mark.parametrize("text", ["", "0", "4,,8", "1.5", "-2", "²", "many"])
def test_counts_of_another_form_are_refused(text):
    with pytest.raises(InputError, match="--questions must be whole numbers of at least 1 with commas between, got"):
        parse_counts("questions", text)


def test_one_line_of_an_error():
    assert one_line(ValueError("first\n  second.\n")) == "first second"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("word " * 200))) <= 400
