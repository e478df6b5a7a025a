"""`model.generate` of an enabled model, argument by argument, against stock transformers."""

import copy

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, TextStreamer
from transformers.generation.streamers import BaseStreamer

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.snapshot import ModelWalk
from hf_fastdecode.generation.support import step_arguments

from ..tiny_models import VOCABULARY, ragged_prompts, seeded, tiny_model
from .calls import PROMPT, SAMPLING, both, check_shared, tokens_embedded


class BanToken(LogitsProcessor):
    """A third-party processor that forbids one token and records the lengths it saw."""

    def __init__(self, token):
        self.token, self.lengths = token, []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        scores = scores.clone()
        scores[:, self.token] = -torch.inf
        return scores


class StopAfter(StoppingCriteria):
    """Stops each row once it holds a given token."""

    def __init__(self, token, start):
        self.token, self.start = token, start

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, self.start :] == self.token).any(1)


ARGUMENTS = {
    "temperature": lambda: {"temperature": 0.7},
    "top-k": lambda: {"top_k": 5},
    "top-p": lambda: {"top_p": 0.8},
    "min-p": lambda: {"min_p": 0.1},
    "typical-p": lambda: {"typical_p": 0.5},
    "epsilon-cutoff": lambda: {"epsilon_cutoff": 0.01},
    "repetition-penalty": lambda: {"repetition_penalty": 1.4},
    "no-repeat-ngram": lambda: {"no_repeat_ngram_size": 2},
    "bad-words": lambda: {"bad_words_ids": [[5], [7, 8]]},
    "min-new-tokens": lambda: {"min_new_tokens": 6, "eos_token_id": list(range(3, 40))},
    "eos": lambda: {"eos_token_id": list(range(3, 20))},
    "forced-eos": lambda: {"forced_eos_token_id": 9},
    "suppress": lambda: {"suppress_tokens": [4, 5, 6], "begin_suppress_tokens": [7, 8]},
    "sequence-bias": lambda: {"sequence_bias": [[[11], 4.0]]},
    "exponential-decay": lambda: {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 5},
    "guidance": lambda: {"guidance_scale": 1.5},
    "prefix-allowed": lambda: {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(3, 60))},
    "user-processor": lambda: {"logits_processor": [BanToken(13)]},
    "user-criterion": lambda: {"stopping_criteria": [StopAfter(17, 80)], "eos_token_id": 2},
    "max-time": lambda: {"max_time": 600.0},
    "prefill-chunks": lambda: {"prefill_chunk_size": 7},
    "one-token": lambda: {"max_new_tokens": 1},
    "many-samples": lambda: {"num_return_sequences": 70, "max_new_tokens": 4},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_sampling_arguments_give_stock_tokens(model, name):
    check_shared(model, lambda: SAMPLING | ARGUMENTS[name]())


ENDS = {"eos_token_id": list(range(3, 20))}
TWO_PROMPTS = ragged_prompts(57, 40, shared=35)


class Edits:
    """Third-party code that changes tokens in place: one of the prompt, the last one, and one far back.

    As a processor it also forbids what stands far back, so that what it changed is read again.
    """

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        input_ids[:, 5] = 3 + self.calls
        input_ids[::2, -1] = (input_ids[::2, -1] + self.calls) % 97
        input_ids[1, -3] = 11
        if not isinstance(scores, torch.Tensor):
            return torch.zeros(len(input_ids), dtype=torch.bool)
        return scores.index_fill(1, input_ids[:, -3], -torch.inf)


@pytest.mark.parametrize(
    ("as_what", "extra", "prompt"),
    [
        ("logits_processor", {}, PROMPT),
        ("logits_processor", ENDS, TWO_PROMPTS),
        ("stopping_criteria", {}, TWO_PROMPTS),
        ("stopping_criteria", ENDS, PROMPT),
    ],
    ids=["processor", "processor-ends-two", "criterion-two", "criterion-ends"],
)
def test_tokens_changed_in_place_are_stocks(model, as_what, extra, prompt):
    """Stock passes its own tensor of tokens to processors and criteria, so in-place changes reach the next step."""
    unchanged, *_ = both(model, lambda: SAMPLING | extra, copy.deepcopy(prompt))
    stock, shared, call = both(model, lambda: SAMPLING | extra | {as_what: [Edits()]}, copy.deepcopy(prompt))
    assert call.path == "shared", call.reason
    assert torch.equal(shared, stock)
    assert not torch.equal(shared, unchanged)


def test_scores_logits_and_sequences_are_stocks(model):
    arguments = SAMPLING | {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "top_p": 0.9,
    }
    stock, shared, call = both(model, lambda: arguments)
    assert call.path == "shared"
    assert torch.equal(shared.sequences, stock.sequences)
    assert len(shared.scores) == len(stock.scores) == len(shared.logits) == 8
    for ours, theirs in zip(shared.logits + shared.scores, stock.logits + stock.scores, strict=True):
        torch.testing.assert_close(ours, theirs)
    transitions = [
        model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (shared, stock)
    ]
    torch.testing.assert_close(*transitions)
    assert isinstance(shared[CACHE], fd.SharedContextCache)
    assert shared[CACHE].get_seq_length() == stock[CACHE].get_seq_length() == 80 + 7


def test_stop_strings(tmp_path):
    model, tokenizer = fd.load_embedded()
    prompt = tokenizer(["def double(x):\n    return x * 2\n\n" * 12 + "def triple(x):"], return_tensors="pt")
    prompt = {"input_ids": prompt["input_ids"], "attention_mask": prompt["attention_mask"]}
    arguments = {"stop_strings": ["return"], "tokenizer": tokenizer, "max_new_tokens": 24, "num_return_sequences": 3}
    stock, _ = check_shared(model, lambda: arguments | {"do_sample": True, "top_k": 0}, prompt)
    assert stock.shape[1] < prompt["input_ids"].shape[1] + 24, "nothing stopped"


class Collect(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.tolist())

    def end(self):
        self.ended = True


def test_streamer_sees_what_it_sees_in_stock(model):
    # Two equal rows instead of num_return_sequences, so that every streamer call is comparable in stock too.
    prompt = {key: value.repeat(2, 1) for key, value in PROMPT.items()}
    streamers = []

    def arguments():
        streamers.append(Collect())
        return {"streamer": streamers[-1], "max_new_tokens": 8, "do_sample": True, "top_k": 0}

    _, _, call = both(model, arguments, prompt)
    assert call.path == "shared"
    assert streamers[0].pieces == streamers[1].pieces
    assert streamers[1].ended


def test_text_streamer_prints_the_completion(capsys):
    model, tokenizer = fd.load_embedded()
    ids = tokenizer(["def f(x):\n    return x\n\n" * 12] * 2, return_tensors="pt")["input_ids"]
    with fd.enabled(model):
        # A text streamer takes one row; the row shares nothing, so this call is stock, and works.
        model.generate(ids[:1], streamer=TextStreamer(tokenizer, skip_prompt=True), max_new_tokens=5, do_sample=False)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_default_device_that_is_not_the_models(model, device):
    """Host-side tensors ignore the default device; on the CPU, the meta device stands in for another one."""
    call = ragged_prompts(80, 60, shared=40) | SAMPLING | {"eos_token_id": list(range(3, 12)), "max_new_tokens": 24}
    call = {
        key: value.to(device) if isinstance(value, torch.Tensor) and device == "cuda" else value
        for key, value in call.items()
    }
    model = model.to(device).bfloat16() if device == "cuda" else model
    with fd.enabled(model, sampler="hf"):
        expected = seeded(lambda: model.generate(**call))
        with torch.device(device):
            cache = fd.prefill(model, call["input_ids"][1:, 20:])
            found = seeded(lambda: model.generate(**call))
            assert fd.explain(model).last_call.path == "shared"
            assert fd.explain(model).last_call.compactions >= 1
    assert torch.equal(found, expected)
    assert cache.rows == 1


def test_max_length_and_generation_config(model):
    config = model.generation_config.__class__(max_length=90, do_sample=True, top_k=0, num_return_sequences=3)
    config.pad_token_id = 0
    stock, _ = check_shared(model, lambda: {"generation_config": config})
    assert stock.shape == (3, 90)


def test_tokens_through_the_embedding(model):
    """One prompt of m tokens and n samples of t new tokens: m + n*(t-1) tokens, where stock runs n*(m + t - 1)."""
    m, n, t = 80, 8, 16
    with tokens_embedded(model) as counted:
        both(model, lambda: SAMPLING | {"num_return_sequences": n, "max_new_tokens": t})
    total = sum(counted)
    stock = n * (m + t - 1)
    assert total - stock == m + n * (t - 1) <= m + n * (t + 1)


def test_same_prompts_apart_are_still_right(model):
    a, b = ragged_prompts(70, seed=1)["input_ids"], ragged_prompts(70, seed=2)["input_ids"]
    prompt = {"input_ids": torch.cat([a, b, a, a]), "attention_mask": torch.ones(4, 70, dtype=torch.long)}
    check_shared(model, lambda: SAMPLING | {"num_return_sequences": 2}, prompt)


def test_a_prompt_that_begins_another(model):
    long = ragged_prompts(90)["input_ids"][0]
    rows = [long, long[:50], long[:77]]
    ids, mask = torch.zeros(3, 90, dtype=torch.long), torch.zeros(3, 90, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, 90 - len(tokens) :], mask[row, 90 - len(tokens) :] = tokens, 1
    prompt = {"input_ids": ids, "attention_mask": mask}
    _, call = check_shared(model, lambda: SAMPLING | {"num_return_sequences": 2}, prompt)
    assert call.prefilled_tokens < 90 + 50 + 77


def test_padding_that_all_rows_have(model):
    prompt = {
        "input_ids": torch.nn.functional.pad(PROMPT["input_ids"], (9, 0)),
        "attention_mask": torch.nn.functional.pad(PROMPT["attention_mask"], (9, 0)),
    }
    _, call = check_shared(model, lambda: SAMPLING, prompt)
    assert call.prefilled_tokens == 80


def test_mask_made_by_transformers(model):
    """Without an attention mask, transformers takes pad tokens for padding."""
    prompt = {"input_ids": ragged_prompts(80, 60)["input_ids"]}
    _, call = check_shared(model, lambda: SAMPLING, prompt)
    assert call.prefilled_tokens == 80 + 60


def test_modules_are_looked_through_once_until_the_model_changes(model, monkeypatch):
    looked = []
    walk = ModelWalk.__init__
    monkeypatch.setattr(
        ModelWalk, "__init__", lambda self, model, modules=None: looked.append(modules) or walk(self, model, modules)
    )
    with fd.enabled(model, mode="eager"):
        for _ in range(3):
            model.generate(**PROMPT, **SAMPLING)
        assert looked.count(None) == 1
        model.lm_head.register_forward_hook(lambda *_: None).remove()
        model.generate(**PROMPT, **SAMPLING)
        assert looked.count(None) == 1
        model.lm_head = copy.deepcopy(model.lm_head)
        model.generate(**PROMPT, **SAMPLING)
        assert looked.count(None) == 2


def test_configs_changed_between_calls():
    """Config objects replaced by equal ones: the list that a call collects is not kept for later calls."""
    model = tiny_model("llama-gqa")
    stock = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    with fd.enabled(model):
        for _ in range(2):
            assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), stock)
            assert fd.explain(model).last_call.path == "shared"
            other = copy.deepcopy(model.config)
            for module in model.modules():
                if hasattr(module, "config"):
                    module.config = other


def test_a_call_inside_a_call_of_another_model(model):
    short = SAMPLING | {"max_new_tokens": 4}
    other = tiny_model("gpt2")
    expected = seeded(lambda: other.generate(**PROMPT, **short))
    inner = []

    def generate(ids, scores):
        state = torch.get_rng_state()
        inner.append(seeded(lambda: other.generate(**PROMPT, **short)))
        torch.set_rng_state(state)
        return torch.zeros(len(ids), dtype=torch.bool)

    stock = seeded(lambda: model.generate(**PROMPT, **short))
    with fd.enabled(model), fd.enabled(other):
        shared = seeded(lambda: model.generate(**PROMPT, **short, stopping_criteria=[generate]))
        assert fd.explain(other).last_call.path == fd.explain(model).last_call.path == "shared"
    assert torch.equal(shared, stock)
    assert all(torch.equal(out, expected) for out in inner)


def test_ids_of_32_bits_and_masks_of_other_numbers(model):
    call = ragged_prompts(70) | {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 3}
    for change in ({"input_ids": call["input_ids"].int()}, {"attention_mask": 2 * torch.ones_like(call["input_ids"])}):
        stock = seeded(lambda change=change: model.generate(**call | change))
        with fd.enabled(model):
            ours = seeded(lambda change=change: model.generate(**call | change))
        assert torch.equal(ours, stock)
        assert ours.dtype == stock.dtype


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"input_ids": torch.ones(1, 9, dtype=torch.long), "attention_mask": [[1] * 9]},
            "must be a tensor, .*, got list",
        ),
        (torch.ones(1, 9, dtype=torch.bool), "must be int64 or int32, got bool"),
        (torch.ones(9, dtype=torch.long), r"shape \[prompts, length\], got \[9\]; for one prompt, input_ids\[None\]"),
        (torch.ones(1, 0, dtype=torch.long), r"the prompts are empty: input_ids has shape \[1, 0\]"),
        ({"input_ids": np.array([[5, 6]])}, "must be a tensor or a list of prompts, got ndarray; call the tokenizer"),
        ([], "the list of prompts is empty; give at least one prompt"),
        ([5, 6], r"prompt 0 must be a list of ids or a tensor \[length\], got 5; for one prompt, pass \[input_ids\]"),
        ([[5, 6], []], "prompt 1 is empty; give at least one token, or leave the prompt out"),
        ([torch.ones(0, dtype=torch.long)], "prompt 0 is empty"),
        ([[5, 6], [5, 6.0]], r"prompt 1 must be a list of integers, got 6\.0 at position 1; call the tokenizer"),
        ([[5, True]], "a list of integers, got True at position 1"),
        ([[[5, 6]]], "prompt 0 must be a list of integers, got a list at position 0"),
        ([[5, 6], 7], "prompt 1 must be a list of ids or a tensor .*, got 7"),
        (["some text"], "prompt 0 must be a list of ids or a tensor .*, got a str; call the tokenizer"),
        ([torch.ones(1, 9, dtype=torch.long)], r"\[length\], got \[1, 9\]; pass ids\[0\] of it"),
        ([torch.ones(2, 9, dtype=torch.long)], r"\[length\], got \[2, 9\]; pass one tensor for each"),
        ([torch.ones(9)], "prompt 0 must be int64 or int32, got float32; call the tokenizer"),
        ([[5] * 40, [5] * 40, [5, 97, 6]], "prompt 2 holds the id 97; LlamaForCausalLM has embeddings for 0 to 96"),
        (torch.full((2, 9), -1), "prompt 0 holds the id -1; .*: use its own tokenizer"),
        ({"input_ids": [[5, 6]], "attention_mask": torch.ones(1, 2)}, "a list of 1 rows, .*, got Tensor"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1, 1], [1]]}, "a list of 1 rows, .*, got a list of 2"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1]]}, "prompt 0 has 2 ids and an attention_mask of 1"),
        ({"input_ids": [[5, 6], [0, 5]], "attention_mask": [[1, 1], [1, 0]]}, "set padding_side='left'"),
        ({"input_ids": [[5, 6]], "token_type_ids": [[0, 0]]}, "got 'token_type_ids' too; leave it out"),
    ],
)
def test_what_cannot_be_prefilled(model, inputs, message):
    with fd.enabled(model), pytest.raises(ValueError, match=message):
        fd.prefill(model, inputs)


def test_steps_are_not_given_what_is_empty():
    arguments = {"mm_encoder_outputs": {}, "token_type_ids": None, "use_cache": True, "logits_to_keep": 1}
    assert step_arguments(arguments) == {"use_cache": True, "logits_to_keep": 1}


@pytest.mark.parametrize("number", [np.int64(5), torch.tensor(5)], ids=["numpy", "torch"])
def test_numbers_of_other_libraries(model, number):
    check_shared(model, lambda: SAMPLING | {"max_new_tokens": number})
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING | {"max_new_tokens": number})
        assert type(state_of(model).captures.steps_asked) is int


def test_a_model_that_sees_images():
    """`generate` adds an argument for encoded images to its steps, which is empty for text prompts."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    text = {"model_type": "llama", "vocab_size": VOCABULARY, "num_key_value_heads": 2} | sizes
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 64} | sizes
    torch.manual_seed(0)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_id=90, pad_token_id=0)
    model = LlavaForConditionalGeneration(config).eval()
    stock, _ = check_shared(model, lambda: SAMPLING)
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})), stock)

    ids = PROMPT["input_ids"].clone()
    ids[0, 20:24] = 90
    seeing = PROMPT | {"input_ids": ids, "pixel_values": 9 * torch.rand(1, 3, 28, 28)}
    check_shared(model, lambda: SAMPLING, seeing)


def test_labels_do_not_tell_prompts_apart(model):
    prompts = ragged_prompts(75, 63, shared=60)
    more = {"labels": prompts["input_ids"]}
    stock, shared, call = both(model, lambda: SAMPLING | more, prompts)
    assert torch.equal(shared, stock)
    assert call.prefilled_tokens == 75 + 3, call.reason
