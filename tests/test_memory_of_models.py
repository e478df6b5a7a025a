"""A model that nobody refers to is freed at once: neither `enable` nor a slim layer makes a reference cycle."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from .patches.encoder_decoder_models import encoder_decoder_pair
from .patches.family_models import FAMILIES, family_pair
from .tiny_models import ragged_prompts, tiny_model

PROMPT = ragged_prompts(90)
CALL = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 4}


def generates(model: Any) -> None:
    model.generate(**PROMPT, **CALL)


def enables(model: Any) -> None:
    generates(fd.enable(model))


def enables_and_disables(model: Any) -> None:
    fd.disable(fd.enable(model))


def reuses_prefixes(model: Any) -> None:
    fd.enable(model, reuse_prefix=True)
    for _ in range(2):
        model.generate(**PROMPT, max_new_tokens=2)


def keeps_a_cache(model: Any) -> None:
    fd.enable(model)
    cache = fd.prefill(model, PROMPT)
    model.generate(**PROMPT, **CALL, **{CACHE: cache})


def searches_beams(model: Any) -> None:
    fd.enable(model).generate(**PROMPT, max_new_tokens=2, num_beams=3)


def runs_stock(model: Any) -> None:
    fd.enable(model).generate(**PROMPT, **CALL, use_cache=False)


def explains(model: Any) -> None:
    generates(fd.enable(model))
    fd.explain(model)


def copies(model: Any) -> None:
    generates(copy.deepcopy(fd.enable(model)))


USES = [
    *(generates, enables, enables_and_disables, reuses_prefixes, keeps_a_cache, searches_beams, runs_stock),
    *(explains, copies),
]


@pytest.fixture(scope="module", autouse=True)
def _imports_out_of_sight():
    """Collections, one of each test, leave out what other tests have imported too."""
    gc.collect()
    gc.freeze()


def freed_at_once(make: Callable[[], Any], use: Callable[[Any], None] = lambda model: None) -> bool:
    """Whether the weights of a model that was used are freed without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        model = make()
        use(model)
        weight = ref(next(model.parameters()))
        del model
        return weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_an_enabled_model(name, use):
    assert freed_at_once(lambda: tiny_model(name), use)


@pytest.mark.parametrize(
    ("family", "use"),
    [(family, use) for family in FAMILIES for use in (USES if family in ("phi3", "gpt2") else (generates, enables))],
)
def test_a_slim_model(family, use):
    slim = family_pair(family, "k")[1]
    assert freed_at_once(lambda: copy.deepcopy(slim), use)


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_a_slim_model_with_an_encoder(family):
    slim = encoder_decoder_pair(family, "k")[1]
    assert freed_at_once(lambda: copy.deepcopy(slim))


def test_a_copy_outlives_its_model():
    twin = copy.deepcopy(fd.enable(tiny_model("llama-gqa")))
    generates(twin)
    assert fd.explain(twin).last_call.path == "shared"


def test_a_method_without_its_model_says_so():
    generate = fd.enable(tiny_model("llama-gqa")).generate
    with pytest.raises(ReferenceError, match="the model that generate belongs to is gone; keep the model"):
        generate(**PROMPT)


def test_methods_look_like_those_of_the_class():
    model = fd.enable(tiny_model("llama-gqa"))
    plain = tiny_model("llama-gqa")
    assert model.generate.__self__ is model
    assert model.generate.__name__ == "generate"
    assert model.generate.__doc__ == plain.generate.__doc__
    assert model.generate == vars(model)["generate"]
    assert type(pickle.loads(pickle.dumps(model)).generate) is type(plain.generate)


def test_methods_are_methods_to_whoever_asks():
    plain, model = tiny_model("llama-gqa"), fd.enable(tiny_model("llama-gqa"))
    for name in ("forward", "generate"):
        method = getattr(model, name)
        assert inspect.ismethod(method)
        assert isinstance(method, types.MethodType)
        assert method.__self__ is model
        assert method.__code__ is method.__func__.__code__
        assert method.__module__ == getattr(plain, name).__module__
        assert method.__globals__["__name__"] == fd.generation.interception.switches.__name__
        assert inspect.signature(method) == inspect.signature(getattr(plain, name))
        with pytest.raises(AttributeError, match="nonsense"):
            method.nonsense  # noqa: B018
        twin = copy.deepcopy(model)
        assert getattr(twin, name).__self__ is twin
        assert copy.copy(method).__self__ is model


@pytest.mark.parametrize("strict", [False, True])
def test_an_enabled_model_exports_as_stock(strict):
    model, ids = tiny_model("llama-gqa", num_hidden_layers=1), torch.ones(1, 8, dtype=torch.long)
    stock, exported = (
        torch.export.export(each, (ids,), kwargs={"use_cache": False}, strict=strict)
        for each in (copy.deepcopy(model), fd.enable(model))
    )
    assert exported.graph_module.code == stock.graph_module.code
    assert str(exported.graph_signature) == str(stock.graph_signature)
    with torch.no_grad():
        assert torch.equal(exported.module()(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
