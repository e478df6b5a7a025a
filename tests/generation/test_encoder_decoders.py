"""Encoder-decoders: keys and values of an encoder's output are stored and read once for all samples and beams.

One model of each kind; `make test-architectures` compares all of them.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.layers.cross import ENCODER_OUTPUTS, EncodedInputs
from hf_fastdecode.cache.shared import cache_bytes
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.inputs.distinct import encode_distinct
from hf_fastdecode.generation.steps.modes import EagerSteps
from hf_fastdecode.generation.structure import Structure

from ..architectures.classes import tiny_model_of
from ..module_calls import before_calls
from ..tiny_models import ragged_prompts, seeded
from .calls import as_in_stock

CLASSES = [
    "BartForConditionalGeneration",
    "T5ForConditionalGeneration",  # biases by distance, which all layers share
]

WIDTH, NEW = 21, 8
INPUTS = ragged_prompts(WIDTH, 13, 17)
DECODER_PROMPTS = ragged_prompts(4, 4, 2, seed=1)
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": NEW}
BEAMS = {"do_sample": False, "num_beams": 4, "num_return_sequences": 2, "max_new_tokens": NEW}
BEAM_SAMPLES = {"do_sample": True, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": NEW}


@pytest.fixture(scope="module", params=CLASSES)
def each(request):
    return tiny_model_of(request.param)


@pytest.fixture(scope="module")
def model():
    return tiny_model_of("BartForConditionalGeneration")


def inputs(model):
    """Inputs of unequal lengths, padded at the right."""
    mask = INPUTS["attention_mask"].flip(1)
    return {"input_ids": INPUTS["input_ids"].flip(1), "attention_mask": mask}


def run(model, arguments, **more):
    return seeded(lambda: model.generate(**inputs(model), **arguments, **more))


def check(model, arguments, **more):
    """Compare with stock; returns the report."""
    report = as_in_stock(model, lambda: run(model, arguments, **more), "shared", min_saved_tokens=1)
    assert report.inputs == 3
    return report


def test_samples_end_early_at_stocks_tokens(each):
    new = run(each, SAMPLING)
    ends = [*new[:4, 3].tolist(), int(new[5, 5])]
    report = check(each, SAMPLING | {"eos_token_id": ends})
    assert report.prefilled_tokens == 3  # a decoder's first token for each input
    assert report.compactions


@pytest.mark.parametrize("arguments", [BEAMS, BEAM_SAMPLES], ids=["beams", "beam-samples"])
def test_beams_are_stocks(each, arguments):
    check(each, arguments)


def test_decoder_prompts_of_several_tokens(each):
    check(each, SAMPLING, decoder_input_ids=DECODER_PROMPTS["input_ids"])


def test_decoder_prompts_of_unequal_lengths(model):
    padded = {f"decoder_{name}": tensor for name, tensor in DECODER_PROMPTS.items()}
    check(model, SAMPLING, **padded)
    check(model, BEAMS, **padded)


def test_keys_and_values_are_those_of_distinct_inputs(model):
    with fd.enabled(model, min_saved_tokens=1):
        output = run(model, SAMPLING, return_dict_in_generate=True, output_scores=True)
    stored = output[CACHE]
    shown = int(INPUTS["attention_mask"].sum())
    layers = stored.inputs.segments.values()
    assert {part.shape[1] for segments in layers for segment in segments.values() for part in segment} == {shown}
    assert len(stored.inputs.segments) == model.config.decoder_layers
    assert stored.rows == 9
    stock = run(model, SAMPLING, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(output.sequences, stock.sequences)
    for shared, plain in zip(output.scores, stock.scores, strict=True):
        torch.testing.assert_close(shared, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [3 * WIDTH, 2 * WIDTH], ids=["at-once", "in-groups"])
@pytest.mark.parametrize("arguments", [SAMPLING, BEAMS], ids=["samples", "beams"])
def test_bytes_of_inputs_count_on_both_sides(each, arguments, most):
    """Stock's cache holds them once per row, with padding."""
    arguments = arguments | {"return_dict_in_generate": True}
    stock = cache_bytes(run(each, arguments)[CACHE])
    with fd.enabled(each, min_saved_tokens=1, max_prefill_tokens=most):
        cache = run(each, arguments)[CACHE]
        report = fd.explain(each)
    call, shown = report.last_call, int(INPUTS["attention_mask"].sum())
    per_token = report.layer_count * sum(part.nbytes for part in cache.inputs.example(0)) // shown
    assert call.input_bytes == cache.inputs.nbytes == shown * per_token
    assert call.stock_input_bytes == WIDTH * per_token
    assert call.nbytes.stock == cache.nbytes.stock == stock
    assert call.nbytes.stored == cache.nbytes.stored == (shown + 3 + cache.rows * (NEW - 1)) * per_token
    assert f"KV bytes: {call.nbytes.stored:,} (stock: {stock:,})" in str(report)


@pytest.mark.parametrize("arguments", [SAMPLING, BEAMS], ids=["samples", "beams"])
def test_inputs_are_stored_in_groups(each, arguments, monkeypatch):
    """Two inputs at a time, each with several prompts of the decoder."""
    rows, sizes, store = [0, 0, 1, 1, 2], [], EncodedInputs.store

    def counting(inputs, layer, keys, *args):
        sizes.append(len(keys))
        store(inputs, layer, keys, *args)

    monkeypatch.setattr(EncodedInputs, "store", counting)
    given = {name: one[rows] for name, one in inputs(each).items()}
    given["decoder_input_ids"] = DECODER_PROMPTS["input_ids"][[0, 1, 0, 1, 0]]
    given |= arguments | {"return_dict_in_generate": True}
    stock = seeded(lambda: each.generate(**given)).sequences
    with fd.enabled(each, min_saved_tokens=1, max_prefill_tokens=2 * WIDTH):
        output = seeded(lambda: each.generate(**given))
        report = fd.explain(each).last_call
    assert torch.equal(output.sequences, stock)
    assert (report.path, report.inputs) == ("shared", 3), report.reason
    stored = output[CACHE].inputs
    layers = len(stored.segments)
    assert sizes == [2] * layers + [1] * layers
    assert {len(segments) for segments in stored.segments.values()} == {1}
    assert stored.arguments[ENCODER_OUTPUTS][0].shape[:2] == (1, 1)  # what layers have projected is given up


def test_encoders_run_in_groups_of_inputs():
    ids, mask, passes = torch.tensor([[4], [4], [5], [6], [6]]), torch.ones(5, 1), []

    def encode(inputs, arguments):
        passes.append(inputs.flatten().tolist())
        hidden = (inputs + arguments["attention_mask"])[..., None]
        return arguments | {ENCODER_OUTPUTS: BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden,))}

    found = encode_distinct(encode, ids, {"attention_mask": mask}, at_once=2)
    assert passes == [[4, 5], [6]]
    assert found["attention_mask"] is mask
    outputs = found[ENCODER_OUTPUTS]
    for hidden in (outputs.last_hidden_state, *outputs.hidden_states):
        assert hidden.flatten().tolist() == [5, 5, 6, 7, 7]


def test_inputs_with_one_number_each():
    """Such arguments tell inputs apart too."""
    ids, numbers, passes = torch.tensor([[4], [4], [4]]), torch.tensor([1, 1, 2]), []

    def encode(inputs, arguments):
        passes.append(arguments["number"].tolist())
        return arguments | {ENCODER_OUTPUTS: BaseModelOutput(last_hidden_state=inputs[..., None])}

    encode_distinct(encode, ids, {"number": numbers})
    assert passes == [[1, 2]]


def test_encoders_whose_passes_gather_parameters(model, monkeypatch):
    """All processes run as many passes, whatever inputs each of them has."""
    monkeypatch.setattr(Structure, "gathering", SimpleNamespace(refused=Unsupported("as if")))
    repeated, rows = {name: one.repeat_interleave(2, 0) for name, one in inputs(model).items()}, []
    count = len(repeated["input_ids"])
    with (
        fd.enabled(model, min_saved_tokens=1, max_prefill_tokens=WIDTH),
        before_calls(model.get_encoder(), lambda args, kwargs: rows.append(len(kwargs["input_ids"]))),
    ):
        model.generate(**repeated, max_new_tokens=2)
    assert rows == [count]


def test_encoders_run_as_in_stock(model):
    """Of an encoder's output or embeddings that the caller gives, and of rows that repeat an input."""
    given, ids = inputs(model), inputs(model)["input_ids"]
    with torch.no_grad():
        outputs = model.get_encoder()(**given)
        embeddings = model.get_input_embeddings()(ids)
    mask = given["attention_mask"]
    for other in (
        {"encoder_outputs": outputs, "attention_mask": mask},
        {"inputs_embeds": embeddings, "attention_mask": mask},
        {"input_ids": ids[[0, 0, 1]], "attention_mask": mask[[0, 0, 1]]},
    ):

        def call(other=other):
            copied = {name: type(one)(one) if name == "encoder_outputs" else one for name, one in other.items()}
            return seeded(lambda: model.generate(**copied, **SAMPLING))

        report = as_in_stock(model, call, "shared", min_saved_tokens=1)
        assert report.inputs == (2 if "input_ids" in other else 3)


def steered(module, args, output):
    """A hook that changes each row in a way of its own."""
    rows = torch.arange(len(output.last_hidden_state))[:, None, None]
    return BaseModelOutput(last_hidden_state=output.last_hidden_state * (1 + rows))


def prompted(adapted, args):
    """As PEFT's hooks choose an adapter for each row."""
    assert len(args[0]) == 3


def dropping(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
            module.train()


STOCK = {
    "hook": (lambda model: model.get_encoder().register_forward_hook(steered), {}),
    "rows": (lambda model: model.get_encoder().block[0].register_forward_pre_hook(prompted), {}),
    "dropout": (dropping, {}),
    "no-cache": (None, {"use_cache": False}),
    "attentions": (None, {"output_attentions": True}),
    "synced": (None, {"synced_gpus": True}),
}


@pytest.mark.parametrize("kind", STOCK)
def test_encoders_of_calls_that_run_stock_run_as_in_stock(kind, request):
    """Rows of equal inputs may differ there, by hooks and random numbers."""
    model = tiny_model_of("T5ForConditionalGeneration")
    (change, more), rows = STOCK[kind], []
    if kind == "synced":
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        request.addfinalizer(torch.distributed.destroy_process_group)
    given = {"input_ids": INPUTS["input_ids"][[0, 0, 0]], "max_new_tokens": NEW} | more
    if change is not None:
        change(model)

    def call():
        torch.manual_seed(3)
        return model.generate(**given), torch.get_rng_state()

    with before_calls(model.get_encoder(), lambda args, kwargs: rows.append(kwargs["input_ids"].shape)):
        stock, state = call()
        with fd.enabled(model, min_saved_tokens=1, max_prefill_tokens=2 * WIDTH):
            tokens, after = call()
            assert fd.explain(model).last_call.path == "stock"
    assert rows[1:] == rows[:1]
    assert torch.equal(tokens, stock)
    assert torch.equal(after, state)


@pytest.mark.parametrize("arguments", [SAMPLING, BEAMS], ids=["samples", "beams"])
def test_labels_change_nothing(each, arguments):
    """transformers' trainer hands them on, other ones for each row."""
    given = {name: one[[0, 0, 1]] for name, one in inputs(each).items()} | arguments
    given["labels"] = torch.arange(15).view(3, 5)
    report = as_in_stock(each, lambda: each.generate(**given), "shared", min_saved_tokens=1)
    assert report.inputs == 2


def test_labels_that_a_model_reads_run_stock(model, monkeypatch):
    """Its own preparation of passes says so."""
    prepare = type(model).prepare_inputs_for_generation

    def reads_labels(self, *args, labels=None, **kwargs):
        return prepare(self, *args, **kwargs) | {"labels": labels}

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", reads_labels)
    with fd.enabled(model, min_saved_tokens=1):
        run(model, {"max_new_tokens": 1}, labels=torch.full((3, 1), 4))
        assert "the argument 'labels' is not accelerated yet" in fd.explain(model).last_call.reason
        seen = run(model, {}, labels=INPUTS["input_ids"], custom_generate=lambda model, input_ids, **given: given)
        assert "labels" in seen


def test_a_call_that_does_not_fit_at_once_is_split(model, monkeypatch):
    rows = [0, 0, 0, 1, 1, 2, 2]
    given = {name: one[rows] for name, one in inputs(model).items()}
    given |= {f"decoder_{name}": one[rows] for name, one in DECODER_PROMPTS.items()}
    stock, feed, failed = model.generate(**given, max_new_tokens=NEW), EagerSteps.feed, []

    def lacking(steps, ids, positions):
        if len(ids) > 4 and steps.cache.suffix_length == 3:
            failed.append(len(ids))
            raise torch.OutOfMemoryError("as if")
        return feed(steps, ids, positions)

    monkeypatch.setattr(EagerSteps, "feed", lacking)
    with fd.enabled(model, min_saved_tokens=1):
        assert torch.equal(model.generate(**given, max_new_tokens=NEW), stock)
    assert failed == [7]


def test_what_is_not_shared(model):
    with fd.enabled(model, min_saved_tokens=1):
        run(model, {"max_new_tokens": 2})
        assert "would save 0 tokens" in fd.explain(model).last_call.reason
        with pytest.raises(ValueError, match="prefill is for models without an encoder"):
            fd.prefill(model, INPUTS["input_ids"])
        cache = run(model, SAMPLING, return_dict_in_generate=True)[CACHE]
        with pytest.raises(ValueError, match="no call continues it"):
            run(model, SAMPLING, **{CACHE: cache})
        with pytest.raises(ValueError, match="made by generate"):
            model(**inputs(model), decoder_input_ids=torch.ones(3, 1).long(), **{CACHE: fd.SharedContextCache()})
