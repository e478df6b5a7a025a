"""Programs that load a model by name, with one line added: their results are stock's, and their calls are shared."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .programs import PROGRAMS, Work, run


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_line_shares_every_call(name):
    expected, stock = run(name, Work(), enable=False)
    found, enabled = run(name, Work(), enable=True)
    assert found == expected
    assert len({str(result) for result in expected}) > 1
    assert stock.paths == {"stock"}
    assert enabled.paths == {"shared"}, enabled.made
    assert [(call.rows, call.padded_length) for call in enabled.made] == [
        (call.rows, call.padded_length) for call in stock.made
    ]
    if PROGRAMS[name].options:  # one prompt a call: each begins like the one before it
        first, *later = enabled.made
        assert first.prefilled_tokens == first.padded_length
        assert [call.rows for call in enabled.made] == [1] * Work().problems
        assert all(call.prefilled_tokens <= 0.6 * call.padded_length for call in later)
    else:
        assert enabled.prefilled_tokens <= stock.prefilled_tokens / Work().samples


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import lmformatenforcer.integrations.transformers", "ImportError: transformers is not installed"),
        (
            "from verl.workers.rollout.hf_rollout import HFRollout; HFRollout(None, {})",
            "TypeError: Can't instantiate abstract class HFRollout",
        ),
    ],
    ids=["lm-format-enforcer", "verl"],
)
def test_what_programs_cannot_do_without_us_either(code, error):
    """Where a release mends one of these, `programs` and the page lose their workaround."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert error in done.stderr
