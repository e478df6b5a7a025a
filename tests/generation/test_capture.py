"""Captured decode steps: on a GPU in graphs; here the same steps over the same tables, uncaptured and interpreted."""

import copy
import gc
import logging
import threading
import weakref

import pytest
import torch
from transformers.models.llama import modeling_llama

import hf_fastdecode as fd
from hf_fastdecode.attention.interface import RowLengths, active
from hf_fastdecode.generation.identity import captured_state
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import captures as capture
from hf_fastdecode.generation.steps import cuda_graph, modes
from hf_fastdecode.generation.steps import runners as steps
from hf_fastdecode.generation.steps.compiled_layers import CompiledLayers
from hf_fastdecode.generation.steps.cuda_graph import CapturedStep, bucket
from hf_fastdecode.generation.structure import Structure

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
        (256, 128, True, {256}, 25),  # compiled for any number of rows
        (256, 128, True, {1}, 2401),
        (256, 1, True, {256, 192}, 1205),  # but one, which is compiled by itself
        (256, 128, True, {256, 128}, 0),
    ],
)
def test_a_smaller_size_must_pay_for_its_capture(now, then, compiled, known, least):
    assert steps.switch_saves_time(now, then, least, known, compiled=compiled)
    assert not least or not steps.switch_saves_time(now, then, least - 1, known, compiled=compiled)
    assert not steps.switch_saves_time(now, now, 10**9, known, compiled=compiled)


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
        assert state_of(model).captures.count == 1


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
        used = {step.rows for step in state_of(model).captures._steps}
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
    call |= {"num_return_sequences": 2, "eos_token_id": list(range(3, 20)), "max_new_tokens": 16}
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
            state_of(model).captures.compiled = CompiledLayers(backend="eager")
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
@pytest.mark.parametrize("graph", ["works", "fails"])
def test_a_compilation_that_fails_falls_back_by_one_stage(uncaptured, monkeypatch, caplog, graph):
    """To the graph that ran before, in this call and in later ones, and from there to eager steps."""
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_COMPILATION", 200)
    make, tried = CapturedStep.__init__, []

    def make_or_fail(self, model, rows, cache, configs, options, *args):
        tried.append(options.compiled)
        if options.compiled or graph == "fails":
            raise RuntimeError("self.stride(-1) must be 1 to view BFloat16 as Byte")
        make(self, model, rows, cache, configs, options, *args)

    monkeypatch.setattr(CapturedStep, "__init__", make_or_fail)
    model = tiny_model(**SMALL)
    call = ragged_prompts(60) | SAMPLING | {"max_new_tokens": 70}
    stock = seeded(lambda: model.generate(**call))
    found = []
    with fd.enabled(model, backend="triton"), caplog.at_level(logging.WARNING, logger="hf_fastdecode"):
        for _ in range(4):
            assert torch.equal(seeded(lambda: model.generate(**call)), stock)
            found.append(fd.explain(model).last_call.mode)
        reason = fd.explain(model).last_call.mode_reason
    if graph == "fails":
        assert found == ["eager"] * 4
        return
    assert found == ["graph"] * 4
    assert tried.count(True) == 1
    assert reason == "the layers cannot be compiled (self.stride(-1) must be 1 to view BFloat16 as Byte)"
    assert [record.getMessage() for record in caplog.records] == [
        f"decode steps of this model run as a graph: {reason}"
    ]
    with fd.enabled(model, mode="compile"), pytest.raises(ValueError, match="mode='compile' cannot run: self"):
        model.generate(**call)


@on_the_cpu
@pytest.mark.parametrize(
    ("message", "again"),
    [("CUDA error: out of memory", [2, 3]), ("operation not permitted when stream is capturing", [1, 2])],
    ids=["memory", "other"],
)
def test_a_capture_that_failed_is_tried_again(uncaptured, monkeypatch, message, again):
    """Once more memory is free, if that was missing, and when `enable` is called again."""
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_CAPTURE", 0)
    model, free, tried = tiny_model(**SMALL), [100], []
    call = ragged_prompts(60) | SAMPLING | {"max_new_tokens": 2}
    monkeypatch.setattr(capture, "free_memory", lambda device: free[0])

    def failing(*args, **kwargs):
        tried.append(1)
        raise RuntimeError(message)

    monkeypatch.setattr(CapturedStep, "__init__", failing)
    with fd.enabled(model, backend="triton"):
        for _ in range(2):
            model.generate(**call)
            assert fd.explain(model).last_call.mode == "eager"
            assert len(tried) == 1
        free[0] += 1
        model.generate(**call)
        assert len(tried) == again[0]
        fd.enable(model, backend="triton")
        for _ in range(2):
            model.generate(**call)
            assert len(tried) == again[1]


@on_the_cpu
def test_memory_that_ends_within_a_capture_splits_the_batch(uncaptured, monkeypatch):
    """Ending the capture then raises an error of its own, over the one that says so."""
    make, sizes = CapturedStep.__init__, []

    def make_or_fail(self, model, rows, *args):
        sizes.append(rows)
        if len(sizes) == 1:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")
        make(self, model, rows, *args)

    monkeypatch.setattr(CapturedStep, "__init__", make_or_fail)
    model = tiny_model(**SMALL)
    call = ragged_prompts(41) | SAMPLING | {"num_return_sequences": 4, "max_new_tokens": 2}
    with fd.enabled(model, mode="graph", backend="triton"):
        assert model.generate(**call).shape == (4, 43)
        report = fd.explain(model).last_call
    assert (report.mode, report.waves) == ("graph", 2)
    assert sizes == [4, 2]


@on_the_cpu
@pytest.mark.parametrize("mode", ["graph", "compile"])
def test_a_forced_mode_waits_for_another_thread(uncaptured, monkeypatch, mode):
    """A call that begins while another one captures: also with the layers of the model compiled meanwhile."""
    model = tiny_model("llama-gqa", **SMALL)
    call = ragged_prompts(41) | SAMPLING | {"max_new_tokens": 2}
    stock = seeded(lambda: model.generate(**call))
    checked, results = threading.Event(), []
    monkeypatch.setattr(modes, "capture_reason", lambda *arguments: own_forward(arguments[0]))

    def begins(model, arguments):
        if threading.current_thread() is not threading.main_thread():
            checked.set()

    monkeypatch.setattr(modes, "reason_of_call", begins)

    def own_forward(model):
        own = (module for module in model.modules() if module is not model and "forward" in vars(module))
        return next((f"{type(module).__name__} carries a forward of its own" for module in own), None)

    def second():
        try:
            results.append(model.generate(**call).shape)
        except ValueError as error:
            results.append(str(error))
        finally:
            checked.set()

    def meanwhile(*args, stock=cuda_graph.forward_pass, **kwargs):
        if not checked.is_set():
            thread.start()
            checked.wait(60)
        return stock(*args, **kwargs)

    thread = threading.Thread(target=second)
    monkeypatch.setattr(cuda_graph, "forward_pass", meanwhile)
    torch._dynamo.reset()
    with fd.enabled(model, mode=mode, backend="triton"):
        state_of(model).captures.compiled = CompiledLayers(backend="eager")
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        thread.join(60)
        assert results == [stock.shape]


@on_the_cpu
def test_the_steps_that_were_used_last_are_kept(uncaptured, monkeypatch):
    monkeypatch.setattr(capture, "_MOST_STEPS", 2)
    model = tiny_model(**SMALL)
    call = ragged_prompts(41) | SAMPLING | {"max_new_tokens": 2}
    with fd.enabled(model, mode="graph", backend="triton"):
        captures, tables = state_of(model).captures, {}
        for samples, captured, kept in ((1, 1, [1]), (2, 2, [1, 2]), (1, 2, [2, 1]), (3, 3, [1, 4]), (2, 4, [4, 2])):
            model.generate(**call | {"num_return_sequences": samples})
            assert captures.count == captured
            assert [step.rows for step in captures._steps] == kept
            tables |= {step.rows: weakref.ref(step.tables) for step in captures._steps}
        gc.collect()
        assert {rows for rows, table in tables.items() if table() is not None} == {2, 4}


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
        tables = [weakref.ref(step.tables) for step in state_of(model).captures._steps]
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


def in_a_function_of_a_module(model):
    model.model.layers[0].mlp.function = torch.nn.functional.relu


def in_a_tuple_of_a_module(model):
    model.model.layers[0].mlp.limits = (0.0, 7.0)


def in_a_function_of_a_file(model):
    """As packages of kernels replace it."""
    turn = modeling_llama.apply_rotary_pos_emb
    model.patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args, **kwargs: turn(*args, **kwargs))


def in_a_class(model):
    kind = type(model.model.layers[0].mlp)
    model.patch.setattr(kind, "forward", lambda self, x: self.down_proj(self.up_proj(x)))


CHANGES = [in_a_nested_dict, in_a_config_of_its_own, in_a_module, in_a_switch, in_a_tensor_of_a_module]


@on_the_cpu
@pytest.mark.parametrize(
    "change", [*CHANGES, in_a_tuple_of_a_module, in_a_function_of_a_module, in_a_function_of_a_file, in_a_class]
)
def test_what_modules_read_on_the_host_is_captured_again(change, uncaptured, monkeypatch):
    model = tiny_model(**SMALL)
    model.model.layers[0].mlp.function = torch.nn.functional.gelu
    monkeypatch.setattr("hf_fastdecode.generation.support.check_code", lambda _: None)  # for a class of this file
    model.model.layers[0].mlp.limits = (0.0, 6.0)
    model.patch = monkeypatch
    call = ragged_prompts(70) | SAMPLING | {"max_new_tokens": 2}
    with fd.enabled(model, mode="graph", backend="triton"):
        captures = state_of(model).captures
        for expected in (1, 1, 2, 2):
            if expected == 2 and captures.count == 1:
                change(model)
            model.generate(**call)
            assert captures.count == expected


def test_a_pass_of_another_thread_changes_no_state():
    model = tiny_model(**SMALL)
    configs = Structure(model).configs
    before = captured_state(model, configs)
    with active(configs, RowLengths(0)):
        assert captured_state(model, configs) == before
    assert hash(before) == hash(captured_state(model, configs))


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
