"""Captured decode steps in CUDA graphs."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

import hf_fastdecode as fd
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import captured_prefill

from ..tiny_models import ragged_prompts, seeded, tiny_model

pytestmark = pytest.mark.gpu
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 4}


@pytest.fixture
def on_a_gpu():
    return tiny_model("llama-gqa", hidden_size=256).bfloat16().cuda()


def drawn_alike(left, right, call):
    """The share of equal tokens among the first twenty behind the prompts; by chance it is one in a hundred."""
    first = call["input_ids"].shape[1]
    return (left[:, first : first + 20] == right[:, first : first + 20]).float().mean().item()


def gpu_call(*lengths, **extra):
    prompt = {key: value.cuda() for key, value in ragged_prompts(*lengths, shared=min(lengths) // 2).items()}
    return prompt | SAMPLING | {"max_new_tokens": 20} | extra


def test_captured_steps_serve_other_calls(on_a_gpu, monkeypatch):
    """Other lengths, trees, samples and longer suffixes: nothing is captured again."""
    monkeypatch.setattr(captured_prefill, "_SIZES", ())  # whose logits are rounded otherwise than the eager pass's
    model = on_a_gpu
    calls = [
        gpu_call(300, 200),
        gpu_call(77, 513),
        gpu_call(1000, num_return_sequences=5),
        gpu_call(300, 200, max_new_tokens=400),
    ]
    with fd.enabled(model, mode="eager"):
        eager = [seeded(lambda call=call: model.generate(**call)) for call in calls]
    with fd.enabled(model, mode="graph"):
        captured = [seeded(lambda call=call: model.generate(**call)) for call in calls]
        assert state_of(model).captures.count == 1
    assert [out.shape for out in eager] == [out.shape for out in captured]
    for call, a, b in zip(calls, eager, captured, strict=True):
        assert drawn_alike(a, b, call) > 0.9, call


def test_changed_weights_are_not_replayed_stale(on_a_gpu):
    model = on_a_gpu
    call = gpu_call(300, do_sample=False, num_return_sequences=1)
    with fd.enabled(model, mode="graph"):
        before = model.generate(**call)
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.flip(0))  # in place: the capture reads it
        flipped = model.generate(**call)
        assert state_of(model).captures.count == 1
        model.lm_head.weight = torch.nn.Parameter(
            model.lm_head.weight.flip(0).contiguous()
        )  # elsewhere: captured again
        again = model.generate(**call)
        assert state_of(model).captures.count == 2
    assert torch.equal(before, again)
    assert not torch.equal(before, flipped)


def test_captured_in_inference_mode_and_used_outside(on_a_gpu):
    call = gpu_call(300, do_sample=False, num_return_sequences=1)
    with fd.enabled(on_a_gpu, mode="graph"):
        with torch.inference_mode():
            inside = on_a_gpu.generate(**call)
        assert torch.equal(on_a_gpu.generate(**call), inside)
        assert state_of(on_a_gpu).captures.count == 1


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


def held():
    """Bytes that tensors hold on the device, and bytes that PyTorch holds there for them."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def test_after_disable_the_device_holds_what_it_held(on_a_gpu):
    calls = [gpu_call(300, num_return_sequences=samples) for samples in (1, 3, 20, 100, 200)]
    for call in calls:
        on_a_gpu.generate(**call)
    before = held()
    with fd.enabled(on_a_gpu, mode="graph"):
        for call in calls:
            on_a_gpu.generate(**call)
        assert state_of(on_a_gpu).captures.count >= len(calls)
    assert all(now <= then for now, then in zip(held(), before, strict=True))


def test_a_graph_of_the_users_keeps_its_workspaces(on_a_gpu):
    """cuBLAS's: the graph would go on to write to them."""
    weight, inputs = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in "wx")
    inputs @ weight  # cuBLAS cannot be initialized during a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = inputs @ weight
    with fd.enabled(on_a_gpu, mode="graph"):
        on_a_gpu.generate(**gpu_call(300))
    before = held()
    torch._C._cuda_clearCublasWorkspaces()
    assert held()[0] < before[0]  # they were left
    del graph, output


@pytest.mark.parametrize("order", [1, -1], ids=["growing", "shrinking"])
def test_captures_of_many_sizes_share_their_memory(order):
    model = tiny_model("llama-gqa", hidden_size=256, vocab_size=128000).bfloat16().cuda()
    sizes = [*range(64, 512, 64), *range(512, 1025, 128)][::order]
    logits = max(sizes) * 128000 * 2
    model.generate(**gpu_call(100, max_new_tokens=3))
    allocated, before = held()
    with fd.enabled(model, mode="graph", sampler="fast"):
        captures = state_of(model).captures
        for samples in sizes:
            model.generate(**gpu_call(100, num_return_sequences=samples, max_new_tokens=3))
        assert {step.rows for step in captures._steps} >= set(sizes)
        growth = held()[1] - before
    assert growth < 3 * logits + 2**28  # with cuBLAS's workspaces; the sum of all sizes is 5.5 times the largest
    after = held()
    assert after[0] <= allocated, f"{(after[0] - allocated) / 2**20:.1f} MiB remain"
    assert after[1] <= before + 2**25, f"{(after[1] - before) / 2**20:.1f} MiB remain reserved"


def test_captured_steps_survive_captures_of_other_sizes(on_a_gpu):
    """Their outputs lie in memory that later captures have written to."""
    calls = [gpu_call(300, num_return_sequences=samples, do_sample=True) for samples in (3, 130, 20)]
    with fd.enabled(on_a_gpu, mode="graph"):
        first = [seeded(lambda call=call: on_a_gpu.generate(**call)) for call in calls]
        again = [seeded(lambda call=call: on_a_gpu.generate(**call)) for call in calls]
        assert state_of(on_a_gpu).captures.count == len(calls)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_models_of_several_threads_capture_in_turns(on_a_gpu):
    """They share the streams that steps are captured on."""
    models = [on_a_gpu, *(copy.deepcopy(on_a_gpu) for _ in range(3))]
    call = gpu_call(300, do_sample=False, num_return_sequences=1)
    for model in models:
        fd.enable(model, mode="graph")
    with ThreadPoolExecutor(len(models)) as pool:
        outs = list(pool.map(lambda model: model.generate(**call), models))
    for model in models:
        fd.disable(model)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_projections_are_branches_of_the_graph(on_a_gpu):
    """The same tokens as sequential projections, and every weight at its address."""
    call = gpu_call(300, 200)
    before = {name: parameter.data_ptr() for name, parameter in on_a_gpu.named_parameters()}
    outs = []
    for fuse in (True, False, "auto"):
        with fd.enabled(on_a_gpu, mode="graph", fuse_projections=fuse):
            outs.append(seeded(lambda: on_a_gpu.generate(**call)))
            assert {name: parameter.data_ptr() for name, parameter in on_a_gpu.named_parameters()} == before
    assert all(drawn_alike(outs[0], other, call) > 0.9 for other in outs[1:])


def test_a_deep_copy_captures_for_itself(on_a_gpu):
    model = on_a_gpu
    call = gpu_call(300, do_sample=False, num_return_sequences=1)
    with fd.enabled(model, mode="graph"):
        expected = model.generate(**call)
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data.zero_()
        assert torch.equal(twin.generate(**call), expected)
