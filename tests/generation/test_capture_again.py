"""A step is captured again where the model has changed, also by what its modules read on the host."""

import copy

import pytest
import torch
from transformers.models.llama import modeling_llama

import hf_fastdecode as fd
from hf_fastdecode.attention.overrides import RowLengths, active
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.snapshot import captured_state
from hf_fastdecode.generation.structure import Structure

from ..tiny_models import ragged_prompts, tiny_model
from .uncaptured import SAMPLING, SMALL, on_the_cpu

pytest.importorskip("triton")


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
    monkeypatch.setattr("hf_fastdecode.generation.support.check_code", lambda _: None)  # this file's classes
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
