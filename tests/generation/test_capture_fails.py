"""Captures that fail, and calls that may not capture: what runs in their place, or the error of a forced mode."""

import logging
import threading

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation.interception.switches import own_method
from hf_fastdecode.generation.steps import captured_step, modes
from hf_fastdecode.generation.steps import captures as capture
from hf_fastdecode.generation.steps.captured_step import CapturedStep

from ..tiny_models import ragged_prompts, seeded, tiny_model
from .uncaptured import SAMPLING, SMALL, on_the_cpu

pytest.importorskip("triton")


@on_the_cpu
def test_a_forced_mode_runs_or_raises():
    model = tiny_model(**SMALL)
    refused = pytest.raises(ValueError, match=r"mode='graph' cannot run: .* got cpu; use mode")
    with fd.enabled(model, mode="graph"), refused:
        model.generate(**ragged_prompts(60), **SAMPLING)


def test_compiled_layers_are_refused_with_what_runs_instead():
    with pytest.raises(ValueError, match=r"mode='compile' is gone: .* use mode='auto'"):
        fd.enable(tiny_model(**SMALL), mode="compile")


@on_the_cpu
def test_a_capture_that_fails_runs_eagerly_and_says_so_once(uncaptured, monkeypatch, caplog):
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_CAPTURE", 6)
    model = tiny_model(**SMALL)
    call = ragged_prompts(60) | SAMPLING | {"max_new_tokens": 7}

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
def test_a_forced_mode_waits_for_another_thread(uncaptured, monkeypatch):
    """A call that begins while another one captures."""
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
        own = (module for module in model.modules() if module is not model and own_method(module, "forward"))
        return next((f"{type(module).__name__} carries a forward of its own" for module in own), None)

    def second():
        try:
            results.append(model.generate(**call).shape)
        except ValueError as error:
            results.append(str(error))
        finally:
            checked.set()

    def meanwhile(*args, stock=captured_step.forward_pass, **kwargs):
        if not checked.is_set():
            thread.start()
            checked.wait(60)
        return stock(*args, **kwargs)

    thread = threading.Thread(target=second)
    monkeypatch.setattr(captured_step, "forward_pass", meanwhile)
    with fd.enabled(model, mode="graph", backend="triton"):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        thread.join(60)
        assert results == [stock.shape]


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
