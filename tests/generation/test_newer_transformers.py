"""A transformers release that is newer than those that the tests ran on."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import DynamicCache
from transformers.generation import GenerationMixin

import hf_fastdecode as fd
from hf_fastdecode import _compat, api
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.torch_operators.operators import BackendError
from hf_fastdecode.generation.prompts import packed

from ..tiny_models import ragged_prompts
from .calls import as_in_stock, seeded

PROMPT = ragged_prompts(90)
SAMPLING = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 6}
LOOPS = [{}, {"do_sample": False, "num_beams": 4}]


@pytest.fixture
def newer(monkeypatch):
    """The installed release, taken for one that is newer than tested."""
    monkeypatch.setattr(_compat, "NEWEST_TESTED", (5, 0))
    api._warn_of.cache_clear()
    yield _compat.TRANSFORMERS
    api._warn_of.cache_clear()


def changed(*args, **kwargs):
    raise TypeError("forward() got an unexpected keyword argument 'cache_of_tomorrow'")


def test_the_newest_tested_release_is_that_of_constraints():
    """With constraints.txt, the installed one: whoever moves it moves `NEWEST_TESTED` with it."""
    assert _compat.untested_transformers() is None


@pytest.mark.parametrize("release", ["5.24.9", "5.25.0.dev0", "5.25.0rc1", "6.0.0"])
def test_minor_releases_are_compared(monkeypatch, release):
    monkeypatch.setattr(_compat, "TRANSFORMERS", release)
    monkeypatch.setattr(_compat, "NEWEST_TESTED", (5, 24))
    assert _compat.untested_transformers() == (None if release == "5.24.9" else release)


def test_enable_warns_once(model, newer, caplog):
    for _ in range(2):
        with fd.enabled(model):
            pass
    (warning,) = (one for one in caplog.records if one.levelno == logging.WARNING)
    assert f"transformers {newer} is newer than 5.0" in warning.getMessage()


def test_enable_is_silent_with_a_tested_release(model, caplog):
    with fd.enabled(model):
        pass
    assert not caplog.records


@pytest.mark.parametrize("loop", LOOPS, ids=["sample", "beams"])
def test_calls_that_work_are_shared(model, newer, loop):
    as_in_stock(model, lambda: model.generate(**PROMPT, **SAMPLING | loop), "shared")


@pytest.mark.parametrize("loop", LOOPS, ids=["sample", "beams"])
def test_a_call_that_fails_before_its_first_token_runs_stock(model, newer, caplog, monkeypatch, loop):
    stock = seeded(lambda: model.generate(**PROMPT, **SAMPLING | loop))
    monkeypatch.setattr(packed, "forward_pass", changed)
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING | loop)), stock)
        report = fd.explain(model).last_call
    assert report.path == "stock"
    assert report.reason == (
        f"it failed with transformers {newer}, newer than tested "
        "(TypeError: forward() got an unexpected keyword argument 'cache_of_tomorrow')"
    )
    assert report.reason in caplog.text


def test_a_call_prepared_from_other_arguments_runs_stock(model, newer, monkeypatch):
    stock = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    original = GenerationMixin._prepare_cache_for_generation

    def prepare(self, config_of_tomorrow, model_kwargs, generation_mode, batch_size, max_cache_length):
        return original(self, config_of_tomorrow, model_kwargs, generation_mode, batch_size, max_cache_length)

    monkeypatch.setattr(GenerationMixin, "_prepare_cache_for_generation", prepare)
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), stock)
        report = fd.explain(model).last_call
    assert report.path == "stock"
    assert "prepares its cache without generation_config" in report.reason


@pytest.mark.parametrize("given", [fd.SharedContextCache, DynamicCache])
def test_a_given_shared_cache_is_no_call_that_could_run_stock(model, newer, monkeypatch, given):
    monkeypatch.setattr(packed, "forward_pass", changed)
    call = PROMPT | {"max_new_tokens": 2, CACHE: given()}
    with fd.enabled(model):
        if given is DynamicCache:
            assert model.generate(**call).shape == (1, 92)
            return
        with pytest.raises(TypeError, match="cache_of_tomorrow"):
            model.generate(**call)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), BackendError("backend='flash' cannot run")])
def test_what_no_release_changes_is_raised(model, newer, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(packed, "forward_pass", fail)
    with fd.enabled(model), pytest.raises(type(error), match=str(error)):
        model.generate(**PROMPT, **SAMPLING)


def test_with_a_tested_release_errors_are_raised(model, monkeypatch):
    monkeypatch.setattr(packed, "forward_pass", changed)
    with fd.enabled(model), pytest.raises(TypeError, match="cache_of_tomorrow"):
        model.generate(**PROMPT, **SAMPLING)
