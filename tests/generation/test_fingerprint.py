"""A kept cache is of the weights and adapters that made it."""

import copy
import pickle

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation.joined import JoinedWeights

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
                model.generate(**PROMPT, **SAMPLING, past_key_values=cache)
            with torch.no_grad():
                model.model.norm.weight[index] -= 1


def test_a_replaced_tensor_is_noticed(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        weight, old = model.model.norm.weight, model.model.norm.weight.data
        weight.data = old.clone()
        with pytest.raises(ValueError, match="the cache was made with other weights"):
            model.generate(**PROMPT, **SAMPLING, past_key_values=cache)
        weight.data = old


def test_moved_weights_are_the_same(model):
    """Captured steps lay the weights of projections end to end, and `disable` moves them apart."""
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING, past_key_values=cache))
        weights = JoinedWeights()
        for change in (lambda: weights.join(model.model.layers), weights.separate):
            before = model.model.layers[0].self_attn.q_proj.weight.data_ptr()
            change()
            assert model.model.layers[0].self_attn.q_proj.weight.data_ptr() != before
            assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING, past_key_values=cache)), expected)
        weights.join(model.model.layers)
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[3, 5] += 1
        with pytest.raises(ValueError, match="the cache was made with other weights"):
            model.generate(**PROMPT, **SAMPLING, past_key_values=cache)


class Adapted(torch.nn.Linear):
    """A linear layer with an adapter that is switched by the attributes of PEFT's layers."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self._disable_adapters, self._active_adapter, self.merged_adapters = False, ["a"], []
        self.scaling = {"a": 1.0, "b": 2.0}

    def forward(self, inputs):
        factor = 0.0 if self._disable_adapters else sum(self.scaling[name] for name in self._active_adapter)
        return super().forward(inputs) + factor * inputs[..., : self.out_features].sin()


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
    layer = model.model.layers[0].self_attn
    layer.v_proj = adapted = Adapted(layer.v_proj)
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        kept = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
        before = {name: getattr(adapted, name) for name in switch}
        vars(adapted).update(switch)
        for given in (cache, *kept):
            with pytest.raises(ValueError, match="made with other adapters, of another model or before these changed"):
                model.generate(**PROMPT, **SAMPLING, past_key_values=given)
        vars(adapted).update(before)
        assert model.generate(**PROMPT, **SAMPLING, past_key_values=cache).shape == (4, 96)
