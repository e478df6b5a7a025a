"""A kept cache is of the weights and adapters that made it."""

import copy
import pickle

import pytest
import torch
from torch.nn.utils import prune

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..tiny_models import seeded, tiny_model
from .calls import PROMPT, SAMPLING


def test_one_number_that_changes_is_noticed(model):
    """Whichever it is: versions are compared, not samples of values."""
    with fd.enabled(model):
        for index in range(0, 64, 7):
            cache = fd.prefill(model, PROMPT)
            with torch.no_grad():
                model.model.norm.weight[index] += 1
            with pytest.raises(ValueError, match="the cache was made with other weights"):
                model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})
            with torch.no_grad():
                model.model.norm.weight[index] -= 1


def test_a_replaced_tensor_is_noticed(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        weight, old = model.model.norm.weight, model.model.norm.weight.data
        weight.data = old.clone()
        with pytest.raises(ValueError, match="the cache was made with other weights"):
            model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})
        weight.data = old


@pytest.mark.parametrize(
    "switch",
    [
        {"_disable_adapters": True},
        {"_active_adapter": ["b"]},
        {"merged_adapters": ["a"]},
        {"scaling": {"a": 0.5, "b": 2.0}},
    ],
    ids=lambda switch: next(iter(switch)),
)
def test_a_cache_of_other_adapters_is_an_error(switch):
    model = tiny_model()
    adapted = model.model.layers[0].self_attn.v_proj  # with the attributes of PEFT's layers
    vars(adapted).update(
        _disable_adapters=False, _active_adapter=["a"], merged_adapters=[], scaling={"a": 1.0, "b": 2.0}
    )
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        kept = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
        before = {name: getattr(adapted, name) for name in switch}
        vars(adapted).update(switch)
        for given in (cache, *kept):
            with pytest.raises(ValueError, match="made with other adapters, of another model or before these changed"):
                model.generate(**PROMPT, **SAMPLING, **{CACHE: given})
        vars(adapted).update(before)
        assert model.generate(**PROMPT, **SAMPLING, **{CACHE: cache}).shape == (4, 96)


def replaced_parameter(model):
    weight = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    weight[5:30, 3:40] *= -3  # between the numbers that are remembered
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight)


def assigned(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["model.embed_tokens.weight"][30:45] *= -1
    model.load_state_dict(state, assign=True)


def pruned(model):
    torch.manual_seed(0)
    prune.random_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.6)


def scaled_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def swapped_module(model):
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()


def changed_number(model):
    model.model.norm.variance_epsilon = 50.0


@pytest.mark.parametrize(
    "change", [replaced_parameter, assigned, pruned, scaled_buffer, swapped_module, changed_number]
)
@pytest.mark.parametrize("reuse", [False, True], ids=["kept", "reused"])
def test_what_decides_the_keys_is_noticed(change, reuse):
    model = tiny_model()
    with fd.enabled(model, reuse_prefix=reuse), torch.no_grad():
        if reuse:
            model.generate(**PROMPT, **SAMPLING)
        else:
            cache = fd.prefill(model, PROMPT)
        change(model)
        if reuse:
            shared = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
            assert fd.explain(model).last_call.known_tokens is None
        else:
            with pytest.raises(ValueError, match=r"the cache was made with other (weights|modules)"):
                model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})
    if reuse:
        assert torch.equal(shared, seeded(lambda: model.generate(**PROMPT, **SAMPLING)))


def test_training_mode_and_checkpointing_change_no_keys(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        model.train()
        assert model.generate(**PROMPT, **SAMPLING, **{CACHE: cache}).shape == (4, 96)
        model.eval()


def test_parameters_can_still_be_swapped():
    model = tiny_model()
    with fd.enabled(model, reuse_prefix=True):
        model.generate(**PROMPT, **SAMPLING, **{CACHE: fd.prefill(model, PROMPT)})
    other = torch.nn.Parameter(torch.zeros(64))
    torch.utils.swap_tensors(model.model.norm.weight, other)
    assert not model.model.norm.weight.any()
