"""Drawing and timing one `generate` call."""

import pytest
import torch
from torch import nn

import hf_fastdecode as fd
from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement.calls import (
    begin_peak,
    draw,
    memory_and_logit_errors,
    peak_over,
    prefill_and_decode,
    seeded,
    step_columns,
    what_ran,
)
from hf_fastdecode.measurement.rows import NotAvailableError

from ..tiny_models import tiny_model

CPU = torch.device("cpu")
IDS = torch.arange(3, 73)[None].repeat(2, 1)
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama-gqa")


@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_call_is_drawn_from_its_seed(model, is_enabled):
    state, steps = torch.get_rng_state(), []
    if is_enabled:
        fd.enable(model)
    try:
        found, again = (
            draw(
                model,
                INPUTS,
                seed=5,
                on_step=steps.append,
                time_every_step=every,
                keep_cache=every,
                max_new_tokens=4,
                min_new_tokens=4,
                num_return_sequences=3,
                do_sample=True,
            )
            for every in (True, False)
        )
    finally:
        fd.disable(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found.sequences, again.sequences)
    assert torch.equal(found.prompts, IDS.repeat_interleave(3, dim=0))
    assert found.tokens.shape == found.log_probs.shape == (6, 4)
    assert steps == [0, 1, 2, 3] * 2
    assert [len(one.step_times) for one in (found, again)] == [4, 1]
    assert 0 < found.first_token_s < found.step_times[-1] - found.started < found.total_s
    assert found.cache is not None and again.cache is None


def test_memory_and_weights_that_are_not_finite_are_one_line(model):
    with pytest.raises(InputError, match="too many"), memory_and_logit_errors(model, lambda: InputError("too many")):
        raise torch.OutOfMemoryError
    with pytest.raises(RuntimeError, match="else"), memory_and_logit_errors(model, lambda: InputError("too many")):
        raise RuntimeError("something else")
    broken = tiny_model("llama-gqa")
    nn.init.constant_(broken.get_output_embeddings().weight, torch.nan)
    with (
        pytest.raises(InputError, match=r"logits are not finite: its weight .* holds NaN or infinity"),
        memory_and_logit_errors(broken, lambda: InputError("too many")),
    ):
        draw(broken, INPUTS, seed=0, max_new_tokens=2)


def test_decoding_is_what_whole_calls_take_longer(model, monkeypatch):
    lengths = []
    monkeypatch.setattr(
        "hf_fastdecode.measurement.calls.wall_samples",
        lambda call, device, **options: call() or [0.5 * lengths[-1] + 0.5],
    )
    found = prefill_and_decode(model, lengths.append, 9, repeats=1, budget_s=1.0)
    assert lengths == [1, 9]
    assert found == ([1.0], [4.0], [5.0])
    columns = step_columns(found[1], steps=8, drawn=16)
    assert columns == {"ms_per_step_p20": 500.0, "ms_per_step": 500.0, "ms_per_step_p80": 500.0, "tokens_per_s": 4.0}
    assert step_columns([-1.0], steps=8, drawn=16)["tokens_per_s"] is None


def test_what_ran_is_said_of_the_last_call(model):
    with fd.enabled(model):
        assert what_ran(model, must_share=False) == "stock: no call"
        with pytest.raises(NotAvailableError, match="it ran stock: no call"):
            what_ran(model)
        with seeded(CPU):
            model.generate(**INPUTS, max_new_tokens=2, do_sample=True, num_return_sequences=2)
        assert what_ran(model) == "eager, sampler hf"


def test_a_cpu_has_no_peak():
    assert begin_peak(CPU) is None
    assert peak_over(CPU, None) is None
