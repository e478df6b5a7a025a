"""Captured passes of other decoding loops in CUDA graphs: errors of their logits and scores, memory and threads."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.model_state import state_of

from ...tiny_models import VOCABULARY, ragged_prompts, seeded, tiny_model

pytestmark = pytest.mark.gpu
MODELS = {
    "llama-mha": {"hidden_size": 256},
    "llama-gqa": {"hidden_size": 512, "num_attention_heads": 8},
    "mistral-window": {"hidden_size": 256, "sliding_window": 200},
    "gpt2": {"n_embd": 256},
}
BEAMS = {"num_beams": 8, "max_new_tokens": 40, "return_dict_in_generate": True, "output_scores": True}


def half(name="llama-gqa", dtype=torch.bfloat16):
    """A model in half precision, and the same weights in fp64."""
    model = tiny_model(name, **MODELS[name]).to(dtype).cuda()
    return model, copy.deepcopy(model).double()


def on_the_gpu(*lengths, **extra):
    return {key: value.cuda() for key, value in ragged_prompts(*lengths, shared=min(lengths) // 2).items()} | extra


def fixed_loop(found):
    """A loop of the user's over tokens and orders of rows that depend on no logits: it returns all logits."""

    def run(model, input_ids, **arguments):
        generator, cache = torch.Generator().manual_seed(5), arguments[CACHE]
        model(input_ids, logits_to_keep=1, **{CACHE: cache})
        rows = len(input_ids)
        for step, tokens in enumerate([1, 1, 4, 1, 7, 20, 1, 3, 1, 1, 16, 1]):
            fed = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator).cuda()
            found.append(model(fed, **{CACHE: cache}).logits)
            if step % 3 == 2:
                cache.crop(-min(tokens, 2))
            if step > 2:
                cache.reorder_cache(torch.randint(0, rows, (rows,), generator=generator))
        return input_ids

    return run


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_errors_of_logits(name, dtype):
    """At most twice those of the same passes by PyTorch's own operators, against fp64."""
    model, exact = half(name, dtype)
    call = on_the_gpu(300, 300)
    call = {key: part.repeat_interleave(3, 0) for key, part in call.items()} | {"max_new_tokens": 100}

    def logits(model, mode, backend):
        found = []
        with fd.enabled(model, mode=mode, backend=backend):
            model.generate(**call, custom_generate=fixed_loop(found))
            report = fd.explain(model).last_call
        assert report.mode == mode
        assert "ran eagerly" not in report.mode_reason
        return found

    captured = logits(model, "graph", "auto")
    eager, expected = logits(model, "eager", "plain"), logits(exact, "eager", "plain")
    for own, theirs, right in zip(captured, eager, expected, strict=True):
        assert relative(own, right) <= 2 * relative(theirs, right)


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_beams(name):
    """Their error against the scores of the same sequences in fp64 is at most twice that of eager passes."""
    model, exact = half(name)
    call = on_the_gpu(300, 260) | BEAMS | {"num_return_sequences": 8}
    errors = {}
    for mode in ("eager", "graph"):
        with fd.enabled(model, mode=mode):
            out = model.generate(**call)
            report = fd.explain(model).last_call
        assert report.mode == mode
        assert "ran eagerly" not in report.mode_reason
        prompt = out.sequences.shape[1] - BEAMS["max_new_tokens"]
        assert prompt == 300
        mask = torch.cat([call["attention_mask"].repeat_interleave(8, 0), torch.ones_like(out.sequences[:, 300:])], 1)
        with torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp_min(0)
            logits = exact(out.sequences, attention_mask=mask, position_ids=positions).logits[:, 299:-1]
        right = logits.log_softmax(-1).gather(2, out.sequences[:, 300:, None])[..., 0].mean(1)
        errors[mode] = (out.sequences_scores.double() - right).square().mean().sqrt().item()
    assert errors["graph"] <= 2 * errors["eager"]


def test_captures_serve_other_calls():
    """Other prompts, lengths and orders of rows, and longer suffixes: nothing is captured again."""
    model, _ = half()
    calls = [on_the_gpu(300, 200), on_the_gpu(77, 513), on_the_gpu(400, 380) | {"max_new_tokens": 120}]
    with fd.enabled(model, mode="graph"):
        first = [model.generate(**call | BEAMS | {"max_new_tokens": 130}) for call in calls]
        assert state_of(model).captures.count == 1
        again = [model.generate(**call | BEAMS | {"max_new_tokens": 130}) for call in calls]
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        assert torch.equal(one.sequences_scores, other.sequences_scores)


def test_drafts_are_those_of_eager_passes():
    model, _ = half()
    prompt = on_the_gpu(64)
    prompt = {key: part.repeat(1, 6) for key, part in prompt.items()}
    outs = {}
    for mode in ("eager", "graph"):
        with fd.enabled(model, mode=mode):
            cache = fd.prefill(model, prompt["input_ids"][:, :-4])
            outs[mode] = model.generate(**prompt, **{CACHE: cache}, prompt_lookup_num_tokens=9, max_new_tokens=60)
            report = fd.explain(model).last_call
        assert report.path == "shared"
    assert (outs["eager"][:, 384:404] == outs["graph"][:, 384:404]).float().mean() > 0.9


def test_auto_captures_after_some_steps_and_hidden_states_may_be_kept():
    model, _ = half()
    call = on_the_gpu(300, 260) | {"num_return_sequences": 4, "do_sample": True, "max_new_tokens": 40}
    call |= {"output_hidden_states": True, "return_dict_in_generate": True}
    with fd.enabled(model):
        eager = seeded(lambda: model.generate(**call))
        assert fd.explain(model).last_call.mode == "eager"
        captured = seeded(lambda: model.generate(**call))
        assert fd.explain(model).last_call.mode == "graph"
        plain = {**call, "output_hidden_states": False, "return_dict_in_generate": False}
        model.generate(**plain)  # the hooks that recorded hidden states are still on the layers
        assert fd.explain(model).last_call.mode == "graph"
    for out in (eager, captured):  # the first ones are what the layers were given
        for step, states in enumerate(out.hidden_states[1:]):
            assert len(states) == 3
            fed = out.sequences[:, 300 + step, None]
            assert torch.equal(states[0], model.get_input_embeddings()(fed))


def test_threads_take_turns_or_run_eagerly():
    model, _ = half()
    call = on_the_gpu(300) | {"num_beams": 4, "max_new_tokens": 80}
    with fd.enabled(model):
        expected = model.generate(**call)
        with ThreadPoolExecutor(4) as pool:
            outs = list(pool.map(lambda _: model.generate(**call), range(8)))
        assert state_of(model).captures.lock.holder is None
    assert all(out.shape == expected.shape for out in outs)
    assert all((out[:, 300:320] == expected[:, 300:320]).float().mean() > 0.9 for out in outs)


def test_after_disable_the_device_holds_what_it_held():
    model, _ = half()
    call = on_the_gpu(300, 200) | BEAMS

    def held():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    model.generate(**call)
    before = held()
    with fd.enabled(model, mode="graph"):
        model.generate(**call)
        assert state_of(model).captures.count == 1
    assert all(now <= then for now, then in zip(held(), before, strict=True))
