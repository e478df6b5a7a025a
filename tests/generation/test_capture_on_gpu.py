"""Captured decode steps in CUDA graphs."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

import hf_fastdecode as fd
from hf_fastdecode.generation.seams import seams_of

from ..tiny_models import ragged_prompts, seeded, tiny_model

pytestmark = pytest.mark.gpu
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 4}


@pytest.fixture
def on_a_gpu():
    return tiny_model("llama-gqa", hidden_size=256).bfloat16().cuda()


def drawn_alike(left, right, call):
    """The share of equal tokens among the first twenty behind the prompts; by chance it is one in a hundred.

    The same steps give the same tokens; those of compiled layers round otherwise, which sooner or later sets rows
    apart.
    """
    first = call["input_ids"].shape[1]
    return (left[:, first : first + 20] == right[:, first : first + 20]).float().mean().item()


def gpu_call(*lengths, **extra):
    prompt = {key: value.cuda() for key, value in ragged_prompts(*lengths, shared=min(lengths) // 2).items()}
    return prompt | SAMPLING | {"max_new_tokens": 20} | extra


@pytest.mark.parametrize("mode", ["graph", "compile"])
def test_captured_steps_serve_other_calls(mode, on_a_gpu):
    """Other lengths, trees, samples and longer suffixes: nothing is captured again."""
    model = on_a_gpu
    calls = [
        gpu_call(300, 200),
        gpu_call(77, 513),
        gpu_call(1000, num_return_sequences=5),
        gpu_call(300, 200, max_new_tokens=400),
    ]
    with fd.enabled(model, mode="eager"):
        eager = [seeded(lambda call=call: model.generate(**call)) for call in calls]
    with fd.enabled(model, mode=mode):
        captured = [seeded(lambda call=call: model.generate(**call)) for call in calls]
        assert seams_of(model).captures.count == 1
    assert [out.shape for out in eager] == [out.shape for out in captured]
    for call, a, b in zip(calls, eager, captured, strict=True):
        assert drawn_alike(a, b, call) > (0.9 if mode == "graph" else 0.2), call


def test_changed_weights_are_not_replayed_stale(on_a_gpu):
    model = on_a_gpu
    call = gpu_call(300, do_sample=False, num_return_sequences=1)
    with fd.enabled(model, mode="graph"):
        before = model.generate(**call)
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.flip(0))  # in place: the capture reads it
        flipped = model.generate(**call)
        assert seams_of(model).captures.count == 1
        model.lm_head.weight = torch.nn.Parameter(
            model.lm_head.weight.flip(0).contiguous()
        )  # elsewhere: captured again
        again = model.generate(**call)
        assert seams_of(model).captures.count == 2
    assert torch.equal(before, again)
    assert not torch.equal(before, flipped)


def test_captured_in_inference_mode_and_used_outside(on_a_gpu):
    call = gpu_call(300, do_sample=False, num_return_sequences=1)
    with fd.enabled(on_a_gpu, mode="graph"):
        with torch.inference_mode():
            inside = on_a_gpu.generate(**call)
        assert torch.equal(on_a_gpu.generate(**call), inside)
        assert seams_of(on_a_gpu).captures.count == 1


def test_prompts_may_stay_on_the_cpu(on_a_gpu):
    call = gpu_call(300)
    with fd.enabled(on_a_gpu, mode="graph", sampler="fast"):
        there = seeded(lambda: on_a_gpu.generate(**call))
        prompt = {key: call[key].cpu() for key in ("input_ids", "attention_mask")}
        here = seeded(lambda: on_a_gpu.generate(**call | prompt))
    assert here.device.type == "cpu"
    assert torch.equal(here, there.cpu())


def test_hooks_and_float32_run_eagerly(on_a_gpu):
    model = on_a_gpu
    call = gpu_call(300, max_new_tokens=100)
    with fd.enabled(model):
        add_hook_to_module(model.model.layers[0], ModelHook())
        model.generate(**call)
        assert "forward of its own" in fd.explain(model).last_call.mode_reason
        remove_hook_from_module(model.model.layers[0])
        model.generate(**call)
        assert fd.explain(model).last_call.mode == "graph"
        model.float()
        model.generate(**call)
        assert "float32" in fd.explain(model).last_call.mode_reason


def test_rows_leave_captured_steps(on_a_gpu):
    model = on_a_gpu
    call = gpu_call(300, num_return_sequences=64, eos_token_id=list(range(3, 8)), max_new_tokens=120)
    with fd.enabled(model, mode="graph", sampler="fast"):
        for rows in (32, 16):  # so few rows do not pay for a capture in the middle of a call
            model.generate(**call | {"num_return_sequences": rows})
        whole = seeded(lambda: model.generate(**call))
        report = fd.explain(model).last_call
    assert report.compactions >= 2
    ended = torch.isin(whole[:, 300:], torch.tensor(call["eos_token_id"], device="cuda"))
    behind = ended.int().cumsum(1).roll(1, 1)
    behind[:, 0] = 0
    assert (whole[:, 300:][behind > 0] == 0).all()
    assert ((whole[:, 300:] >= 3) | (behind > 0)).float().mean() > 0.9


def test_threads_take_turns_or_run_eagerly(on_a_gpu):
    model = on_a_gpu
    call = gpu_call(300, do_sample=False, num_return_sequences=1, max_new_tokens=80)
    with fd.enabled(model):
        expected = model.generate(**call)
        with ThreadPoolExecutor(4) as pool:
            outs = list(pool.map(lambda _: model.generate(**call), range(8)))
    assert all(drawn_alike(out, expected, call) > 0.9 for out in outs)


def test_a_deep_copy_captures_for_itself(on_a_gpu):
    model = on_a_gpu
    call = gpu_call(300, do_sample=False, num_return_sequences=1)
    with fd.enabled(model, mode="graph"):
        expected = model.generate(**call)
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data.zero_()
        assert torch.equal(twin.generate(**call), expected)
