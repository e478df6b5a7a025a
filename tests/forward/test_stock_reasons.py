"""Where passes run stock, with the reason."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.integrations.neftune import activate_neftune

from hf_fastdecode._compat import CACHE

from ..tiny_models import ragged_prompts, tiny_model
from .comparison import compared, gradients, projection, report_of, sharing
from .passes import CALL, REAL, ROWS, WITH_OTHER_POSITIONS, WITHOUT_PADDING, check_shared, check_stock, outputs


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0, "attn_pdrop": 0}),
        ("gpt2", {"resid_pdrop": 0, "embd_pdrop": 0.1, "attn_pdrop": 0}),
        ("gpt2", {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0.1}),
        ("llama-gqa", {"attention_dropout": 0.1}),  # of the attention function
        ("opt", {"dropout": 0.1, "layerdrop": 0}),  # of torch.nn.functional
        ("opt", {"dropout": 0, "layerdrop": 0.5}),
        ("mixtral-window", {"router_jitter_noise": 0.1}),
    ],
    ids=str,
)
def test_noise_in_training(name, dropout):
    model = tiny_model(name, **dropout)
    check_stock(model.train(), "in training mode with")
    found, report = compared(model.eval(), outputs)
    assert (found, report.path) == ([], "shared")


def test_training_mode_switched_between_passes():
    model = tiny_model("llama-gqa", attention_dropout=0.1)
    with sharing(model):
        for _ in range(2):
            model.train()(**CALL)
            assert report_of(model).path == "stock"
            model.eval()(**CALL)
            assert report_of(model).path == "shared"


@pytest.mark.parametrize("said", ["call", "config"])
@pytest.mark.parametrize(
    ("name", "asked"), [("llama-gqa", "output_attentions"), ("mixtral-window", "output_router_logits")]
)
def test_outputs_of_all_tokens(name, asked, said):
    model = tiny_model(name)
    model.set_attn_implementation("eager")

    def run(model):
        output = model(**CALL, **({asked: True} if said == "call" else {}))
        kind = asked.removeprefix("output_")
        return {f"{kind} {layer}": part for layer, part in enumerate(output[kind])} | outputs(model)

    if said == "config":
        setattr(model.config, asked, True)
        check_stock(model, asked, run)
    else:
        check_stock(model, asked, lambda model: outputs(model, **{asked: True}))


HOLES = ROWS["attention_mask"].index_put((torch.tensor(0), torch.tensor(20)), torch.tensor(0))
EACH = (torch.ones(50, 50, dtype=torch.bool).tril() & REAL[:, None, :]) | torch.eye(50, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attention_mask": HOLES}, "attention_mask hides tokens between others"),
        ({"attention_mask": EACH[:, None]}, "attention_mask is not"),
        ({"attention_mask": None, "position_ids": torch.arange(50).remainder(25).expand(3, -1)}, "do not count"),
        ({"position_ids": 2 * torch.arange(50).expand(3, -1)}, "position_ids do not count"),
    ],
    ids=["holes", "four-dimensions", "packed", "jumps"],
)
def test_masks_and_positions(given, reason):
    check_stock(tiny_model(), reason, partial(outputs, inputs=CALL | given))


def test_a_mask_that_hides_everything():
    """A row of padding alone takes no part."""
    inputs = CALL | {name: torch.cat([value, torch.zeros_like(value[:1])]) for name, value in ROWS.items()}

    def run(model):
        return {"logits": model(**inputs).logits[:3][REAL].detach()}

    check_shared(tiny_model(), run)


@pytest.mark.parametrize("kind", [torch.bool, torch.int32, torch.float32])
def test_masks_of_other_dtypes(kind):
    check_shared(tiny_model(), partial(outputs, inputs=CALL | {"attention_mask": ROWS["attention_mask"].to(kind)}))


EVERY = nn.modules.module
HOOKS = {
    "layer": lambda model: model.model.layers[0].register_forward_hook(lambda module, args, output: None),
    "early": lambda model: model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: None),
    "gradient": lambda model: model.model.layers[1].register_full_backward_hook(lambda module, inputs, outputs: None),
    "early-gradient": lambda model: model.model.layers[1].mlp.register_full_backward_pre_hook(lambda module, _: None),
    "of-all": lambda model: EVERY.register_module_forward_hook(lambda module, args, output: None),
    "gradient-of-all": lambda model: EVERY.register_module_full_backward_hook(lambda module, inputs, outputs: None),
    "noise": lambda model: activate_neftune(model, 5.0),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_foreign_hooks(hook):
    model = tiny_model().train()
    handle = hook(model)
    try:
        check_stock(model, "hook")
    finally:
        handle.remove()
    check_shared(model)


def test_a_forward_of_its_own():
    model = tiny_model()
    mlp, forward = model.model.layers[0].mlp, model.model.layers[0].mlp.forward
    mlp.forward = lambda hidden: forward(hidden) * 2
    check_stock(model, "has a forward of its own")
    del mlp.forward
    check_shared(model)


def test_hooks_of_the_head_see_all_rows():
    """Outside the decoder nothing is packed."""
    model, seen = tiny_model(), []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape))
    check_shared(model)
    handle.remove()
    assert {shape[:2] for shape in seen} == {(3, 50)}


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3_text"])
def test_a_given_cache(name):
    """It is filled as in stock, and read as in stock; the pass is not without a cache."""
    model = tiny_model(name)

    def run(model):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            first = model(**ROWS, **{CACHE: cache}, use_cache=True).logits[REAL]
            assert cache.get_seq_length() == 50
            then = model(WITHOUT_PADDING["input_ids"][:, :3], **{CACHE: cache}, use_cache=True).logits
        return {"first": first, "then": then}

    stock = run(model)
    with sharing(model):
        ours = run(model)
        assert report_of(model) is None
    assert all(torch.equal(ours[name], stock[name]) for name in stock)


def test_embeddings_that_need_gradients():
    """Each row's own, though rows have equal ones."""
    model = tiny_model()

    def run(model):
        embeddings = model.get_input_embeddings()(ROWS["input_ids"]).detach().requires_grad_()
        logits = model(inputs_embeds=embeddings, attention_mask=ROWS["attention_mask"]).logits[REAL]
        return gradients(model, projection({"logits": logits})) | {"embeddings": embeddings.grad}

    check_stock(model, "inputs_embeds need a gradient", run)


@pytest.mark.parametrize("arguments", [{}, {"input_ids": ROWS["input_ids"], "inputs_embeds": torch.zeros(3, 50, 64)}])
def test_wrong_arguments_raise_as_in_stock(arguments):
    model = tiny_model()
    with pytest.raises(ValueError, match="You must specify exactly one") as stock:
        model(**arguments)
    with sharing(model), pytest.raises(ValueError, match="You must specify exactly one") as ours:
        model(**arguments)
    assert str(ours.value) == str(stock.value)


@pytest.mark.parametrize("token", [-1, 97])
def test_ids_outside_the_vocabulary_raise_as_in_stock(token):
    model = tiny_model()
    inputs = ROWS | {"input_ids": ROWS["input_ids"].index_fill(1, torch.tensor(45), token)}
    with pytest.raises(IndexError):
        model(**inputs)
    with sharing(model), pytest.raises(IndexError):
        model(**inputs)


def test_rotary_frequencies_that_depend_on_the_length():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama-gqa", rope_parameters=rope, max_position_embeddings=45)
    check_stock(model, "its position embedding changes beyond 45 tokens")
    longer = tiny_model("llama-gqa", rope_parameters=rope, max_position_embeddings=64)  # the packed row has 104
    check_shared(longer, distinct=WITH_OTHER_POSITIONS)


def test_options():
    model = tiny_model()
    with sharing(model, share_forward=False):
        model(**CALL)
        assert (report_of(model).path, report_of(model).reason) == ("stock", "share_forward=False")
    with sharing(model, min_saved_tokens=81):
        model(**CALL)
        assert report_of(model).path == "stock"
        # Of 80 tokens, none are in a beginning that saves enough.
        assert "beginnings that save 81 or more save 0 of" in report_of(model).reason


def test_rows_that_share_nothing():
    inputs = ragged_prompts(50, 50, 44)
    check_stock(
        tiny_model(), "save 0 of 144 tokens in all, and sharing takes 1 to pay", partial(outputs, inputs=inputs)
    )
