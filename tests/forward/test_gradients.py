"""Gradients of shared passes, whatever trainers do around them."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import hf_fastdecode as fd

from ..tiny_models import ARCHITECTURES, ragged_prompts, tiny_model
from .comparison import checkpoint, exact, faults, gradients, projection, report_of, sharing
from .passes import CALL, DISTINCT, REAL, ROWS, WITH_OTHER_POSITIONS, WITHOUT_PADDING, check_shared, outputs


def test_padding_is_zero_and_has_no_gradient():
    model = tiny_model().model
    with sharing(model):
        output = model(**CALL, output_hidden_states=True)
        assert report_of(model).path == "shared"
    for states in (output.last_hidden_state, *output.hidden_states):
        assert not states[~REAL].any()
    assert not any(one.any() for one in gradients(model, output.last_hidden_state[~REAL].sum()).values())


@pytest.mark.parametrize("name", ["llama-gqa", "gpt_oss", "gemma2", "gpt2"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(name, reentrant):
    none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0} if name == "gpt2" else {}
    model = tiny_model(name, **none).train()
    checkpoint(model, use_reentrant=reentrant)
    model.enable_input_require_grads()
    check_shared(model, distinct=WITH_OTHER_POSITIONS if name == "gpt2" else DISTINCT)


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_are_recomputed_after_disable(reentrant):
    """In the pass that they were computed in, whatever has run since, and in another thread too."""
    model = tiny_model().train()
    checkpoint(model, use_reentrant=reentrant)
    model.enable_input_require_grads()

    def run(model):
        logits = model(**CALL).logits[REAL]
        fd.disable(model)
        with torch.no_grad():
            model(**WITHOUT_PADDING)
        return gradients(model, projection({"logits": logits}))

    stock, oracle = run(model), exact(model, run)
    fd.enable(model, min_saved_tokens=1)
    assert not faults(run(model), stock, oracle)
    assert "forward" not in vars(model.model)


def test_autocast():
    """As near to float64 as stock is under autocast."""
    model = tiny_model("qwen3")

    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**CALL).logits[REAL]
        assert logits.dtype == torch.bfloat16
        return {"logits": logits.detach()} | gradients(model, projection({"logits": logits}))

    stock, oracle = run(model), exact(model, outputs)
    with sharing(model):
        ours = run(model)
        assert report_of(model).path == "shared"
    assert not faults(ours, stock, oracle)


@pytest.mark.parametrize(
    "trained",
    [
        "model.layers.1 model.norm lm_head",
        "model.embed_tokens",
        "lm_head",
        "model.layers.1.input_layernorm",
        "",
        "inputs",  # as adapters of frozen models: the output of the embeddings needs a gradient, and no parameter
    ],
)
def test_frozen_parameters(trained):
    model = tiny_model().requires_grad_(False)
    if trained == "inputs":
        model.enable_input_require_grads()
    else:
        for name in trained.split():
            model.get_submodule(name).requires_grad_()
    check_shared(model)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    def run(model):
        with context():
            return {"logits": model(**CALL).logits[REAL].clone()}

    check_shared(tiny_model(), run)


def test_accumulated_gradients():
    """Of passes over different rows, the second retained while the first runs backward; then steps of an optimizer."""

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        others = ragged_prompts(50, 50, 44, shared=35, seed=1)
        for _ in range(2):
            losses = [projection({"logits": model(**rows).logits[REAL]}) for rows in (ROWS, others, ROWS)]
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    model = tiny_model()
    stock, oracle = run(copy.deepcopy(model)), exact(model, run)
    with sharing(model):
        ours = run(model)
        assert report_of(model).path == "shared"
    assert not faults(ours, stock, oracle)


def test_losses_of_trainers():
    """With a count of items, which transformers' Trainer passes on."""
    labels = ROWS["input_ids"].masked_fill(~REAL, -100)
    labels[:, :30] = -100

    def run(model):
        loss = model(**CALL, labels=labels, num_items_in_batch=torch.tensor(57)).loss
        return {"loss": loss.detach()} | gradients(model, loss)

    check_shared(tiny_model(), run)


def test_gradients_of_gradients():
    """Eager attention has them in stock."""
    model = tiny_model()
    model.set_attn_implementation("eager")

    def run(model):
        logits = model(**CALL).logits[REAL]
        weight = model.model.layers[0].self_attn.q_proj.weight
        (first,) = torch.autograd.grad(projection({"logits": logits}), weight, create_graph=True)
        return gradients(model, first.square().sum())

    stock, oracle = run(model), exact(model, run)
    with sharing(model):
        try:
            ours = run(model)
        except RuntimeError as error:  # said, as PyTorch's own fused attention says it
            assert "derivative" in str(error) or "once_differentiable" in str(error), error  # noqa: PT017
            return
    assert not faults(ours, stock, oracle)


def test_gradients_of_given_parameters():
    """`torch.func.functional_call` with others than the model's own."""
    model = tiny_model()

    def run(model):
        given = {name: (1.5 * one.detach()).requires_grad_() for name, one in model.named_parameters()}
        logits = torch.func.functional_call(model, given, kwargs=CALL).logits[REAL]
        projection({"logits": logits}).backward()
        return {"logits": logits.detach()} | {f"gradient of {name}": one.grad for name, one in given.items()}

    check_shared(model, run)


def test_saved_tensors_elsewhere():
    def run(model):
        with torch.autograd.graph.save_on_cpu():
            return outputs(model)

    check_shared(tiny_model(), run)


@pytest.mark.parametrize("retain", [True, False])
def test_a_second_backward_raises_as_in_stock(retain):
    model = tiny_model()
    with sharing(model):
        loss = projection({"logits": model(**CALL).logits[REAL]})
        loss.backward(retain_graph=retain)
        if retain:
            first = {name: one.grad.clone() for name, one in model.named_parameters()}
            loss.backward()
            for name, one in model.named_parameters():
                torch.testing.assert_close(one.grad, 2 * first[name])
        else:
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()


def test_outputs_kept_after_disable():
    model = tiny_model()
    stock, oracle = outputs(model), exact(model, outputs)
    with sharing(model):
        logits = model(**CALL).logits[REAL]
    model(**WITHOUT_PADDING).logits.sum().backward()
    ours = {"logits": logits.detach()} | gradients(model, projection({"logits": logits}))
    assert not faults(ours, stock, oracle)


def test_rewards():
    """Of chosen and rejected answers, padded on the right."""
    model_type, arguments = ARCHITECTURES["qwen3"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **arguments, vocab_size=97, pad_token_id=0, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    ids = torch.stack([row.roll(-int((row == 0).sum())) for row in ROWS["input_ids"]])

    def run(model):
        rewards = model(input_ids=ids, attention_mask=(ids != 0).long()).logits
        return {"rewards": rewards.detach()} | gradients(model, projection({"rewards": rewards}))

    check_shared(model, run)
