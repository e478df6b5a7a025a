"""First passes of decoders with an encoder in CUDA graphs, against fp64."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import captured_prefill

from ..patches.encoder_decoder_models import encoder_decoder

pytestmark = pytest.mark.gpu
FIRST_TOKEN = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
CALLS = {"samples": {"do_sample": True, "num_return_sequences": 2}, "beams": {"num_beams": 2}}


def texts(count, prompt, seed):
    """Inputs of 40 tokens and decoder prompts, of which the first token is the one that decoders begin with."""
    generator = torch.Generator().manual_seed(seed)
    inputs, ids = (torch.randint(3, 60, (count, length), generator=generator) for length in (40, prompt))
    ids[:, 0] = 2
    return {"input_ids": inputs.cuda(), "decoder_input_ids": ids.cuda()}


@torch.no_grad()
@pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("count", "prompt"), [(1, 1), (1, 5), (3, 5)])
def test_replays_serve_other_inputs(arguments, count, prompt, monkeypatch):
    """Errors of logits at most twice those of stock, with captured steps of longer calls in between."""
    monkeypatch.setattr(captured_prefill, "_PASSES_THAT_PAY_A_CAPTURE", {True: 1})
    model = encoder_decoder("bart", d_model=256).bfloat16().cuda()
    model.generation_config.forced_eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.decoder_start_token_id = 2
    exact, stock, errors = copy.deepcopy(model).double(), copy.deepcopy(model), []
    with fd.enabled(model, mode="graph", min_saved_tokens=1):
        for seed in range(5):
            call = texts(count, prompt, seed)
            right, theirs = (one(**call).logits[:, -1].double() for one in (exact, stock))
            ours = model.generate(**call, **arguments, **FIRST_TOKEN).logits[0][::2].double()
            report = fd.explain(model).last_call
            assert report.captured_prefill_tokens == count * prompt, report.prefill_reason or report.mode_reason
            errors.append([(one - right).square().mean().item() for one in (ours, theirs)])
            model.generate(**texts(count, prompt, seed + 50), **arguments, max_new_tokens=4)
        assert state_of(model).captures.by_rows.count == 1
    ours, theirs = (sum(kind) ** 0.5 for kind in zip(*errors, strict=True))
    assert ours <= 2 * theirs
