"""Captured prefill on a stream of its own, begun before a call is prepared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import captured_prefill

from ..tiny_models import ragged_prompts, seeded, tiny_model

pytestmark = pytest.mark.gpu
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 20}


@pytest.fixture
def model():
    return tiny_model("llama-gqa", hidden_size=256).bfloat16().cuda()


@pytest.fixture
def right(monkeypatch):
    """Passes whose outputs were used."""
    found, outputs = [], captured_prefill.PrefillAhead.outputs
    monkeypatch.setattr(
        captured_prefill.PrefillAhead, "outputs", lambda self: found.append(self.ids.shape[1]) or outputs(self)
    )
    return found


def calls(*lengths):
    return [
        {name: value.cuda() for name, value in ragged_prompts(length, seed=seed).items()} | SAMPLING
        for seed, length in enumerate(lengths)
    ]


def captured(model, call):
    """Tokens of a call whose captured prefill is not begun ahead."""
    state_of(model).captures.prefills.again = None
    return seeded(lambda: model.generate(**call))


def test_tokens_are_those_of_the_same_pass_begun_later(model, right):
    short, shorter, long = calls(64, 40, 700)
    with fd.enabled(model, mode="graph"):
        for call in (short, long):
            for _ in range(2):  # the second is captured
                model.generate(**call)
        expected = [captured(model, call) for call in (short, shorter, long)]
        del right[:]
        for _ in range(10):
            for call, tokens in zip((short, shorter, long), expected, strict=True):
                assert torch.equal(seeded(lambda call=call: model.generate(**call)), tokens)
    assert right == [64, 40, 700] * 10


@pytest.mark.parametrize("change", ["padding", "moved", "scaled"])
def test_a_wrong_guess_disturbs_nothing(change, model, right):
    (call,) = calls(700)
    with fd.enabled(model, mode="graph"):
        for _ in range(3):
            model.generate(**call)
        assert right == [700]
        if change == "padding":
            call["attention_mask"][:, :9] = 0
        elif change == "moved":
            held = [parameter.data for parameter in model.parameters()]  # else the same addresses may be given again
            model.cpu()
            torch.cuda.empty_cache()
            model.cuda()
            del held
        else:
            model.model.norm.variance_epsilon = 0.5
        found = seeded(lambda: model.generate(**call))
        assert right == [700]
    with fd.enabled(model, mode="graph"):
        again = [captured(model, call) for _ in range(3)]
    assert any(torch.equal(found, tokens) for tokens in again)  # eager or captured, which round differently


def test_threads(model):
    both = [call | {"do_sample": False, "num_return_sequences": 1} for call in calls(64, 60)]
    with fd.enabled(model, mode="graph"):
        for call in both * 2:
            model.generate(**call)
        expected = [model.generate(**call).tolist() for call in both]

        def many(index):
            for _ in range(20):
                assert model.generate(**both[index]).tolist() == expected[index]

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(many, range(2)))
