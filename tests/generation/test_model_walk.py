"""The one walk over a model's modules that a call makes, and what checks read from it."""

import copy
from weakref import ref

import pytest
import torch
from torch import nn

import hf_fastdecode as fd
from hf_fastdecode.cache.layout import ModelLayout
from hf_fastdecode.generation import structure as structures
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.snapshot import ModelWalk, captured_state
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.generation.structure import Structure

from ..tiny_models import tiny_model
from .calls import PROMPT, SAMPLING


class Delegating(nn.Module):
    """A wrapper that passes unknown attributes on to what it wraps, as PEFT's do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class WithProperty(nn.Module):
    @property
    def config(self):
        return "of the class"


def nested():
    """A model with a tied weight, a module that stands at two places, an empty place and buffers."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), nn.Identity())
    model[1].append(model[0])
    model[1][1].weight = nn.Parameter(torch.ones(4, 4))
    model.tied = nn.Linear(4, 4)
    model.tied.weight = model[1][1].weight
    model.register_module("nothing", None)
    model.register_buffer("empty", None)
    model[2].register_buffer("shared", model[1][0].running_mean)
    return model


@pytest.mark.parametrize("make", [nested, tiny_model])
def test_a_walk_finds_what_torch_finds(make):
    model = make()
    walk = ModelWalk(model)
    assert walk.modules == list(model.modules())
    for found, expected in ((walk.parameters, model.parameters()), (walk.buffers, model.buffers())):
        assert list(map(id, found)) == list(map(id, expected))
    assert walk.classes == {type(module): module for module in reversed(list(model.modules()))}
    assert walk.paths() == {module: path for path, module in model.named_modules()}


def test_attributes_of_instances_and_classes_and_by_delegation():
    plain, inner = nn.Linear(1, 1), nn.Linear(1, 1)
    inner.config = "of the instance"
    model = nn.ModuleList([plain, Delegating(inner), WithProperty()])
    assert ModelWalk(model).attributes("config") == ["of the instance", "of the instance", "of the class"]


def test_a_walk_reads_attributes_when_asked():
    walk = ModelWalk(model := nn.Sequential(nn.Linear(2, 2)))
    assert walk.with_code == []
    hook = model[0].register_forward_hook(lambda *_: None)
    assert walk.with_code == [model[0]]
    hook.remove()
    model[0].forward = model[0].forward
    assert walk.with_code == [model[0]]
    old, model[0].weight = model[0].weight, nn.Parameter(torch.ones(2, 2))
    assert walk.parameters[0] is model[0].weight is not old


def test_a_call_walks_over_all_modules_once(model, monkeypatch):
    """transformers asks for the first parameter; nothing else of `nn.Module.named_modules` is left to a call."""
    complete, walks = [], []
    named_modules, walk = nn.Module.named_modules, ModelWalk.__init__

    def counted(module, memo=None, *args, **kwargs):
        yield from named_modules(module, memo, *args, **kwargs)
        if memo is None:
            complete.append(module)

    with fd.enabled(model, mode="eager"):
        model.generate(**PROMPT, **SAMPLING)
        monkeypatch.setattr(nn.Module, "named_modules", counted)
        monkeypatch.setattr(ModelWalk, "__init__", lambda self, *given: walks.append(given) or walk(self, *given))
        model.lm_head.changed = 1
        for _ in range(2):  # the second is over the modules that the first has found
            model.generate(**PROMPT, **SAMPLING)
            assert state_of(model).last_call.path == "shared"
    assert complete == []
    assert [modules for _, modules in walks].count(None) == 1
    captured = captured_state(model, (structure := Structure(model)).configs, structure.walk)
    assert captured == captured_state(model, structure.configs)
    assert complete == []


def test_modules_are_let_go_after_a_call(model, monkeypatch):
    made = []
    monkeypatch.setattr(
        structures, "Structure", lambda *given, **named: made.append(Structure(*given, **named)) or made[-1]
    )
    with fd.enabled(model, mode="eager"):
        for _ in range(2):
            model.generate(**PROMPT, **SAMPLING)
            head = ref(model.lm_head)
            model.lm_head = copy.deepcopy(model.lm_head)
            assert head() is None
    assert ["walk" in vars(structure) for structure in made] == [False, False]


def turn(weight):
    """Let rows be columns, in the same memory."""
    weight.data = weight.data.t()


def exchange(module, one, other):
    """Let two parts of a module change names, at the places that they had."""
    first, second = getattr(module, one), getattr(module, other)
    delattr(module, one)
    delattr(module, other)
    setattr(module, other, first)
    setattr(module, one, second)


CHANGES = {
    "weight": lambda model: setattr(model.model.norm, "weight", nn.Parameter(model.model.norm.weight.detach() * 2)),
    "data": lambda model: setattr(model.model.norm.weight, "data", model.model.norm.weight.data.clone()),
    "buffer": lambda model: model.model.rotary_emb.register_buffer(
        "inv_freq", model.model.rotary_emb.inv_freq * 2, persistent=False
    ),
    "number": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.5),
    "integer for float": lambda model: setattr(model.model.norm, "variance_epsilon", 0),
    "module": lambda model: setattr(model.model.layers[0], "mlp", copy.deepcopy(model.model.layers[0].mlp)),
    "config": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    "adapter": lambda model: vars(model.lm_head).update(_active_adapter=["other"]),
    "adapter scaling": lambda model: vars(model.lm_head).update(scaling={"default": 2.0}),
    "names": lambda model: exchange(model.model.layers[0], "input_layernorm", "post_attention_layernorm"),
    "strides": lambda model: turn(model.model.layers[0].self_attn.o_proj.weight),
    "shape": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data[:50]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_drops_captures(change):
    """By the list of modules of a walk before the change, except where a module was replaced."""
    model = tiny_model()
    model.model.norm.variance_epsilon = 0.0
    structure = Structure(model)
    before = captured_state(model, structure.configs, structure.walk)
    assert captured_state(model, structure.configs, structure.walk) == before
    CHANGES[change](model)
    after = Structure(model)
    assert captured_state(model, after.configs, after.walk) != before


def test_the_same_stores_of_layers_that_are_like_their_config(model):
    """Most layers have the heads of the config, whose store is then the same object."""
    layout = ModelLayout.of(model)
    assert len({id(store) for _, store in layout}) == 1
    assert layout == ModelLayout.of(model, ModelWalk(model).modules)


def test_one_token_needs_no_step(model, monkeypatch):
    """Steps, which may have to be captured, are made after the first token."""
    made = []
    eager = modes.EagerSteps
    monkeypatch.setattr(modes, "EagerSteps", lambda *args: made.append(args) or eager(*args))
    with fd.enabled(model, mode="eager"):
        for new_tokens in (1, 2):
            ours = model.generate(**PROMPT, **SAMPLING | {"max_new_tokens": new_tokens})
            assert len(made) == new_tokens - 1
            assert ours.shape[1] == PROMPT["input_ids"].shape[1] + new_tokens
