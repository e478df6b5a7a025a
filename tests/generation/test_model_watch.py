"""What tells a call that a model is as the last call has seen it."""

import copy
import gc
from weakref import ref

import pytest
import torch
from torch import nn

import hf_fastdecode as fd
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.snapshot import ModelWalk, ModelWatch
from hf_fastdecode.generation.structure import Structure

from ..tiny_models import tiny_model
from .calls import PROMPT, SAMPLING
from .test_model_walk import CHANGES


def watch(model):
    return ModelWatch(ModelWalk(model), Structure(model).configs)


def hooked(model):
    model.model.layers[1].register_forward_pre_hook(lambda *_: None)


def renamed(model):
    layer = model.model.layers[0].self_attn
    del layer.scaling
    layer.scale = 0.125


def other_class(model):
    layer = model.model.layers[0].mlp
    layer.__class__ = type("Other", (type(layer),), {})


def nested(model):
    model.config.rope_parameters["rope_theta"] = 1e4


def appended(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))


MORE = {
    "hook": hooked,
    "name": renamed,
    "class": other_class,
    "nested setting": nested,
    "one module more": appended,
    "no module": lambda model: setattr(model.model, "norm", None),
    "training": lambda model: model.model.layers[0].mlp.train(),
    "forward": lambda model: setattr(model.model.norm, "forward", model.model.norm.forward),
    "function": lambda model: vars(model.model.layers[0].mlp).update(activation_fn=torch.tanh),
    "private number": lambda model: setattr(model.model.norm, "_dropout", 0.1),
    "experts": lambda model: setattr(model.config, "_experts_implementation_internal", "grouped_mm"),
    "a new setting": lambda model: setattr(model.config, "another", 1),
    "the whole config": lambda model: setattr(model, "config", copy.deepcopy(model.config)),
    "a list of an adapter": lambda model: vars(model.lm_head)["_active_adapter"].append("other"),
    "a dict of an adapter": lambda model: vars(model.lm_head)["scaling"].update(default=2.0),
}


MOVED = {"weight", "data", "buffer", "module", "no module"}


@pytest.mark.parametrize("change", CHANGES | MORE)
def test_every_change_is_noticed(change):
    model = tiny_model()
    vars(model.lm_head).update(_active_adapter=["default"], scaling={"default": 1.0})
    model.model.norm._dropout = 0.0
    before = watch(model)
    assert not before.touched()
    (CHANGES | MORE)[change](model)
    gc.collect()
    assert before.touched()
    assert not watch(model).touched()
    assert before.moved() == (change in MOVED)


def test_code_of_a_class_and_global_hooks(monkeypatch):
    model = tiny_model()
    before = watch(model)
    with monkeypatch.context() as patched:
        patched.setattr(type(model.model.norm), "forward", lambda self, x: x)
        assert before.touched()
    assert not before.touched()
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert before.touched()
    assert watch(model).touched()  # it says nothing of a model whose calls all run a hook
    hook.remove()
    assert not before.touched()


def test_passes_and_training_are_no_change(model):
    before = watch(model)
    with fd.enabled(model, mode="eager"):
        enabled = watch(model)
        model.generate(**PROMPT, **SAMPLING)
        model.train()
        model(PROMPT["input_ids"], labels=PROMPT["input_ids"]).loss.backward()
        with torch.no_grad():
            model.model.norm.weight += 1
        model.eval()
        model.generation_config = copy.deepcopy(model.generation_config)
        assert not enabled.touched()
    assert not before.touched()


def test_nothing_replaced_is_kept_alive():
    model = tiny_model()
    watched = watch(model)
    gone = [ref(model.lm_head), ref(model.lm_head.weight)]
    model.lm_head = copy.deepcopy(model.lm_head)
    assert [one() for one in gone] == [None, None]
    assert watched.touched()
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        torch.utils.swap_tensors(model.model.norm.weight, nn.Parameter(torch.zeros(64)))
        assert not model.model.norm.weight.any()
    alive = ref(model)
    del model
    assert alive() is None


@pytest.mark.parametrize("change", ["dropout", "hook", "window"])
def test_what_a_call_kept_is_asked_again(change, caplog):
    """Answers of the first call do not outlive what they were about."""
    model = tiny_model()
    with fd.enabled(model, mode="eager"):
        for _ in range(2):
            model.generate(**PROMPT, **SAMPLING)
            assert state_of(model).last_call.path == "shared"
        if change == "dropout":
            model.train()
            model.model.layers[0].self_attn.attention_dropout = 0.5
        elif change == "hook":
            model.model.layers[0].register_forward_hook(lambda *_: None)
        else:
            model.config.layer_types = ["chunked_attention", "full_attention"]
            model.config.attention_chunk_size = 8
        assert model.generate(**PROMPT, **SAMPLING).shape == (4, 88)
        expected = {"dropout": "training mode", "hook": "has a forward hook"}.get(change)
        report = state_of(model).last_call
        if expected is not None:
            assert report.path == "stock"
            assert expected in report.reason
        else:
            assert state_of(model).structure_of(model).layout.smallest_window == 8
