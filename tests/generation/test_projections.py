"""Concurrent projections of one input: the same tokens, and the model's weights and modules stay where they are."""

import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import hf_fastdecode as fd
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.snapshot import captured_state
from hf_fastdecode.generation.steps import captured_step, graph_capture, modes
from hf_fastdecode.generation.steps import captures as capture
from hf_fastdecode.generation.steps.graph_capture import FusedProjections
from hf_fastdecode.generation.structure import Structure

from ..cases import exhaustive_but
from ..tiny_models import ragged_prompts, seeded, tiny_model
from .uncaptured import on_the_cpu

SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 3}
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def together(monkeypatch):
    """Number of weights of each concurrent product."""
    counts: list[int] = []

    def counted(inputs, weights, biases, stock=graph_capture.linears):
        counts.append(len(weights))
        return stock(inputs, weights, biases)

    monkeypatch.setattr(graph_capture, "linears", counted)
    return counts


FUSED = [("llama-gqa", "auto"), ("qwen2", True), ("llama-gqa", True), ("llama-gqa", False), ("qwen2", False)]
"""Models, without biases and with, and whether projections are fused."""


def places(model):
    """Object, address and storage size of each parameter."""
    return {
        name: (id(parameter), parameter.data_ptr(), parameter.untyped_storage().nbytes())
        for name, parameter in model.named_parameters()
    }


@on_the_cpu
@pytest.mark.parametrize(("name", "fuse"), exhaustive_but(FUSED[:2], FUSED))
def test_captured_steps_give_stock_tokens(uncaptured, together, name, fuse):
    model = tiny_model(name, **SMALL)
    call = ragged_prompts(41, 36, shared=33) | SAMPLING
    stock, where = seeded(lambda: model.generate(**call)), places(model)
    with fd.enabled(model, mode="graph", backend="triton", fuse_projections=fuse):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        assert state_of(model).captures.count == 1
        assert places(model) == where
    assert together[:2] == ([3, 2] if fuse else [])


@on_the_cpu
def test_auto_fuses_up_to_a_number_of_rows(uncaptured, together, monkeypatch):
    monkeypatch.setattr(modes, "_FUSED_ROWS", 4)
    model = tiny_model("llama-gqa", **SMALL)
    call = ragged_prompts(41) | SAMPLING
    fused = []
    with fd.enabled(model, mode="graph", backend="triton"):
        for samples in (2, 4, 8, 3):
            together.clear()
            stock = seeded(lambda samples=samples: model.generate(**call | {"num_return_sequences": samples}))
            fused.append(bool(together))
            with fd.enabled(model, mode="eager"):
                expected = seeded(lambda samples=samples: model.generate(**call | {"num_return_sequences": samples}))
            assert torch.equal(stock, expected)
    assert fused == [True, True, False, True]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama-gqa", {"mode": "eager"}, "fuse_projections=True cannot run with mode='eager'"),
        ("llama-gqa", {}, "fuse_projections=True cannot run: .* got cpu; use fuse_projections='auto'"),
        ("gpt2", {"uncaptured": True}, "fuse_projections=True cannot run: GPT2LMHeadModel has no projections"),
    ],
)
def test_fusing_runs_or_raises(name, options, message, monkeypatch):
    if torch.cuda.is_available() and not options:
        pytest.skip("on a GPU the model can be captured, so this option does not raise")
    if options.pop("uncaptured", False):
        monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    model = tiny_model(name)
    with pytest.raises(ValueError, match=message), fd.enabled(model, fuse_projections=True, **options):
        model.generate(**ragged_prompts(60), **SAMPLING)


@pytest.mark.parametrize("given", [1, 0, "yes", None])
def test_other_values_are_refused(model, given):
    with pytest.raises(ValueError, match="fuse_projections must be one of auto, True, False, got"):
        fd.enable(model, fuse_projections=given)


@on_the_cpu
def test_weights_changed_in_place_are_multiplied(uncaptured):
    model = tiny_model("llama-gqa", **SMALL)
    call = ragged_prompts(41) | SAMPLING
    with fd.enabled(model, mode="graph", backend="triton"):
        model.generate(**call)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight.mul_(-3)
                layer.mlp.up_proj.weight.mul_(2)
        ours = seeded(lambda: model.generate(**call))
    assert torch.equal(ours, seeded(lambda: model.generate(**call)))


@on_the_cpu
def test_replaced_weights_are_freed_one_by_one(uncaptured):
    """As by quantization, FSDP2, and merged adapters, which replace some weights of one input, or their data."""
    model = tiny_model("llama-gqa", **SMALL)
    call = ragged_prompts(41) | SAMPLING
    attention = model.model.layers[0].self_attn
    with fd.enabled(model, mode="graph", backend="triton"):
        model.generate(**call)
        old = weakref.ref(attention.q_proj.weight.untyped_storage()), weakref.ref(attention.v_proj)
        assert attention.q_proj.weight.untyped_storage().nbytes() == attention.q_proj.weight.nbytes
        attention.q_proj.weight.data = attention.q_proj.weight.data * 2
        attention.v_proj = nn.Linear(attention.v_proj.in_features, attention.v_proj.out_features, bias=False)
        assert not any(reference() for reference in old)
        assert attention.k_proj.weight.untyped_storage().nbytes() == attention.k_proj.weight.nbytes
        ours = seeded(lambda: model.generate(**call))
    assert torch.equal(ours, seeded(lambda: model.generate(**call)))


@on_the_cpu
def test_saving_copies_no_weights(uncaptured, monkeypatch, tmp_path):
    """transformers clones those that share a storage before it saves them."""
    model = tiny_model("llama-gqa", **SMALL)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    with fd.enabled(model, mode="graph", backend="triton"):
        model.generate(**ragged_prompts(41), **SAMPLING)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", lambda *_, **__: pytest.fail("a weight was copied"))
            model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == expected.keys() - {"lm_head.weight"} or saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], expected[key]) for key in saved)


@on_the_cpu
def test_disable_needs_no_memory_and_hides_no_error(uncaptured, monkeypatch):
    model = tiny_model("llama-gqa", **SMALL)
    stock = places(model)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(KeyError, match="the body's"), fd.enabled(model, mode="graph", backend="triton"):  # noqa: PT012
        model.generate(**ragged_prompts(41), **SAMPLING)
        state_of(model).captures._has_workspaces = True  # as on a GPU
        for name in ("clone", "contiguous"):
            monkeypatch.setattr(torch.Tensor, name, full)
        monkeypatch.setattr(capture, "free_workspaces", full)
        raise KeyError("the body's")
    assert state_of(model) is None
    assert places(model) == stock


@on_the_cpu
def test_other_threads_train_while_a_step_is_captured(uncaptured, monkeypatch):
    """A pass of another thread in the middle of a captured one: stock's modules, outputs and gradients."""
    model = tiny_model("llama-gqa", **SMALL)
    call = ragged_prompts(41) | SAMPLING
    ids = torch.tensor([[5, 6, 7]])
    expected, where = model(ids).logits.detach(), places(model)  # a graph would hold the weights
    state = captured_state(model, Structure(model).configs)
    seen = []

    def train():
        attention = model.model.layers[0].self_attn
        kinds = type(attention.q_proj), places(model) == where, "forward" in vars(model.model.layers[0])
        same = captured_state(model, Structure(model).configs) == state
        logits = model(ids).logits
        logits.sum().backward()
        seen.append((kinds, same, logits, attention.q_proj.weight.grad is not None))

    def meanwhile(*args, stock=captured_step.forward_pass, **kwargs):
        if not seen:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
        return stock(*args, **kwargs)

    monkeypatch.setattr(captured_step, "forward_pass", meanwhile)
    with fd.enabled(model, mode="graph", backend="triton"):
        state = captured_state(model, Structure(model).configs)
        model.generate(**call)
    kinds, same, logits, trained = seen[0]
    assert kinds == (nn.Linear, True, False)
    assert same
    assert torch.equal(logits, expected)
    assert trained


@on_the_cpu
def test_weights_can_be_trained_after_a_call_in_inference_mode(uncaptured):
    model = tiny_model("llama-gqa", **SMALL)
    with fd.enabled(model, mode="graph", backend="triton"):
        with torch.inference_mode():
            model.generate(**ragged_prompts(41), **SAMPLING)
        assert not any(parameter.is_inference() for parameter in model.parameters())
        model(torch.tensor([[5, 6]])).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_which_projections_are_fused(together):
    """Plain linear layers only, each by its own weight, also where several models share it."""
    model = tiny_model("llama-gqa", num_hidden_layers=2)
    twin = tiny_model("llama-gqa", num_hidden_layers=2)
    twin.load_state_dict(model.state_dict(), assign=True)
    first, second = (layer.self_attn for layer in twin.model.layers)

    class Adapted(nn.Linear):
        pass

    adapted = Adapted(first.q_proj.in_features, first.q_proj.out_features, bias=False)
    adapted.weight = first.q_proj.weight
    first.q_proj = adapted
    second.k_proj.register_forward_hook(lambda *_: None)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model(ids).logits
        with FusedProjections(twin):
            assert torch.equal(twin(ids).logits, expected)
            assert together == [2, 2]  # gate and up of each layer
        with FusedProjections(model):
            assert torch.equal(model(ids).logits, expected)
    assert together == [2, 2, *[3, 2] * 2]


def test_a_product_is_computed_anew_for_other_inputs(together):
    mlp = tiny_model("llama-gqa", **SMALL).model.layers[0].mlp
    inputs = torch.randn(3, mlp.gate_proj.in_features)
    with torch.no_grad(), FusedProjections(mlp) as mode:
        (group, _), _ = mode._parts.values()
        gate, up = mlp.gate_proj(inputs), mlp.up_proj(inputs)
        assert together == [2]
        assert group._inputs is None  # nothing is kept
        assert not group._outputs
        mlp.gate_proj(inputs)
        assert torch.equal(mlp.gate_proj(inputs), gate)  # asked for twice
        inputs.mul_(2)
        assert torch.equal(mlp.up_proj(inputs), 2 * up)
    assert together == [2, 2, 2, 2]


@pytest.mark.parametrize("shared", ["between layers", "within a layer"])
def test_a_weight_with_several_biases(shared):
    """Each product adds the bias that it was given."""
    model = tiny_model("qwen2", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    first, second = (layer.self_attn for layer in model.model.layers)
    (second if shared == "between layers" else first).k_proj.weight = first.k_proj.weight
    if shared == "within a layer":
        first.q_proj.weight = first.k_proj.weight
    for bias in (first.q_proj.bias, first.k_proj.bias, second.k_proj.bias):
        nn.init.normal_(bias)
    ids, inputs = torch.tensor([[5, 6, 7]]), torch.randn(3, first.k_proj.in_features)
    with torch.no_grad():
        expected = model(ids).logits
        with FusedProjections(model):
            assert torch.equal(model(ids).logits, expected)
            assert torch.equal(F.linear(inputs, first.v_proj.weight), inputs @ first.v_proj.weight.mT)
