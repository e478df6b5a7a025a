"""Prompts of distinct lengths end to end in one row, in which layers with states run segment by segment.

`test_states` compares calls of all kinds of layers; here is what packing adds.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE, COMPILED_CALL, uncompiled_call
from hf_fastdecode.cache.layout import ModelLayout, keeps_state
from hf_fastdecode.generation.fused.delta_nets import DELTA_NETS
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.structure import Structure
from hf_fastdecode.kernels.state_scans import api

from ..architectures.classes import tiny_model_of
from ..architectures.overrides import OVERRIDES
from ..module_calls import before_calls
from ..tiny_models import ragged_prompts
from .calls import tokens_embedded
from .test_states import BEAMS, GREEDY, SAMPLING, run

LENGTHS = (31, 1, 45, 2)
PROMPTS = ragged_prompts(*LENGTHS)
LOGITS = SAMPLING | {"output_logits": True, "return_dict_in_generate": True}

CLASSES = [
    "Qwen3_5ForCausalLM",
    "BambaForCausalLM",
    "Lfm2ForCausalLM",
    "ZayaForCausalLM",  # whose states are within attention, and whose code returns several tensors
    *([] if CACHE == "past_key_values" else ["Mamba2ForCausalLM", "FalconMambaForCausalLM"]),
]


@pytest.fixture(scope="module")
def model():
    return tiny_model_of("NemotronHForCausalLM")


def are_close(found, expected, tolerance=1e-4):
    found, expected = torch.stack(found), torch.stack(expected)
    torch.testing.assert_close(found, expected, atol=tolerance * float(expected.std()), rtol=0)


@pytest.mark.parametrize("name", CLASSES)
def test_distinct_lengths_are_one_pass(name):
    each = tiny_model_of(name)
    stock = run(each, LOGITS, PROMPTS)
    with fd.enabled(each, min_saved_tokens=1), tokens_embedded(each) as counted:
        shared = run(each, LOGITS, PROMPTS)
        assert fd.explain(each).last_call.path == "shared"
    assert counted[0] == sum(LENGTHS)
    assert torch.equal(shared.sequences, stock.sequences)
    are_close(shared.logits, stock.logits)


def test_what_is_around_states_runs_once(model):
    """Prompts of the same text are one segment, and a pass calls each module once but for those with states."""
    prompts = {name: one.repeat_interleave(2, 0) for name, one in PROMPTS.items()}
    stock, within, around = run(model, GREEDY, prompts), [], []
    watched = [(one.in_proj, within) for one in model.modules() if keeps_state(type(one))]
    watched.append((model.model.layers[0].norm, around))
    with fd.enabled(model, min_saved_tokens=1), ExitStack() as stack:
        for module, tokens in watched:
            count = partial(lambda tokens, args, kwargs: tokens.append(args[0].shape[1]), tokens)
            stack.enter_context(before_calls(module, count))
        assert torch.equal(run(model, GREEDY, prompts), stock)
    assert around[0] == sum(LENGTHS)
    assert within[: len(LENGTHS) * len(watched[1:])] == [*LENGTHS] * len(watched[1:])


def test_new_prompts_run_beside_those_that_continue_others(model):
    """In one pass, from states at the ends of different paths, or from none."""
    longer = ragged_prompts(20, 25, 17)
    rows = [longer["input_ids"][row, 25 - length :] for row, length in enumerate((20, 25, 17))]
    more = [torch.cat([rows[0], rows[2][:12]]), torch.cat([rows[1], rows[2][3:]]), rows[2]]
    known, prompts = padded(rows[:2]), padded(more)
    stock, beams = run(model, SAMPLING, prompts), run(model, BEAMS, prompts)
    for arguments, tokens in ((SAMPLING, stock), (BEAMS, beams)):
        with fd.enabled(model, min_saved_tokens=1, min_shared_tokens=8, reuse_prefix=True):
            run(model, SAMPLING, known)
            with tokens_embedded(model) as counted:
                assert torch.equal(run(model, arguments, prompts), tokens)
            assert counted[0] == 12 + 14 + 17
            assert fd.explain(model).last_call.known_tokens == (20, 25, 0)


def test_kernels_take_all_segments_at_once(monkeypatch):
    """Also those that continue different paths, or none. Errors against fp32 are about those of the model's code."""
    pytest.importorskip("triton")
    each, counts = tiny_model_of("Qwen3_5ForCausalLM"), []
    monkeypatch.setattr(Structure, "fused", property(lambda self: nets_of(each) if each.dtype == torch.half else None))
    for name in ("convolve", "delta_rule"):
        own = getattr(api, name)
        monkeypatch.setattr(api, name, lambda *args, own=own, **named: counts.append(1) or own(*args, **named))
    rows = [one[one > 0] for one in PROMPTS["input_ids"][:3]]
    later = padded([torch.cat([rows[0], rows[2][:9]]), torch.cat([rows[2], rows[0][:3]]), rows[2][5:15]])
    one_step = LOGITS | {"max_new_tokens": 1}

    def logits(**options):
        with fd.enabled(each, min_saved_tokens=1, **options):
            found = run(each, one_step, padded(rows)).logits + run(each, one_step, later).logits
            assert fd.explain(each).last_call.path == "shared"
        return torch.cat(found).float()

    exact = logits()
    each.half()
    own = run(each, one_step, padded(rows)).logits + run(each, one_step, later).logits
    found = logits(reuse_prefix=True, min_shared_tokens=8)
    nets = sum(keeps_state(type(one)) for one in each.modules())
    assert len(counts) == 2 * 2 * nets  # two passes
    assert (found - exact).norm() <= 1.5 * (torch.cat(own).float() - exact).norm()


def nets_of(model):
    return FusedModules(model, found=[one for one in FusedModules(model).found if one.kind is DELTA_NETS])


def padded(rows):
    width = max(map(len, rows))
    ids = [torch.cat([one.new_zeros(width - len(one)), one]) for one in rows]
    shown = [torch.arange(width) >= width - len(one) for one in rows]
    return {"input_ids": torch.stack(ids), "attention_mask": torch.stack(shown).long()}


def test_hidden_states_and_embeddings():
    model = tiny_model_of("Lfm2ForCausalLM")
    hidden = SAMPLING | {"output_hidden_states": True, "return_dict_in_generate": True}
    stock, given = run(model, hidden, PROMPTS), {"attention_mask": PROMPTS["attention_mask"]}
    given["inputs_embeds"] = model.get_input_embeddings()(PROMPTS["input_ids"]).detach()
    embedded = run(model, SAMPLING, given)
    with fd.enabled(model, min_saved_tokens=1):
        shared = run(model, hidden, PROMPTS)
        assert fd.explain(model).last_call.path == "shared"
        assert torch.equal(run(model, SAMPLING, given), embedded)
        assert fd.explain(model).last_call.path == "shared"
    shown = PROMPTS["attention_mask"].bool().repeat_interleave(3, 0)
    are_close(*([one[shown] for one in whole.hidden_states[0]] for whole in (shared, stock)))


def test_biases_that_padding_has_enter_states(monkeypatch):
    """Convolutions see them in front of a padded prompt, whose rows then run as in stock."""
    name = "NemotronHForCausalLM"
    monkeypatch.setitem(OVERRIDES, name, OVERRIDES.get(name, {}) | {"use_bias": True})
    each = tiny_model_of(name)
    mixers = [module for module in each.modules() if keeps_state(type(module))]
    with torch.no_grad():
        for mixer in mixers:
            mixer.in_proj.bias.fill_(0.5)
    stock = run(each, LOGITS, PROMPTS)
    with fd.enabled(each, min_saved_tokens=1):
        shared = run(each, LOGITS, PROMPTS)
    assert not ModelLayout.of(each).packs
    are_close(shared.logits, stock.logits, 1e-5)


def test_a_compiled_layer_that_would_scan_over_several_prompts_runs_stock(model):
    stock, mixers = run(model, SAMPLING, PROMPTS), [one for one in model.modules() if keeps_state(type(one))]
    try:
        for one in mixers:
            vars(one)[COMPILED_CALL] = lambda *args, one=one, **kwargs: uncompiled_call(one, *args, **kwargs)
        with fd.enabled(model, min_saved_tokens=1):
            assert torch.equal(run(model, SAMPLING, PROMPTS), stock)
            assert "over the states of packed prompts" in fd.explain(model).last_call.reason
    finally:
        for one in mixers:
            vars(one).pop(COMPILED_CALL)
