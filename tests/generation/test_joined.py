"""Projections of one input as one product: fewer products, the same tokens, and weights as they were afterwards."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import hf_fastdecode as fd
from hf_fastdecode.generation import compiled, modes
from hf_fastdecode.generation.compiled import CompiledLayers, decoder_layers
from hf_fastdecode.generation.joined import _Product, join, multiplying_once, separate, share_products
from hf_fastdecode.generation.seams import seams_of

from ..tiny_models import ragged_prompts, seeded, tiny_model

SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 4}
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")


@pytest.fixture
def products(monkeypatch):
    """The linear products of every graph that layers are compiled to, where kernels are interpreted."""
    pytest.importorskip("triton")
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    counts: list[int] = []

    def counted(module, inputs):
        counts.append(sum(node.target is F.linear for node in module.graph.nodes))
        return module.forward

    monkeypatch.setattr(compiled, "_backend", lambda name: share_products(counted))
    torch._dynamo.reset()
    return counts


def memory(model) -> dict[str, int]:
    return {name: parameter.untyped_storage().data_ptr() for name, parameter in model.named_parameters()}


@on_the_cpu
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2"])  # without biases, and with
def test_tokens_products_and_memory(products, name):
    model = tiny_model(name)
    call = ragged_prompts(41, 36, shared=33) | SAMPLING
    stock, where = seeded(lambda: model.generate(**call)), memory(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with fd.enabled(model, mode="compile", backend="triton"):
        for _ in range(2):
            assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        assert seams_of(model).captures.count == 1  # moving the weights is not taken for new weights
        assert {count for count in products if count} == {1, 2}  # q, k and v; o; gate and up, then down
        assert len(set(memory(model).values())) < len(set(where.values()))
    assert len(set(memory(model).values())) == len(set(where.values()))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@on_the_cpu
def test_captured_steps_multiply_once_without_compiling(products, monkeypatch):
    model = tiny_model("llama-gqa")
    call = ragged_prompts(41, 36, shared=33) | SAMPLING
    stock = seeded(lambda: model.generate(**call))
    seen: list[int] = []
    monkeypatch.setattr(_Product, "of", _counting(_Product.of, seen))
    with fd.enabled(model, mode="graph", backend="triton"):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
    assert not products
    assert len(set(seen[:3])) == len(set(seen[3:5])) == 1  # of one layer: q, k and v; gate and up
    assert len(set(seen[:5])) == 2


def _counting(method, seen):
    kept = []  # so that no two outputs have one id

    def counted(self, inputs):
        kept.append(method(self, inputs))
        seen.append(id(kept[-1]))
        return kept[-1]

    return counted


@on_the_cpu
@pytest.mark.parametrize("mode", ["graph", "compile"])
def test_weights_changed_in_place_are_multiplied(products, mode):
    model = tiny_model("llama-gqa")
    call = ragged_prompts(41) | SAMPLING
    with fd.enabled(model, mode=mode, backend="triton"):
        model.generate(**call)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight.mul_(-3)
                layer.mlp.up_proj.weight.mul_(2)
        ours = seeded(lambda: model.generate(**call))
    assert torch.equal(ours, seeded(lambda: model.generate(**call)))


def test_joined_weights_are_saved_as_ever(tmp_path):
    model = tiny_model("llama-gqa")
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    join(decoder_layers(model))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[key], expected[key]) for key in saved)
    assert {key for key in expected if "layers" in key} <= set(saved)


def test_what_is_not_joined():
    """Other kinds of layers, hooks, and parameters that are views of a larger tensor."""
    layers = list(tiny_model("llama-gqa", num_hidden_layers=3).model.layers)

    class Adapted(nn.Linear):
        pass

    first, second, third = (layer.self_attn for layer in layers)
    first.q_proj = Adapted(first.q_proj.in_features, first.q_proj.out_features, bias=False)
    second.k_proj.register_forward_hook(lambda *_: None)
    flat = torch.cat([torch.zeros(7), third.v_proj.weight.data.flatten()])
    third.v_proj.weight.data = flat[7:].view_as(third.v_proj.weight)
    attention = [part.weight for each in (first, second, third) for part in (each.q_proj, each.k_proj, each.v_proj)]
    before = [weight.data_ptr() for weight in attention]
    join(layers)
    assert [weight.data_ptr() for weight in attention] == before
    gate, up = layers[0].mlp.gate_proj.weight, layers[0].mlp.up_proj.weight
    assert up.data_ptr() == gate.data_ptr() + gate.nbytes
    separate(layers)
    assert gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr()
    with CompiledLayers(backend="eager").installed(_model_of(layers)):
        assert isinstance(layers[0].mlp.gate_proj, nn.Linear)


def test_weights_that_lie_end_to_end_in_a_larger_tensor_stay_there():
    """As a user may have laid them: their products are joined, and nothing is moved apart."""
    layers = list(tiny_model("llama-gqa").model.layers)
    mlp = layers[0].mlp
    size = mlp.gate_proj.weight.numel()
    flat = torch.cat([mlp.gate_proj.weight.data.flatten(), mlp.up_proj.weight.data.flatten(), torch.zeros(5)])
    mlp.gate_proj.weight.data = flat[:size].view_as(mlp.gate_proj.weight)
    mlp.up_proj.weight.data = flat[size : 2 * size].view_as(mlp.up_proj.weight)
    where = mlp.gate_proj.weight.data_ptr(), mlp.up_proj.weight.data_ptr()
    join(layers)
    with multiplying_once(layers):
        assert not isinstance(mlp.gate_proj, nn.Linear)
    separate(layers)
    assert (mlp.gate_proj.weight.data_ptr(), mlp.up_proj.weight.data_ptr()) == where


def _model_of(layers):
    model = tiny_model("llama-gqa", num_hidden_layers=len(layers))
    model.model.layers = nn.ModuleList(layers)
    return model
