"""Log-probabilities of drawn tokens by a trainer's pass over the finished rows, with ``log_probs="trainer"``."""

from __future__ import annotations

import copy
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import StoppingCriteria, T5Config, T5ForConditionalGeneration

import hf_fastdecode as fd
from hf_fastdecode.generation.decoding import log_probs
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.structure import Structure

from ..tiny_models import ragged_prompts, seeded, tiny_model, tiny_model_of_type
from .test_many_rows import letters

WIDTH, SAMPLES = 70, 4
PROMPTS = ragged_prompts(WIDTH, 60, shared=40)
BATCHES = {  # prompts, and samples of each
    "alike": (PROMPTS, SAMPLES),
    "apart": (ragged_prompts(WIDTH, 33, 50), 3),
    "one prompt": (ragged_prompts(WIDTH), 9),
    "one row": (ragged_prompts(WIDTH), 1),
}
ENDS = list(range(3, 10))
RETURNED = {"return_dict_in_generate": True, "max_new_tokens": 16}
SAMPLED = RETURNED | {"do_sample": True, "temperature": 0.7, "eos_token_id": ENDS, "num_return_sequences": SAMPLES}
CUT = SAMPLED | {"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2}
LAST = "the last pass computed these rows"


def enabled(name="qwen3", dtype=torch.float32, **options):
    return fd.enable(tiny_model(name).to(dtype), **{"log_probs": "trainer", "min_saved_tokens": 1} | options)


def sampled(model, arguments=CUT, prompts=PROMPTS):
    return seeded(lambda: model.generate(**prompts, **arguments))


def rows_of(sequences, *, padded=False, of=PROMPTS):
    """The rows as a trainer gives them to a model, the log-probabilities that count, and those tokens."""
    tokens = sequences[:, WIDTH:]
    ends = torch.isin(tokens, torch.tensor(ENDS)).long()
    drawn = (tokens != 0).flip(1).cumsum(1).flip(1) > 0 if padded else ends.cumsum(1) == ends
    prompts = of["attention_mask"].repeat_interleave(len(sequences) // len(of["attention_mask"]), 0)
    return {"input_ids": sequences, "attention_mask": torch.cat([prompts, drawn.long()], 1), "use_cache": False}, drawn


def by_trainer(model, rows):
    logits = model(**rows).logits.float()
    logits = logits if "logits_to_keep" in rows else logits[:, WIDTH - 1 : -1]
    return logits.log_softmax(-1).gather(2, rows["input_ids"][:, WIDTH:, None])[..., 0].detach()


@pytest.mark.parametrize(
    ("name", "dtype", "batch"),
    [*product(["qwen3"], [torch.float32, torch.bfloat16], BATCHES), ("gpt_oss", torch.float32, "alike")],
)
def test_they_have_the_bits_of_the_models_own_pass(name, dtype, batch):
    """Of one without gradients and of one with them, over the same rows; each prompt is computed once."""
    prompts, samples = BATCHES[batch]
    model = enabled(name, dtype, sampler="auto" if batch == "alike" else "hf")
    output = sampled(model, CUT | {"num_return_sequences": samples}, prompts)
    report = fd.explain(model).last_forward
    rows, drawn = rows_of(output.sequences, of=prompts)
    if batch == "one row":  # a head adds up a few tokens otherwise than many
        rows["logits_to_keep"] = torch.arange(WIDTH - 1, output.sequences.shape[1] - 1)
    else:
        assert report.path == "shared"
        assert report.computed <= prompts["attention_mask"].sum() + drawn.sum()
        assert 0 < drawn.float().mean() < 1
    fd.enable(model, min_saved_tokens=1)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            expected = by_trainer(model, rows)
        assert fd.explain(model).last_forward.reason == report.reason
        assert torch.equal(output.logprobs, expected.where(drawn, 0.0))


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text"])
def test_kept_prefixes_do_not_change_them(name):
    """Passes with gradients begin with none, in later calls and of one row, too."""
    model = enabled(name, reuse_prefix=True)
    for prompts in (PROMPTS, PROMPTS, BATCHES["one row"][0]):
        output = sampled(model, CUT | {"num_return_sequences": 1}, prompts)
        rows, drawn = rows_of(output.sequences, of=prompts)
        if len(output.sequences) == 1:
            rows["logits_to_keep"] = torch.arange(WIDTH - 1, output.sequences.shape[1] - 1)
        assert torch.equal(output.logprobs, by_trainer(model, rows).where(drawn, 0.0))


@pytest.mark.parametrize("arguments", [CUT, RETURNED | {"eos_token_id": ENDS}], ids=["sampled", "greedy"])
def test_raw_and_processed_are_stocks(arguments):
    model = tiny_model("qwen3")
    stock = sampled(model, arguments | {"output_scores": True, "output_logits": True})
    fd.enable(model, log_probs="trainer", min_saved_tokens=1)
    output = sampled(model, arguments)
    assert torch.equal(output.sequences, stock.sequences)
    rows, drawn = rows_of(stock.sequences)
    tokens = rows["input_ids"][:, WIDTH:, None]
    for found, steps in ((output.logprobs, stock.logits), (output.processed_logprobs, stock.scores)):
        expected = torch.stack(steps, 1).log_softmax(-1).gather(2, tokens)[..., 0]
        assert (found - expected)[drawn].abs().max() < 1e-4
        assert not found[~drawn].any()


@pytest.mark.parametrize("pad", [0, ENDS[0]])
def test_rows_that_stop_strings_end(pad):
    """An end token that pads too counts once, as a trainer counts it."""
    stops = {"pad_token_id": pad} | {
        "stop_strings": [chr(97 + number) for number in range(0, 97, 9)],
        "tokenizer": letters(),
    }
    model = enabled()
    output = sampled(model, SAMPLED | stops)
    rows, drawn = rows_of(output.sequences, padded=pad not in ENDS)
    assert (drawn.sum(1) < drawn.shape[1]).any()
    with fd.enabled(model, min_saved_tokens=1), torch.no_grad():
        assert torch.equal(output.logprobs, by_trainer(model, rows).where(drawn, 0.0))


@pytest.mark.parametrize("path", ["shared", "stock"])
def test_a_pad_token_that_is_drawn_counts(path):
    """Unless it is padding: after a stop, also one at a pad token that was drawn."""
    pad, stop, tokens = 50, 49, {49, 50, 51, 52, 53}

    class Stops(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            last, before = input_ids[:, -1], input_ids[:, -2]
            return (last == stop) | ((last == pad) & (before == pad))

    arguments = {
        **{"max_new_tokens": 3, "eos_token_id": 2, "pad_token_id": pad, "num_return_sequences": 16},
        **{"suppress_tokens": sorted(set(range(97)) - tokens), "stopping_criteria": [Stops()], "temperature": 3.0},
        "use_cache": path == "shared",
    }
    model = enabled()
    output = sampled(model, SAMPLED | arguments)
    assert fd.explain(model).last_call.path == path
    found = set()
    for row, numbers in zip(output.sequences[:, WIDTH - 1 :].tolist(), output.processed_logprobs, strict=True):
        ends = [at for at in range(1, len(row)) if row[at] == stop or row[at] == row[at - 1] == pad]
        count = ends[0] if ends else len(row) - 1
        assert (numbers < 0).tolist() == [step < count for step in range(len(numbers))]
        found.add((row[count] == pad, bool(ends)))
    assert found == {(True, True), (True, False), (False, True), (False, False)}


def test_a_drawn_token_counts_as_kept(monkeypatch):
    """Also where top-k, of logits that differ from those of the steps, would have removed it."""
    compute = log_probs._TrainerLogProbs._logits
    monkeypatch.setattr(log_probs._TrainerLogProbs, "_logits", lambda *given: -compute(*given))
    model = enabled()
    output = sampled(model, SAMPLED | {"top_k": 5, "renormalize_logits": True})
    rows, drawn = rows_of(output.sequences)
    with torch.no_grad():
        scores = -model(**rows).logits.double()[:, WIDTH - 1 : -1] / SAMPLED["temperature"]
    tokens = rows["input_ids"][:, WIDTH:, None]
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(2, torch.cat([scores.topk(5)[1], tokens], 2), True)
    expected = scores.gather(2, tokens) - scores.where(kept, -torch.inf).logsumexp(-1, keepdim=True)
    assert (output.processed_logprobs - expected[..., 0])[drawn].abs().max() < 1e-5


@pytest.mark.parametrize("share", [True, False])
def test_logits_of_a_part_are_in_memory_at_once(share, monkeypatch):
    """Some steps at a time, after one pass of the layers; of some rows where each pass runs them."""
    model = enabled(share_forward=share)
    expected = sampled(model)
    monkeypatch.setattr(log_probs, "_LOGITS", 3 * expected.logprobs.shape[1] * 97)
    output = sampled(model)
    assert torch.equal(output.sequences, expected.sequences)
    for name in ("logprobs", "processed_logprobs"):
        assert (output[name] - expected[name]).abs().max() < 1e-5
    if share:
        assert fd.explain(model).last_forward.reason == LAST


def test_a_trainers_pass_is_given_the_hidden_states():
    model = enabled()
    output = sampled(model)
    rows, drawn = rows_of(output.sequences)
    some = {name: value[2:5] if isinstance(value, torch.Tensor) else value for name, value in rows.items()}
    one = {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in rows.items()}
    with torch.no_grad():
        for part, drawn_of in ((rows, drawn), (some, drawn[2:5]), (one, drawn[:1])):
            found = by_trainer(model, part)
            report = fd.explain(model).last_forward
            assert (report.path, report.reason, report.computed) == ("shared", LAST, 0)
            expected = output.logprobs[: len(found)] if part is not some else output.logprobs[2:5]
            assert (found - expected)[drawn_of].abs().max() < 1e-6
        twin = copy.deepcopy(model)  # which has other weights
        by_trainer(twin, rows)
        assert fd.explain(twin).last_forward.reason == "rows begin alike"


@pytest.mark.parametrize("change", ["weights", "gradients", "other rows", "gathers", "the options"])
def test_hidden_states_are_given_only_for_the_same_pass(change, monkeypatch):
    """Nor where layers gather parameters, of which all processes run as many."""
    model = enabled()
    rows, _ = rows_of(sampled(model).sequences)
    if change == "weights":
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    elif change == "gradients":
        by_trainer(model, rows)
    elif change == "gathers":
        monkeypatch.setattr(Structure, "gathering", SimpleNamespace())
    elif change == "other rows":
        rows["input_ids"] = rows["input_ids"].clone()
        rows["input_ids"][0, WIDTH] += 1
    else:
        fd.enable(model, log_probs="trainer", min_saved_tokens=1)
    with torch.no_grad():
        found = by_trainer(model, rows)
        assert fd.explain(model).last_forward.reason == "rows begin alike"
        stock = by_trainer(fd.disable(model), rows)
    kept = rows["attention_mask"][:, WIDTH:] > 0
    assert (found - stock)[kept].abs().max() < 1e-4


@pytest.mark.parametrize("change", ["noise", "a hook"])
def test_hidden_states_are_not_given_where_code_must_run(change):
    model, seen = enabled("gpt2"), []
    rows, _ = rows_of(sampled(model).sequences)
    if change == "noise":
        model.train()
    else:
        model.transformer.h[0].register_forward_hook(lambda *_: seen.append(change))
    with torch.no_grad():
        model(**rows)
    assert fd.explain(model).last_forward.path == "stock"
    assert bool(seen) == (change == "a hook")


def test_the_next_call_has_their_memory():
    model, kept = enabled(), []
    expected = sampled(model)
    recorder = fd.TokenLogProbs(lambda drawn: kept.append(state_of(model.model).last_rows))
    sequences = sampled(model, CUT | {"return_dict_in_generate": False, "logits_processor": [recorder]})
    assert kept
    assert set(kept) == {None}
    assert torch.equal(recorder.of(sequences[:, WIDTH:]), expected.logprobs)


def test_calls_that_run_stock_and_recorders_have_them():
    model = enabled()
    expected, recorder = sampled(model), fd.TokenLogProbs()
    given = {name: value for name, value in CUT.items() if name != "return_dict_in_generate"}
    sequences = sampled(model, given | {"logits_processor": [recorder]})
    assert torch.equal(recorder.of(sequences[:, WIDTH:]), expected.logprobs)
    stock = sampled(model, CUT | {"use_cache": False})
    assert fd.explain(model).last_call.path == "stock"
    assert torch.equal(stock.sequences, expected.sequences)
    assert torch.equal(stock.logprobs, expected.logprobs)
    assert torch.equal(stock.processed_logprobs, expected.processed_logprobs)
    fd.enable(model, log_probs="trainer")
    for _ in range(2):  # the second is told by its shapes to save too little
        short = model.generate(PROMPTS["input_ids"][:1], **RETURNED)
        assert fd.explain(model).last_call.path == "stock"
        assert short.logprobs.max() < 0


def test_subclasses_of_recorders_have_them():
    """Unless one computes numbers of its own."""
    kind = type("Recorder", (fd.TokenLogProbs,), {})
    own = type("Own", (kind,), {"__call__": lambda self, ids, scores: kind.__call__(self, ids, scores * 2)})
    model = enabled()
    output = sampled(model)
    given = {name: value for name, value in CUT.items() if name != "return_dict_in_generate"}
    for options in ({"log_probs": "trainer"}, {}):
        fd.enable(model, min_saved_tokens=1, **options)
        found = []
        for recorder in (fd.TokenLogProbs(), kind(), own()):
            sequences = sampled(model, given | {"logits_processor": [recorder]})
            found.append(recorder.of(sequences[:, WIDTH:]))
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])
        if options:
            assert torch.equal(found[0], output.logprobs)


def test_nothing_is_scored_unless_asked_for():
    model = enabled()
    sampled(model, CUT | {"return_dict_in_generate": False})
    sampled(model, {"num_beams": 2, "max_new_tokens": 2})
    assert fd.explain(model).last_forward is None
    fd.enable(model, min_saved_tokens=1)
    output = sampled(model)
    assert fd.explain(model).last_forward is None
    assert output.logprobs is output.processed_logprobs is None


@pytest.mark.parametrize(
    ("name", "hidden", "remedy"),
    [
        ("gpt2", slice(10), "give prompts of one length, without padding"),
        ("gpt2", slice(0), None),
        ("opt", slice(10), None),
        ("qwen3", slice(10), None),
        ("qwen3", slice(50, 52), "pad prompts at the left alone"),
        ("qwen3", slice(60, 70), "pad prompts at the left alone"),
    ],
)
def test_other_positions_than_those_of_steps_are_told(name, hidden, remedy, caplog):
    """By one warning, where they change what a model computes: see the steps' own log-probabilities."""
    mask = torch.ones_like(PROMPTS["attention_mask"])
    mask[:1, hidden] = 0
    prompts, arguments = PROMPTS | {"attention_mask": mask}, RETURNED | {"max_new_tokens": 3}
    model = tiny_model(name)
    stock = sampled(model, arguments | {"output_logits": True}, prompts)
    fd.enable(model, log_probs="trainer", min_saved_tokens=1)
    for _ in range(2):
        output = sampled(model, arguments, prompts)
    assert torch.equal(output.sequences, stock.sequences)
    steps = torch.stack(stock.logits, 1).log_softmax(-1).gather(2, stock.sequences[:, WIDTH:, None])[..., 0]
    assert ((steps - output.logprobs).abs().max() > 1e-2) == (remedy is not None)
    told = [record.message for record in caplog.records if "without position_ids, counts" in record.message]
    assert [message.split("; ")[1] for message in told] == ([] if remedy is None else [remedy])


def test_padding_tells_nothing_of_positions_that_attention_does_not_read(caplog):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 4}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
    model = tiny_model_of_type("nemotron_h", layers_block_type=["mamba", "attention"], **heads, **sizes)
    fd.enable(model, log_probs="trainer", min_saved_tokens=1)
    mask = torch.ones_like(PROMPTS["attention_mask"])
    mask[:1, :10] = 0
    output = sampled(model, RETURNED | {"max_new_tokens": 3}, PROMPTS | {"attention_mask": mask})
    assert output.logprobs is not None
    assert not any("without position_ids, counts" in record.message for record in caplog.records)


def test_processors_of_whole_batches_leave_processed_ones_out():
    output = sampled(enabled(), SAMPLED | {"encoder_repetition_penalty": 1.2, "num_return_sequences": 1})
    assert output.logprobs is not None
    assert output.processed_logprobs is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 4}, "this call runs beam s.*; use num_beams=1 without an assistant, or enable"),
        ({"prompt_lookup_num_tokens": 2}, "this call runs assisted generation"),
        ({"position_ids": torch.arange(WIDTH).repeat(2, 1)}, "this call is given position_ids; give input_ids"),
    ],
)
def test_what_is_refused(arguments, message):
    model = enabled()
    with pytest.raises(ValueError, match=message):
        model.generate(**PROMPTS | RETURNED | arguments)


@pytest.mark.parametrize("how", ["a loop of the user's", "a generate of the user's"])
def test_rows_that_others_draw_are_refused(how):
    """Where fields are asked for, they would lack the log-probabilities."""

    def loop(model, input_ids, generation_config, **_):
        return torch.cat([input_ids, input_ids[:, :1]], dim=1)

    model = tiny_model("qwen3")
    if how == "a generate of the user's":
        original = model.generate
        model.generate = lambda input_ids, generation_config=None: original(input_ids, generation_config)
    fd.enable(model, log_probs="trainer")
    given = {"custom_generate": loop} if how == "a loop of the user's" else {}
    config, ids = copy.deepcopy(model.generation_config), PROMPTS["input_ids"]
    assert len(model.generate(ids, generation_config=config, **given)) == len(ids)
    message = "custom_generate decodes by itself" if given else "replaces generate and has no"
    for one in (config, model.generation_config):  # which the call's inherits where it sets nothing
        one.return_dict_in_generate = True
        with pytest.raises(ValueError, match=rf"{message}.*; ask for sequences alone, or enable"):
            model.generate(ids, generation_config=config, **given)
        config.return_dict_in_generate = None
    fd.enable(model)
    model.generate(ids, generation_config=config, **given)


def test_noise_encoders_and_learned_prompts_are_refused():
    model = enabled("gpt2").train()
    with pytest.raises(ValueError, match=r"training mode with Dropout.p=0.1; call model.eval\(\), .*, or enable"):
        sampled(model)
    model = enabled()
    model.prepare_inputs_for_generation = tiny_model("qwen3").prepare_inputs_for_generation  # as PEFT sets its own
    with pytest.raises(ValueError, match=r"which are not in the rows; use an adapter of weights, such as LoRA, or en"):
        sampled(model)
    sizes = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 96, "num_layers": 2, "decoder_start_token_id": 0}
    encodes = fd.enable(T5ForConditionalGeneration(T5Config(vocab_size=97, **sizes)).eval(), log_probs="trainer")
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder; use a decoder, or enable"):
        sampled(encodes, RETURNED | {"do_sample": True})
