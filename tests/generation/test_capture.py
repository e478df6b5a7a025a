"""Captured decode steps: on a GPU in graphs; here the same steps over the same tables, uncaptured and interpreted."""

import copy
import gc
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

import hf_fastdecode as fd
from hf_fastdecode.attention.interface import RowLengths, active
from hf_fastdecode.generation import modes, steps
from hf_fastdecode.generation.capture import CapturedStep, bucket, model_state
from hf_fastdecode.generation.compiled import CompiledLayers
from hf_fastdecode.generation.seams import seams_of

from ..tiny_models import ragged_prompts, seeded, tiny_model

pytest.importorskip("triton")
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 4}
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")

# Interpreting takes time by the program: one for each layer, KV head and row.
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL_GPT2 = {"n_layer": 1, "n_head": 2}


@pytest.fixture
def uncaptured(monkeypatch):
    """Let captured modes run where kernels are interpreted."""
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)


def test_buckets():
    assert [bucket(rows) for rows in (1, 2, 3, 5, 64, 65, 128, 129, 192, 193, 257, 385, 520, 1000, 1025)] == [
        *(1, 2, 4, 8, 64, 128, 128, 192, 192, 256, 320, 448, 640, 1024, 1280),
    ]


@pytest.mark.parametrize(
    ("now", "then", "compiled", "known", "least"),
    [
        (256, 128, False, {256}, 25),  # 25 steps of 128 rows fewer, against 8 of 128 and the time of 256
        (256, 128, True, {256, 192}, 25),
        (256, 128, True, {256}, 2401),  # compiled once more, for any number of rows
        (256, 128, True, {256, 1}, 2401),
        (256, 1, True, {256, 192}, 1205),  # and once more for one
        (256, 128, True, {256, 128}, 0),
    ],
)
def test_a_smaller_size_must_pay_for_its_capture(now, then, compiled, known, least):
    assert steps.pays(now, then, least, known, compiled=compiled)
    assert not least or not steps.pays(now, then, least - 1, known, compiled=compiled)
    assert not steps.pays(now, now, 10**9, known, compiled=compiled)


@on_the_cpu
@pytest.mark.parametrize(
    ("name", "sizes"), [("llama-gqa", {"num_hidden_layers": 1}), ("gpt2", SMALL_GPT2)], ids=["llama-gqa", "gpt2"]
)
def test_tables_give_stock_tokens_in_every_call(name, sizes, uncaptured):
    """Other prompts, lengths, trees and fewer rows through the tables of one captured step."""
    model = tiny_model(name, **sizes)
    calls = [
        ragged_prompts(41, 36, shared=33) | SAMPLING,
        ragged_prompts(57, 40, shared=35, seed=1) | SAMPLING,
        ragged_prompts(70, seed=2) | SAMPLING | {"num_return_sequences": 5},
    ]
    stock = [seeded(lambda call=call: model.generate(**call)) for call in calls]
    with fd.enabled(model, mode="graph", backend="triton"):
        for call, expected in zip(calls, stock, strict=True):
            assert torch.equal(seeded(lambda call=call: model.generate(**call)), expected)
            assert fd.explain(model).last_call.mode == "graph"
        assert seams_of(model).captures.count == 1


@on_the_cpu
def test_rows_that_end_leave_for_a_smaller_step(uncaptured, monkeypatch):
    monkeypatch.setattr(steps, "_STEPS_OF_A_CAPTURE", 0)  # of so few steps none pays for a capture
    model = tiny_model(**SMALL)
    call = ragged_prompts(41, 36, shared=33) | SAMPLING
    call |= {"num_return_sequences": 4, "eos_token_id": list(range(3, 20)), "max_new_tokens": 16}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, mode="graph", backend="triton"):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        report = fd.explain(model).last_call
        used = {key[0] for key in seams_of(model).captures._steps}
    assert report.compactions >= 2
    assert {2, 8} <= used
    assert used <= {1, 2, 4, 8}
    assert report.captures == len(used)


@on_the_cpu
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("not permitted when capturing")])
@pytest.mark.parametrize("mode", ["auto", "graph"])
def test_rows_go_on_in_the_captured_steps_of_more(uncaptured, monkeypatch, mode, error):
    """Where those of fewer rows cannot be captured: the batch is not split, and it is not tried again."""
    monkeypatch.setattr(steps, "_STEPS_OF_A_CAPTURE", 0)
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_CAPTURE", 0)
    make, sizes = CapturedStep.__init__, []

    def make_or_fail(self, model, rows, *args):
        sizes.append(rows)
        if len(sizes) > 1:
            raise error
        make(self, model, rows, *args)

    monkeypatch.setattr(CapturedStep, "__init__", make_or_fail)
    model = tiny_model(**SMALL)
    call = ragged_prompts(41, 36, shared=33) | SAMPLING
    call |= {"num_return_sequences": 4, "eos_token_id": list(range(3, 20)), "max_new_tokens": 16}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, mode=mode, backend="triton"):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        report = fd.explain(model).last_call
    assert (report.mode, report.waves, report.captures) == ("graph", 0, 1)
    assert len(sizes) == 2


@on_the_cpu
def test_layers_are_compiled_once_for_all(uncaptured, monkeypatch):
    """As many graphs for three layers as for two, stock's tokens, and nothing left on the layers."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    graphs = []
    call = ragged_prompts(41, 36, shared=33) | SAMPLING
    for layers in (2, 3):
        model = tiny_model("llama-gqa", **SMALL | {"num_hidden_layers": layers})
        stock = seeded(lambda model=model: model.generate(**call))
        before = counters["unique_graphs"]
        with fd.enabled(model, mode="compile", backend="triton"):
            seams_of(model).captures.compiled = CompiledLayers(backend="eager")
            assert torch.equal(seeded(lambda model=model: model.generate(**call)), stock)
            assert fd.explain(model).last_call.mode == "compile"
        graphs.append(counters["unique_graphs"] - before)
        assert not any("forward" in vars(module) for module in model.model.modules())
    assert graphs[0] > 0
    assert graphs[1] == 0  # the second model's layers are of the same class, and reuse its code


@on_the_cpu
@pytest.mark.parametrize("mode", ["graph", "compile"])
def test_a_forced_mode_runs_or_raises(mode):
    model = tiny_model(**SMALL)
    with (
        fd.enabled(model, mode=mode),
        pytest.raises(ValueError, match=f"mode='{mode}' cannot run: .* got cpu; use mode"),
    ):
        model.generate(**ragged_prompts(60), **SAMPLING)


@on_the_cpu
def test_a_capture_that_fails_runs_eagerly_and_says_so_once(uncaptured, monkeypatch, caplog):
    model = tiny_model(**SMALL)
    call = ragged_prompts(60) | SAMPLING | {"max_new_tokens": 70}

    def broken(*args, **kwargs):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CapturedStep, "__init__", broken)
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model), caplog.at_level(logging.WARNING, logger="hf_fastdecode"):
        for _ in range(2):
            assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        report = fd.explain(model).last_call
        assert (report.mode, report.path) == ("eager", "shared")
        assert "not permitted" in report.mode_reason
    assert len(caplog.records) == 1
    with fd.enabled(model, mode="graph"), pytest.raises(ValueError, match="mode='graph' cannot run: operation not"):
        model.generate(**call)


@on_the_cpu
def test_a_call_inside_a_call(uncaptured):
    """A criterion that generates: in the outer call's forced mode it would wait for itself."""
    model = tiny_model(**SMALL)
    call = ragged_prompts(70) | SAMPLING

    def inner(ids, scores):
        model.generate(**call)
        return torch.zeros(len(ids), dtype=torch.bool)

    with fd.enabled(model, mode="graph", backend="triton"), pytest.raises(ValueError, match="inside another generate"):
        model.generate(**call, stopping_criteria=[inner])
    with fd.enabled(model, mode="graph", backend="triton"):
        model.generate(**call)  # the lock is free again


@on_the_cpu
def test_captures_are_freed_with_the_option(uncaptured):
    model = tiny_model(**SMALL)
    with fd.enabled(model, mode="graph", backend="triton"):
        model.generate(**ragged_prompts(70), **SAMPLING)
        tables = [weakref.ref(step.tables) for kept in seams_of(model).captures._steps.values() for step in kept]
    gc.collect()
    assert tables
    assert not any(table() for table in tables)


def in_a_nested_dict(model):
    model.config.rope_parameters["rope_theta"] *= 2


def in_a_config_of_its_own(model):
    model.model.layers[0].self_attn.config = copy.deepcopy(model.config)
    model.model.layers[0].self_attn.config.final_logit_softcapping = 30.0


def in_a_module(model):
    model.model.layers[0].self_attn.scaling *= 2


def in_a_switch(model):
    model.model.layers[0].mlp.on = False


def in_a_tensor_of_a_module(model):
    model.model.layers[0].mlp.table = torch.zeros(3)


@on_the_cpu
@pytest.mark.parametrize(
    "change", [in_a_nested_dict, in_a_config_of_its_own, in_a_module, in_a_switch, in_a_tensor_of_a_module]
)
def test_what_modules_read_on_the_host_is_captured_again(change, uncaptured):
    model = tiny_model(**SMALL)
    call = ragged_prompts(70) | SAMPLING | {"max_new_tokens": 2}
    with fd.enabled(model, mode="graph", backend="triton"):
        captures = seams_of(model).captures
        for expected in (1, 1, 2, 2):
            if expected == 2 and captures.count == 1:
                change(model)
            model.generate(**call)
            assert captures.count == expected


def test_a_pass_of_another_thread_changes_no_state():
    model = tiny_model(**SMALL)
    configs = modes.configs_of(model)
    before = model_state(model, configs)
    with active(configs, RowLengths(0)):
        assert model_state(model, configs) == before
    assert hash(before) == hash(model_state(model, configs))


@on_the_cpu
def test_a_few_steps_do_not_pay_for_a_capture(uncaptured, monkeypatch):
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_CAPTURE", 6)
    model = tiny_model(**SMALL)
    call = ragged_prompts(70) | SAMPLING | {"max_new_tokens": 2}
    modes_seen = []
    with fd.enabled(model, backend="triton"):
        for _ in range(3):
            model.generate(**call)
            modes_seen.append(fd.explain(model).last_call.mode)
    assert modes_seen == ["eager", "eager", "graph"]


@on_the_cpu
def test_one_row_is_captured_too(uncaptured):
    model = tiny_model(**SMALL)
    call = ragged_prompts(60) | SAMPLING | {"num_return_sequences": 1}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, mode="graph", backend="triton"):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        assert fd.explain(model).last_call.path == "shared"


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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_captured_in_inference_mode_and_used_outside(on_a_gpu):
    call = gpu_call(300, do_sample=False, num_return_sequences=1)
    with fd.enabled(on_a_gpu, mode="graph"):
        with torch.inference_mode():
            inside = on_a_gpu.generate(**call)
        assert torch.equal(on_a_gpu.generate(**call), inside)
        assert seams_of(on_a_gpu).captures.count == 1


@pytest.mark.gpu
def test_prompts_may_stay_on_the_cpu(on_a_gpu):
    call = gpu_call(300)
    with fd.enabled(on_a_gpu, mode="graph", sampler="fast"):
        there = seeded(lambda: on_a_gpu.generate(**call))
        prompt = {key: call[key].cpu() for key in ("input_ids", "attention_mask")}
        here = seeded(lambda: on_a_gpu.generate(**call | prompt))
    assert here.device.type == "cpu"
    assert torch.equal(here, there.cpu())


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_threads_take_turns_or_run_eagerly(on_a_gpu):
    model = on_a_gpu
    call = gpu_call(300, do_sample=False, num_return_sequences=1, max_new_tokens=80)
    with fd.enabled(model):
        expected = model.generate(**call)
        with ThreadPoolExecutor(4) as pool:
            outs = list(pool.map(lambda _: model.generate(**call), range(8)))
    assert all(drawn_alike(out, expected, call) > 0.9 for out in outs)


@pytest.mark.gpu
def test_a_deep_copy_captures_for_itself(on_a_gpu):
    model = on_a_gpu
    call = gpu_call(300, do_sample=False, num_return_sequences=1)
    with fd.enabled(model, mode="graph"):
        expected = model.generate(**call)
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data.zero_()
        assert torch.equal(twin.generate(**call), expected)
