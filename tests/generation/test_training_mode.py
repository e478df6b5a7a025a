"""Training mode: what draws random numbers runs stock, judged by what modules do and not by the config."""

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

import hf_fastdecode as fd

from ..tiny_models import tiny_model
from .calls import PROMPT, SAMPLING, both


@pytest.mark.parametrize(
    ("name", "options", "told", "remedy"),
    [
        ("gpt2", {}, "Dropout.p=0.1", "disable_dropout=True in TRL"),
        ("opt", {}, "OPTDecoder.dropout=0.1", "dropout=0 in its config"),  # by a function, not a layer
        ("starcoder2", {"residual_dropout": 0.2}, "residual_dropout=0.2", "residual_dropout=0 in its config"),
        ("gpt_neox", {"hidden_dropout": 0.3}, "Dropout.p=0.3", "lora_dropout=0 in PEFT"),
        ("mixtral-window", {"router_jitter_noise": 0.1}, "jitter_noise=0.1", " router_jitter_noise=0 in its config"),
        ("llama-gqa", {"attention_dropout": 0.1}, "LlamaAttention.attention_dropout=0.1", "attention_dropout=0"),
    ],
)
def test_random_layers_run_stock(name, options, told, remedy):
    model = tiny_model(name, **options).train()
    stock, shared, call = both(model, lambda: SAMPLING)
    assert call.path == "stock"
    assert told in call.reason
    assert "call model.eval(), or load it without noise: " in call.reason
    assert remedy in call.reason
    assert torch.equal(shared, stock)
    with fd.enabled(model), pytest.raises(ValueError, match=f"is in training mode with .*{told}; call model.eval"):
        fd.prefill(model, PROMPT)
    model.eval()
    assert both(model, lambda: SAMPLING)[2].path == "shared"


@pytest.mark.parametrize("name", ["llama-gqa", "gpt_neox", "gpt2", "starcoder2"])
def test_layers_that_do_nothing_share(name):
    """Dropout switched off in the modules, as TRL does: the config still names a rate."""
    options = {"residual_dropout": 0.2} if name == "starcoder2" else {}
    model = tiny_model(name, **options).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0
        if hasattr(module, "residual_dropout"):
            module.residual_dropout = 0.0
    stock, shared, call = both(model, lambda: SAMPLING)
    assert (call.path, torch.equal(shared, stock)) == ("shared", True), call.reason
    assert model.training


def test_noise_on_embeddings_runs_stock(model):
    embeddings = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    hook = embeddings.register_forward_hook(neftune_post_forward_hook)
    try:
        assert "neftune" in both(model.train(), lambda: SAMPLING)[2].reason
    finally:
        hook.remove()
        model.eval()
