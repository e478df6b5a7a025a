"""Where passes run stock with the reason, and what they share in spite of what trainers do around them."""

from __future__ import annotations

import copy
import threading
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, DynamicCache
from transformers.integrations.neftune import activate_neftune

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..module_calls import before_calls
from ..tiny_models import ARCHITECTURES, ragged_prompts, tiny_model
from .comparison import checkpoint, compared, exact, faults, gradients, in_doubles, projection, report_of, sharing

LENGTHS, SHARED = (50, 50, 44), 40
ROWS = ragged_prompts(*LENGTHS, shared=SHARED)
CALL = ROWS | {"use_cache": False}
REAL = ROWS["attention_mask"].bool()
WITHOUT_PADDING = {"input_ids": ragged_prompts(50, 50, 50, shared=40)["input_ids"]}
DISTINCT = 40 + 10 + 10 + 4
WITH_OTHER_POSITIONS = 40 + 10 + 10 + 44  # the last row is padded, so that its tokens have other positions


def outputs(model, inputs=CALL, **arguments):
    """Logits of real tokens, and gradients if any parameter needs one."""
    logits = model(**inputs, **arguments).logits[REAL]
    found = {"logits": logits.detach()}
    return found | (gradients(model, projection({"logits": logits})) if logits.requires_grad else {})


def check_shared(model, run=outputs, distinct=DISTINCT):
    """The pass is shared, and as near to float64 as stock's."""
    found, report = compared(model, run)
    assert (report.path, report.computed, found) == ("shared", distinct, []), report


def check_stock(model, reason, run=outputs):
    """The pass is stock's to the bit, and the report says why; other passes are shared before and after."""
    stock = seeded(run, model)
    with sharing(model):
        ours = seeded(run, model)
        report = report_of(model)
    assert report.path == "stock"
    assert reason in report.reason, report
    assert stock.keys() == ours.keys()
    assert all(torch.equal(ours[name], stock[name]) for name in stock)


def seeded(run, model):
    torch.manual_seed(0)
    return run(model)


# Stock, with the reason


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


# Shared, whatever is around the pass


def test_padding_is_zero_and_has_no_gradient():
    model = tiny_model().model
    with sharing(model):
        output = model(**CALL, output_hidden_states=True)
        assert report_of(model).path == "shared"
    for states in (output.last_hidden_state, *output.hidden_states):
        assert not states[~REAL].any()
    assert not any(one.any() for one in gradients(model, output.last_hidden_state[~REAL].sum()).values())


def test_random_numbers_stay_as_in_stock():
    model = tiny_model().train()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with sharing(model):
        outputs(model)
        assert report_of(model).path == "shared"
    assert torch.equal(torch.get_rng_state(), before)


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


@pytest.mark.parametrize("enabled_first", [True, False])
def test_compiled_models(enabled_first):
    model = tiny_model()
    stock, oracle = outputs(model), exact(model, outputs)
    if enabled_first:
        fd.enable(model, min_saved_tokens=1)
    compiled = torch.compile(model, backend="eager")
    fd.enable(compiled, min_saved_tokens=1)
    try:
        ours = outputs(compiled)
        assert report_of(model) is None  # Dynamo traces stock
    finally:
        fd.disable(compiled)
        torch._dynamo.reset()
    ours = {name.replace("_orig_mod.", ""): value for name, value in ours.items()}
    assert not faults(ours, stock, oracle)


def test_compiled_layers():
    """One by one, they are computed in the pass around them."""
    model = tiny_model()
    stock, oracle = outputs(model), exact(model, outputs)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    try:
        with sharing(model):
            ours = outputs(model)
            assert report_of(model).path == "shared"
    finally:
        torch._dynamo.reset()
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


@pytest.mark.parametrize("said", ["call", "config"])
def test_tuples(said):
    model = tiny_model()
    if said == "config":
        model.config.return_dict = False
    given = {"return_dict": False} if said == "call" else {}

    def run(model, part):
        with torch.no_grad():
            output = part(model)(**CALL, **given, output_hidden_states=True)
        assert type(output) is tuple
        return {"first": output[0][REAL]} | {str(at): layer[REAL] for at, layer in enumerate(output[1])}

    parts = [lambda model: model.model]  # of a config that says so stock's heads cannot read the decoder's output
    for part in parts + [lambda model: model] * (said == "call"):
        check_shared(model, partial(run, part=part))


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3_text", "gpt_oss", "gpt2", "phi3-window"])
@pytest.mark.parametrize("said", [True, None])
def test_steps_with_the_returned_cache(name, said):
    """Of left-padded rows, three tokens at once and one, also of copied, selected and repeated rows."""
    model = tiny_model(name)
    ids = torch.randint(3, 97, (3, 4), generator=torch.Generator().manual_seed(5))
    mask = torch.cat([ROWS["attention_mask"], torch.ones_like(ids)], 1)

    def run(model):
        found = {}
        with torch.no_grad():
            cache = model(**ROWS, **({} if said is None else {"use_cache": said}))[CACHE]
            twin = copy.deepcopy(cache)
            assert cache.get_seq_length() == 50
            for start, stop in ((0, 3), (3, 4)):
                output = model(ids[:, start:stop], attention_mask=mask[:, : 50 + stop], **{CACHE: cache})
                found[f"{start}"] = output.logits
            assert output[CACHE] is cache
            twin.batch_repeat_interleave(2)
            twin.reorder_cache(torch.tensor([5, 0, 2, 1]))
            picked = torch.tensor([2, 0, 1, 0])
            found["reordered"] = model(ids[picked, :1], attention_mask=mask[picked, :51], **{CACHE: twin}).logits
        return found

    found, report = compared(model, run)
    assert (found, report.path) == ([], "shared")


def test_the_cache_outlives_the_model():
    model = tiny_model()
    with torch.no_grad():
        stock = model(**ROWS, use_cache=True)[CACHE]
        with sharing(model):
            ours = model(**ROWS, use_cache=True)[CACHE]
        del model
    for one, other in zip(ours.layers, stock.layers, strict=True):
        assert one.keys.shape == other.keys.shape
        seen = REAL[:, None, :, None].expand_as(other.keys)
        torch.testing.assert_close(one.keys[seen], other.keys[seen])
        torch.testing.assert_close(one.values[seen], other.values[seen])


def test_outputs_kept_after_disable():
    model = tiny_model()
    stock, oracle = outputs(model), exact(model, outputs)
    with sharing(model):
        logits = model(**CALL).logits[REAL]
    model(**WITHOUT_PADDING).logits.sum().backward()
    ours = {"logits": logits.detach()} | gradients(model, projection({"logits": logits}))
    assert not faults(ours, stock, oracle)


def test_weights_changed_between_passes():
    model = tiny_model()
    with sharing(model):
        outputs(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        ours = outputs(model)
    assert not faults(ours, outputs(model), exact(model, outputs))


@pytest.mark.parametrize("gradient", [True, False])
def test_threads(gradient):
    """Passes of one model over different rows at a time, and stock passes of another between them."""
    model, other = tiny_model(), tiny_model(seed=1)
    batches = [ragged_prompts(*LENGTHS, shared=SHARED, seed=seed) for seed in range(4)]

    def run(model, rows):
        with torch.set_grad_enabled(gradient):
            logits = model(**rows).logits[REAL]
        if not gradient:
            return {"logits": logits}
        weights = [one for one in model.parameters() if one.requires_grad]
        found = torch.autograd.grad(projection({"logits": logits}), weights)
        return {"logits": logits.detach()} | {f"gradient {at}": one for at, one in enumerate(found)}

    runs = [partial(run, rows=rows) for rows in batches]
    stock, oracle = [run(model) for run in runs], [exact(model, run) for run in runs]
    stock_of_other, wrong = run(other, ROWS), []

    def work(at):
        for _ in range(5):
            wrong.extend(faults(runs[at](model), stock[at], oracle[at]))
            again = run(other, ROWS)
            wrong.extend(name for name in again if not torch.equal(again[name], stock_of_other[name]))

    with sharing(model):
        threads = [threading.Thread(target=work, args=[at]) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert report_of(model).path == "shared"
    assert not wrong


@pytest.mark.parametrize("change", ["disable", "enable"])
def test_disabled_or_enabled_during_a_pass(change):
    model = tiny_model()
    before = dict(vars(model.model))
    stock, oracle = outputs(model), exact(model, outputs)
    fd.enable(model, min_saved_tokens=1)
    run = {"disable": lambda *_: fd.disable(model), "enable": lambda *_: fd.enable(model, share_forward=False)}[change]
    with before_calls(model.model.layers[1], run):
        ours = outputs(model)
    assert not faults(ours, stock, oracle)
    fd.disable(model)
    assert vars(model.model).keys() == before.keys()
    assert not faults(outputs(model), stock, oracle)


def test_a_pass_that_raises():
    model = tiny_model()
    stock = outputs(model)

    def fail(*_):
        raise KeyboardInterrupt

    with sharing(model):
        with before_calls(model.model.layers[1], fail), pytest.raises(KeyboardInterrupt):
            model(**CALL)
        assert report_of(model).path == "failed"
        ours = outputs(model)
        assert report_of(model).path == "shared"
    assert not faults(ours, stock, exact(model, outputs))
    again = outputs(model)
    assert all(torch.equal(again[name], stock[name]) for name in stock)


def test_copies_are_models_of_their_own():
    model = tiny_model()
    with sharing(model):
        outputs(model)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(0.9)
        ours = outputs(twin)
        assert report_of(twin).path == "shared"
    fd.disable(twin)
    assert not faults(ours, outputs(twin), exact(twin, outputs))


def test_another_attention_implementation_while_enabled():
    model = tiny_model()
    with sharing(model):
        outputs(model)
        model.set_attn_implementation("eager")
        ours = outputs(model)
    assert not faults(ours, outputs(model), exact(model, outputs))


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


# The comparison itself


def test_models_in_doubles_are_in_doubles():
    model = in_doubles(tiny_model("gpt_oss"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
