"""Projections of one input as one product: fewer products, the same tokens, and weights as they were afterwards."""

import logging

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import hf_fastdecode as fd
from hf_fastdecode.generation import compiled, joined, modes
from hf_fastdecode.generation.compiled import CompiledLayers, decoder_layers
from hf_fastdecode.generation.joined import JoinedWeights, _joined_linear, _Product, multiplying_once, share_products
from hf_fastdecode.generation.seams import seams_of

from ..tiny_models import ragged_prompts, seeded, tiny_model

SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 4}
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # interpreting takes time by the KV head
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")


@pytest.fixture
def products(monkeypatch):
    """The linear products of every graph that layers are compiled to, where kernels are interpreted."""
    pytest.importorskip("triton")
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    counts: list[int] = []

    def counted(module, inputs):
        assert not any(node.target is _joined_linear for node in module.graph.nodes)
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
    model = tiny_model(name, **FEW_HEADS)
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
    model = tiny_model(**FEW_HEADS)
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

    def counted(self, inputs, part):
        kept.append(method(self, inputs, part))
        seen.append(id(kept[-1]))
        return kept[-1]

    return counted


@on_the_cpu
@pytest.mark.parametrize("mode", ["graph", "compile"])
def test_weights_changed_in_place_are_multiplied(products, mode):
    model = tiny_model(**FEW_HEADS)
    call = ragged_prompts(41) | SAMPLING
    with fd.enabled(model, mode=mode, backend="triton"):
        model.generate(**call)
        change_weights(model)
        ours = seeded(lambda: model.generate(**call))
    assert torch.equal(ours, seeded(lambda: model.generate(**call)))


@torch.no_grad()
def change_weights(model):
    """In place, one of each group that is multiplied at once."""
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.mul_(-3)
        layer.mlp.up_proj.weight.mul_(2)


def test_joined_weights_are_saved_as_ever(tmp_path):
    model = tiny_model("llama-gqa")
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    JoinedWeights().join(decoder_layers(model))
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
    weights = JoinedWeights()
    weights.join(layers)
    assert [weight.data_ptr() for weight in attention] == before
    gate, up = layers[0].mlp.gate_proj.weight, layers[0].mlp.up_proj.weight
    assert up.data_ptr() == gate.data_ptr() + gate.nbytes
    weights.separate()
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
    weights = JoinedWeights()
    weights.join(layers)
    with multiplying_once(layers):
        assert not isinstance(mlp.gate_proj, nn.Linear)
    weights.separate()
    assert (mlp.gate_proj.weight.data_ptr(), mlp.up_proj.weight.data_ptr()) == where


@on_the_cpu
@pytest.mark.parametrize("mode", ["graph", "compile"])
def test_weights_can_be_trained_after_a_call_in_inference_mode(products, mode):
    model = tiny_model(**FEW_HEADS)
    call = ragged_prompts(41) | SAMPLING
    with fd.enabled(model, mode=mode, backend="triton"):
        with torch.inference_mode():
            model.generate(**call)
        assert not any(parameter.is_inference() for parameter in model.parameters())
        model(torch.tensor([[5, 6]])).logits.sum().backward()
    with torch.inference_mode():
        fd.disable(model)
    model(torch.tensor([[5, 6]])).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


@on_the_cpu
def test_nothing_stays_when_a_layer_cannot_be_compiled(products, monkeypatch):
    model = tiny_model(**FEW_HEADS)
    call = ragged_prompts(41) | SAMPLING
    stock, keys = seeded(lambda: model.generate(**call)), set(model.state_dict())
    monkeypatch.setattr(compiled, "_backend", lambda name: 1 / 0)
    with fd.enabled(model, mode="compile", backend="triton"):
        with pytest.raises(ZeroDivisionError) as raised:  # which is held here, with all that its frames hold
            model.generate(**call)
        assert model.config._attn_implementation != "hf_fastdecode"
        assert set(model.state_dict()) == keys
        assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert torch.equal(seeded(lambda: model.generate(**call)), stock)
    assert raised.value is not None


def test_without_memory_weights_stay_and_are_multiplied_apart(monkeypatch, caplog):
    layers = list(tiny_model("llama-gqa").model.layers)
    before = [weight.data_ptr() for layer in layers for weight in layer.parameters()]

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(joined.torch, "cat", full)
    weights = JoinedWeights()
    with caplog.at_level(logging.INFO, logger="hf_fastdecode"):
        weights.join(layers)
        weights.join(layers)
    assert [weight.data_ptr() for layer in layers for weight in layer.parameters()] == before
    assert [record.getMessage()[:40] for record in caplog.records] == ["4 groups of weights are multiplied apart"]
    with multiplying_once(layers):
        assert all(type(layer.mlp.up_proj) is nn.Linear for layer in layers)


@on_the_cpu
def test_weights_that_others_refer_to_stay_and_are_multiplied_as_they_are(products):
    """Two models with one memory, as of a policy and its rollouts."""
    policy, rollout = tiny_model(**FEW_HEADS), tiny_model(**FEW_HEADS)
    rollout.load_state_dict(policy.state_dict(), assign=True)
    call = ragged_prompts(41) | SAMPLING
    with fd.enabled(rollout, mode="graph", backend="triton"):
        rollout.generate(**call)
        change_weights(policy)
        ours = seeded(lambda: rollout.generate(**call))
    assert torch.equal(ours, seeded(lambda: policy.generate(**call)))


def test_memory_that_someone_refers_to_is_not_left():
    model = tiny_model("llama-gqa")
    layers, up = decoder_layers(model), model.model.layers[0].mlp.up_proj.weight
    held = model.state_dict()
    weights = JoinedWeights()
    weights.join(layers)
    assert not weights._moved
    del held
    model.share_memory()
    weights.join(layers)
    assert not weights._moved
    assert up.is_shared()

    model = tiny_model("llama-gqa")
    weights.join(decoder_layers(model))
    assert weights._moved
    held = model.state_dict()  # which follows the weights, now and after they would have been moved apart
    weights.separate()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(held[name], model.state_dict()[name])


class Elsewhere(torch.Tensor):
    """A tensor whose memory is not its own, as those of distributed or quantized weights."""

    def untyped_storage(self):
        raise RuntimeError("Attempted to access the data pointer on an invalid python storage")


def test_weights_of_other_tensor_classes_are_left_alone():
    model = tiny_model("llama-gqa")
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.mlp.up_proj):
            part.weight = nn.Parameter(part.weight.data.as_subclass(Elsewhere))
    weights = JoinedWeights()
    weights.join(decoder_layers(model))
    weights.separate()
    with multiplying_once(decoder_layers(model)):
        assert isinstance(model.model.layers[0].mlp.gate_proj, nn.Linear)
    fd.disable(fd.enable(model))


def test_while_products_are_joined_the_model_has_all_its_parameters():
    model = tiny_model("qwen2")
    expected = {name: id(parameter) for name, parameter in model.named_parameters()}
    JoinedWeights().join(decoder_layers(model))
    with multiplying_once(decoder_layers(model)):
        assert not isinstance(model.model.layers[0].self_attn.q_proj, nn.Linear)
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == expected
        assert set(model.state_dict()) >= set(expected)


def test_a_product_is_computed_anew_for_other_inputs():
    weight, inputs = torch.randn(6, 4), torch.randn(3, 4)
    product = _Product(weight, None, 2)

    def fresh():
        return F.linear(inputs, weight)

    first = product.of(inputs, 0)
    assert product.of(inputs, 1) is first
    assert product._last is None  # nothing is kept
    product.of(inputs, 0).mul_(2)
    assert torch.equal(product.of(inputs, 0), fresh())  # asked for twice
    inputs.add_(1)
    assert torch.equal(product.of(inputs, 1), fresh())


def test_products_are_not_shared_across_a_change_in_place():
    weight, inputs = torch.randn(6, 4), torch.randn(3, 4)
    found = []

    def counted(module, arguments):
        found.append(sum(node.target is F.linear for node in module.graph.nodes))
        return module.forward

    def changing(x):
        first = _joined_linear(x, weight, None)
        x.add_(1)
        return first, _joined_linear(x, weight, None), _joined_linear(x, weight, None), F.linear(x, weight)

    torch._dynamo.reset()
    expected = changing(inputs.clone())
    outs = torch.compile(changing, backend=share_products(counted))(inputs.clone())
    assert all(torch.equal(out, other) for out, other in zip(outs, expected, strict=True))
    assert found == [3]


def _model_of(layers):
    model = tiny_model("llama-gqa", num_hidden_layers=len(layers))
    model.model.layers = nn.ModuleList(layers)
    return model
