"""Arguments in the library's messages, as the command line shows them."""

from __future__ import annotations

import pytest

from hf_fastdecode.cli.arguments import in_options


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("`limit` must be at least 1, got 0", "--limit must be at least 1, got 0"),
        ('try `dtype="bfloat16"`', "try --dtype bfloat16"),
        ("`prompt_format='mbxp'`", "--format mbxp"),
        ('a conversion with `format="full"`', "a conversion with --format full"),
        ("pass `resume=True`", "pass --resume"),
        ("leave `rank=8` out", "leave --rank 8 out"),
        ("`max_position_embeddings` of `config.json`", "`max_position_embeddings` of `config.json`"),
    ],
)
def test_arguments_are_shown_as_options(message, shown):
    assert in_options(message) == shown
