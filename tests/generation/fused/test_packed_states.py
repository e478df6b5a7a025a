"""Segments of a packed row, which the kernels of layers with states take at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.layers.state import Segments
from hf_fastdecode.generation.fused import states
from hf_fastdecode.generation.structure import Structure
from hf_fastdecode.kernels.state_scans import api as scans

from ...architectures.classes import tiny_model_of
from ...tiny_models import ragged_prompts
from ..test_packed_states import padded
from .half_models import DEVICE, fail
from .test_states import of_states

ASKED = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 1, "num_return_sequences": 2}
LENGTHS = (17, 66, 9)


CLASSES = [
    "Qwen3NextForCausalLM",  # a net that runs as a whole
    "OlmoHybridForCausalLM",  # and others, of which functions give way
    "NemotronHForCausalLM",
    *([] if CACHE == "past_key_values" else ["Lfm2ForCausalLM"]),  # whose code hands arguments on from 5.24
]


@pytest.mark.parametrize("name", CLASSES)
def test_one_launch_for_prompts_of_all_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New ones, and beside these those that continue the states of others."""
    model = tiny_model_of(name).to(DEVICE)
    ids = ragged_prompts(*LENGTHS)
    rows = [ids["input_ids"][row, 66 - length :] for row, length in enumerate(LENGTHS)]
    calls = padded(rows), padded([torch.cat([rows[0], rows[2]]), rows[1] + 1, torch.cat([rows[2], rows[0]])])
    calls = [{name: one.to(DEVICE) for name, one in call.items()} for call in calls]

    def logits() -> list[torch.Tensor]:
        with fd.enabled(model, min_saved_tokens=1, min_shared_tokens=8, reuse_prefix=True):
            found = [model.generate(**call, **ASKED, do_sample=True, top_k=0).logits[0].float() for call in calls]
            assert fd.explain(model).last_call.known_tokens == (17, 0, 9)
            return found

    exact = logits()
    model.half()
    own, launched, convolve = logits(), [], scans.convolve
    monkeypatch.setattr(Structure, "fused", property(lambda self: of_states(model)))

    def counted(x: Any, starts: Any, *args: Any, **named: Any) -> Any:
        launched.append(len(starts) - 1)
        return convolve(x, starts, *args, **named)

    monkeypatch.setattr(scans, "convolve", counted)
    at_once = logits()
    layers = sum(states.may_be(type(one)) for one in model.modules())
    assert launched == [3] * layers * 2
    for one, two, three in zip(exact, own, at_once, strict=True):
        error, own_error = ((found - one).pow(2).mean().sqrt() for found in (three, two))
        assert error <= 1.1 * own_error


def test_convolutions_of_other_activations_or_dtypes_take_no_segments() -> None:
    x, weight = torch.ones(1, 8, 5).half(), torch.ones(8, 4).half()
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    for given in (("gelu", weight), ("silu", weight.float())):
        segments = Segments(starts)
        with pytest.raises(ValueError, match="takes no segments like these"):
            states._convolve_tokens(fail, x, given[1], activation=given[0], segments=segments)
        assert segments.conv_after is None
