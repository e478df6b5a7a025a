"""`model.generate` of an enabled model, argument by argument, against stock transformers."""

import logging

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    StoppingCriteria,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import hf_fastdecode as fd
from hf_fastdecode.attention.dispatch import Choice
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.generation import start

from ..tiny_models import VOCABULARY, ragged_prompts, seeded, tiny_model

PROMPT = ragged_prompts(80)
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 4, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama-gqa")


def both(model, arguments, prompt=PROMPT):
    """The output of stock and of shared decoding from one seed, and the shared call's report."""
    stock = seeded(lambda: model.generate(**prompt, **arguments()))
    with fd.enabled(model):
        shared = seeded(lambda: model.generate(**prompt, **arguments()))
        return stock, shared, fd.explain(model).last_call


class BanToken(LogitsProcessor):
    """A processor of the user's own: forbids one token and records the lengths it saw."""

    def __init__(self, token):
        self.token, self.lengths = token, []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        scores = scores.clone()
        scores[:, self.token] = -torch.inf
        return scores


class StopAfter(StoppingCriteria):
    """Stops each row by itself, once it holds a token."""

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
    stock, shared, call = both(model, lambda: SAMPLING | ARGUMENTS[name]())
    assert call.path == "shared", call.reason
    assert torch.equal(shared, stock)


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
    assert len(shared.scores) == len(stock.scores) == len(shared.logits) == 16
    for ours, theirs in zip(shared.logits + shared.scores, stock.logits + stock.scores, strict=True):
        torch.testing.assert_close(ours, theirs)
    transitions = [
        model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (shared, stock)
    ]
    torch.testing.assert_close(*transitions)
    assert isinstance(shared.past_key_values, fd.SharedContextCache)
    assert shared.past_key_values.get_seq_length() == stock.past_key_values.get_seq_length() == 80 + 15


def test_stop_strings(tmp_path):
    model, tokenizer = fd.load_embedded()
    prompt = tokenizer(["def double(x):\n    return x * 2\n\n" * 12 + "def triple(x):"], return_tensors="pt")
    prompt = {"input_ids": prompt["input_ids"], "attention_mask": prompt["attention_mask"]}
    arguments = {"stop_strings": ["return"], "tokenizer": tokenizer, "max_new_tokens": 24, "num_return_sequences": 3}
    stock, shared, call = both(model, lambda: arguments | {"do_sample": True, "top_k": 0}, prompt)
    assert call.path == "shared"
    assert torch.equal(shared, stock)
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


def test_max_length_and_generation_config(model):
    config = model.generation_config.__class__(max_length=90, do_sample=True, top_k=0, num_return_sequences=3)
    config.pad_token_id = 0
    stock, shared, call = both(model, lambda: {"generation_config": config})
    assert call.path == "shared"
    assert stock.shape == (3, 90)
    assert torch.equal(shared, stock)


def test_tokens_through_the_embedding(model):
    """One prompt of m tokens and n samples of t new tokens: m + n*(t-1) tokens, where stock runs n*(m + t - 1)."""
    m, n, t = 80, 8, 16
    counted = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: counted.append(args[0].numel())
    )
    try:
        both(model, lambda: SAMPLING | {"num_return_sequences": n, "max_new_tokens": t})
    finally:
        hook.remove()
    total = sum(counted)
    stock = n * (m + t - 1)
    assert total - stock == m + n * (t - 1) <= m + n * (t + 1)


def test_same_prompts_apart_are_still_right(model):
    a, b = ragged_prompts(70, seed=1)["input_ids"], ragged_prompts(70, seed=2)["input_ids"]
    prompt = {"input_ids": torch.cat([a, b, a, a]), "attention_mask": torch.ones(4, 70, dtype=torch.long)}
    stock, shared, call = both(model, lambda: SAMPLING | {"num_return_sequences": 2}, prompt)
    assert call.path == "shared"
    assert torch.equal(shared, stock)


def test_a_prompt_that_begins_another(model):
    long = ragged_prompts(90)["input_ids"][0]
    rows = [long, long[:50], long[:77]]
    ids, mask = torch.zeros(3, 90, dtype=torch.long), torch.zeros(3, 90, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, 90 - len(tokens) :], mask[row, 90 - len(tokens) :] = tokens, 1
    prompt = {"input_ids": ids, "attention_mask": mask}
    stock, shared, call = both(model, lambda: SAMPLING | {"num_return_sequences": 2}, prompt)
    assert call.path == "shared"
    assert call.prefilled_tokens < 90 + 50 + 77
    assert torch.equal(shared, stock)


def test_padding_that_all_rows_have(model):
    prompt = {
        "input_ids": torch.nn.functional.pad(PROMPT["input_ids"], (9, 0)),
        "attention_mask": torch.nn.functional.pad(PROMPT["attention_mask"], (9, 0)),
    }
    stock, shared, call = both(model, lambda: SAMPLING, prompt)
    assert call.path == "shared"
    assert call.prefilled_tokens == 80
    assert torch.equal(shared, stock)


def test_mask_made_by_transformers(model):
    """Without an attention mask, transformers takes pad tokens for padding."""
    prompt = {"input_ids": ragged_prompts(80, 60)["input_ids"]}
    stock, shared, call = both(model, lambda: SAMPLING, prompt)
    assert call.path == "shared"
    assert call.prefilled_tokens == 80 + 60
    assert torch.equal(shared, stock)


# --- what runs stock ---------------------------------------------------------------------------------------------


STOCK = {
    "beams": ({"num_beams": 4, "num_return_sequences": 4}, "beam"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "hidden-states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "no-cache": ({"use_cache": False}, "use_cache"),
    "static-cache": ({"cache_implementation": "static"}, "cache_implementation"),
    "prompt-lookup": ({"prompt_lookup_num_tokens": 3, "num_return_sequences": 1}, "assisted"),
    "one-row": ({"num_return_sequences": 1}, "save 0 tokens"),
}


@pytest.mark.parametrize("name", STOCK)
def test_what_cannot_share_runs_stock_and_says_so(name, caplog):
    extra, reason = STOCK[name]
    model = tiny_model("llama-gqa")
    if name == "attentions":
        model.set_attn_implementation("eager")
    with caplog.at_level(logging.INFO, logger="hf_fastdecode"):
        stock, shared, call = both(model, lambda: SAMPLING | extra)
        told = [record.message for record in caplog.records if record.name == "hf_fastdecode"]
        with fd.enabled(model):
            seeded(lambda: model.generate(**PROMPT, **SAMPLING, **{}))
    assert call.path == "stock"
    assert reason in call.reason
    assert len(told) == 1
    assert call.reason in told[0]
    sequences = [out if isinstance(out, torch.Tensor) else out.sequences for out in (stock, shared)]
    assert torch.equal(*sequences)


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_model_with_its_own_inputs_runs_stock(where):
    """Our loop would not call what it overrides."""
    model = tiny_model("llama-gqa")
    plain = type(model).prepare_inputs_for_generation

    def shifted(self, input_ids, **kwargs):
        inputs = plain(self, input_ids, **kwargs)
        return inputs | {"input_ids": (inputs["input_ids"] + 1) % VOCABULARY}

    if where == "class":
        model.__class__ = type("Shifted", (type(model),), {"prepare_inputs_for_generation": shifted})
    else:
        model.prepare_inputs_for_generation = shifted.__get__(model)
    stock, shared, call = both(model, lambda: SAMPLING)
    assert torch.equal(shared, stock)
    assert "prepare_inputs_for_generation of its own" in call.reason


def test_a_loop_that_the_user_gives_is_theirs(model):
    def loop(model, input_ids, **kwargs):
        return input_ids + 1

    with fd.enabled(model):
        out = model.generate(**PROMPT, custom_generate=loop, max_new_tokens=4)
        assert torch.equal(out, PROMPT["input_ids"] + 1)
        assert "custom_generate" in fd.explain(model).last_call.reason
        assert model.generate(PROMPT["input_ids"], *[None] * 10, max_new_tokens=4).shape == (1, 84)


def test_processes_that_must_keep_step_run_stock(model):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        stock, shared, call = both(model, lambda: SAMPLING | {"synced_gpus": True})
    finally:
        torch.distributed.destroy_process_group()
    assert call.path == "stock"
    assert "synced_gpus=True" in call.reason
    assert torch.equal(shared, stock)


@pytest.mark.parametrize(("saved", "stock"), [(0, True), (1_000_000, False)])
def test_plain_decoding_is_a_candidate(model, monkeypatch, saved, stock):
    """Where the cost model has plain decoding faster, sharing must save more of the prefill than it loses."""
    forest = Forest(8, [Node(Span(0, 0, 100 + saved), 0, 8)])
    times = {"kernels": 2e-5, "library": 9e-5, "plain": 1e-5}
    monkeypatch.setattr(start, "choose", lambda *_: Choice("plain", times))
    monkeypatch.setattr(start, "prefill_rate", lambda _: 1e14)

    class Gpu:
        device, dtype, config = torch.device("cuda"), torch.bfloat16, model.config
        parameters = model.parameters

    choice = start.plain_is_faster(Gpu(), forest, 64)
    assert (choice is not None) == stock
    monkeypatch.setattr(start, "choose", lambda *_: Choice("kernels", times))
    assert start.plain_is_faster(Gpu(), forest, 64) is None
    assert start.plain_is_faster(model, forest, 64) is None  # on the CPU there is nothing to choose


def test_a_message_comes_once(model, caplog):
    with fd.enabled(model), caplog.at_level(logging.INFO, logger="hf_fastdecode"):
        for _ in range(3):
            model.generate(**PROMPT, num_beams=2, max_new_tokens=2)
    assert len([record for record in caplog.records if record.name == "hf_fastdecode"]) == 1


def test_a_window_that_binds_runs_stock():
    model = tiny_model("mistral", sliding_window=40)
    stock, shared, call = both(model, lambda: SAMPLING)
    assert call.path == "stock"
    assert "sliding window of 40 tokens is shorter than the longest row" in call.reason
    assert torch.equal(shared, stock)


def test_a_window_that_the_new_tokens_would_reach_runs_stock():
    model = tiny_model("mistral", sliding_window=90)
    stock, shared, call = both(model, lambda: SAMPLING)  # 80 + 16 tokens
    assert call.path == "stock"
    assert torch.equal(shared, stock)
    _, _, call = both(model, lambda: SAMPLING | {"max_new_tokens": 10})
    assert call.path == "shared"


def test_dynamic_rope_runs_stock_beyond_its_limit():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama-gqa", max_position_embeddings=88, rope_parameters=rope)
    stock, shared, call = both(model, lambda: SAMPLING)
    assert call.path == "stock"
    assert "88" in call.reason
    assert torch.equal(shared, stock)
    stock, shared, call = both(model, lambda: SAMPLING | {"max_new_tokens": 8})
    assert call.path == "shared"
    assert torch.equal(shared, stock)


def test_custom_position_ids_run_stock(model):
    prompt = PROMPT | {"position_ids": torch.arange(80)[None] * 2}
    stock, shared, call = both(model, lambda: SAMPLING, prompt)
    assert call.path == "stock"
    assert "position_ids" in call.reason
    assert torch.equal(shared, stock)


def test_inputs_embeds_run_stock(model):
    embeds = model.get_input_embeddings()(PROMPT["input_ids"])
    stock, shared, call = both(model, lambda: SAMPLING, {"inputs_embeds": embeds})
    assert call.path == "stock"
    assert torch.equal(shared, stock)


def test_right_padding_runs_stock(model):
    ids, mask = PROMPT["input_ids"].repeat(2, 1), torch.ones(2, 80, dtype=torch.long)
    mask[1, -5:] = 0
    stock, shared, call = both(model, lambda: SAMPLING, {"input_ids": ids, "attention_mask": mask})
    assert call.path == "stock"
    assert "padding_side" in call.reason
    assert torch.equal(shared, stock)


def test_a_stock_cache_runs_stock(model):
    def arguments():
        return SAMPLING | {"past_key_values": DynamicCache(config=model.config)}

    stock, shared, call = both(model, arguments)
    assert call.path == "stock"
    assert "DynamicCache" in call.reason
    assert torch.equal(shared, stock)


def test_encoder_decoder_runs_stock():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).eval()
    stock, shared, call = both(model, lambda: SAMPLING)
    assert call.path == "stock"
    assert "encoder-decoder" in call.reason
    assert torch.equal(shared, stock)


def test_latent_attention_runs_stock():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    ranks = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    sizes |= {"intermediate_size": 64, "moe_intermediate_size": 32, "first_k_dense_replace": 2}
    config = DeepseekV3Config(vocab_size=VOCABULARY, **sizes, **ranks, pad_token_id=0, eos_token_id=None)
    stock, shared, call = both(DeepseekV3ForCausalLM(config).eval(), lambda: SAMPLING)
    assert call.path == "stock"
    assert "latent" in call.reason
    assert torch.equal(shared, stock)


def test_attention_that_takes_the_cache_for_a_tensor_runs_stock():
    from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = DiffLlamaConfig(vocab_size=VOCABULARY, intermediate_size=64, **sizes, pad_token_id=0, eos_token_id=None)
    stock, shared, call = both(DiffLlamaForCausalLM(config).eval(), lambda: SAMPLING)
    assert call.path == "stock"
    assert "are not tensors" in call.reason
    assert torch.equal(shared, stock)


def test_attention_that_scales_with_the_cache_runs_stock():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 64, "intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 16}
    config = Llama4TextConfig(vocab_size=VOCABULARY, **sizes, no_rope_layers=[0, 0], floor_scale=8, pad_token_id=0)
    model = Llama4ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    stock, shared, call = both(model, lambda: SAMPLING, ragged_prompts(60, 75, shared=40))
    assert call.path == "stock"
    assert torch.equal(shared, stock)


def test_autocast_runs_stock(model):
    with torch.autocast("cpu", torch.bfloat16):
        stock, shared, call = both(model, lambda: SAMPLING)
    assert call.path == "stock"
    assert torch.equal(shared, stock)


def test_a_cache_of_another_model_is_an_error(model):
    other = tiny_model("llama-mqa")
    with fd.enabled(other), fd.enabled(model):
        cache = fd.prefill(other, PROMPT)
        with pytest.raises(ValueError, match=r"the cache holds 1 KV heads in torch\.float32, the model has 2"):
            model.generate(**PROMPT, **SAMPLING, past_key_values=cache)


def test_training_mode_with_dropout_runs_stock():
    model = tiny_model("gpt2").train()
    stock, shared, call = both(model, lambda: SAMPLING)
    assert call.path == "stock"
    assert "dropout" in call.reason
    assert torch.equal(shared, stock)


# --- a cache kept by the user ---------------------------------------------------------------------------------------


def test_a_prefilled_cache_serves_many_calls(model):
    stock = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        before = (cache.nbytes, repr(cache))
        for _ in range(3):
            shared = seeded(lambda: model.generate(**PROMPT, **SAMPLING, past_key_values=cache))
            assert torch.equal(shared, stock)
            assert fd.explain(model).last_call.prefilled_tokens == 0
        assert (cache.nbytes, repr(cache)) == before


def test_a_prefilled_prefix_is_extended(model):
    prefix = {key: value[:, :60] for key, value in PROMPT.items()}
    stock = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    with fd.enabled(model):
        cache = fd.prefill(model, prefix["input_ids"])
        shared = seeded(lambda: model.generate(**PROMPT, **SAMPLING, past_key_values=cache))
        assert fd.explain(model).last_call.prefilled_tokens == 20
        assert cache.rows == 1
        assert cache.get_seq_length() == 60
    assert torch.equal(shared, stock)


def test_one_prefix_serves_prompts_that_leave_it_anywhere(model):
    prefix = ragged_prompts(64)["input_ids"][0]
    tails = [ragged_prompts(20, seed=seed)["input_ids"][0] for seed in (1, 2)]
    rows = [torch.cat([prefix, tails[0]]), torch.cat([prefix[:50], tails[1], tails[0][:14]])]
    prompt = {"input_ids": torch.stack(rows), "attention_mask": torch.ones(2, 84, dtype=torch.long)}
    stock = seeded(lambda: model.generate(**prompt, **SAMPLING))
    with fd.enabled(model):
        cache = fd.prefill(model, prefix[None])
        shared = seeded(lambda: model.generate(**prompt, **SAMPLING, past_key_values=cache))
        assert fd.explain(model).last_call.prefilled_tokens == 20 + 34
    assert torch.equal(shared, stock)


def test_a_conversation_goes_on_from_the_returned_cache(model):
    def turns(shared):
        first = seeded(lambda: model.generate(**PROMPT, **SAMPLING, return_dict_in_generate=True))
        more = torch.cat([first.sequences, ragged_prompts(7, seed=4)["input_ids"].repeat(4, 1)], 1)
        cache = {"past_key_values": first.past_key_values} if shared else {}
        arguments = SAMPLING | {"num_return_sequences": 1}
        return seeded(lambda: model.generate(more, attention_mask=torch.ones_like(more), **arguments, **cache))

    stock = turns(False)
    with fd.enabled(model):
        assert torch.equal(turns(True), stock)
        assert fd.explain(model).last_call.prefilled_tokens == 4 * 8  # the last token drawn was never fed


def test_a_conversation_from_a_cache_that_needed_no_prefill(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        arguments = SAMPLING | {"past_key_values": cache, "return_dict_in_generate": True}
        first = seeded(lambda: model.generate(**PROMPT, **arguments))
        more = torch.cat([first.sequences, ragged_prompts(7, seed=4)["input_ids"].repeat(4, 1)], 1)
        arguments = SAMPLING | {"num_return_sequences": 2}
        shared = seeded(lambda: model.generate(more, **arguments, past_key_values=first.past_key_values))
    assert torch.equal(shared, seeded(lambda: model.generate(more, **arguments)))


def test_ragged_prompts_prefilled_together(model):
    prompts = ragged_prompts(70, 90, 55)
    stock = seeded(lambda: model.generate(**prompts, **SAMPLING))
    with fd.enabled(model):
        cache = fd.prefill(model, prompts)
        assert (cache.rows, cache.nbytes.stored < cache.nbytes.stock) == (3, True)
        assert torch.equal(seeded(lambda: model.generate(**prompts, **SAMPLING, past_key_values=cache)), stock)


def test_a_cache_of_another_text_is_an_error(model):
    with fd.enabled(model):
        cache = fd.prefill(model, ragged_prompts(40, seed=8)["input_ids"])
        with pytest.raises(ValueError, match="does not begin with tokens of the cache"):
            model.generate(**PROMPT, **SAMPLING, past_key_values=cache)


def test_beams_with_a_shared_cache_are_an_error(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        with pytest.raises(ValueError, match="cannot use a SharedContextCache: generation mode 'beam_search'"):
            model.generate(**PROMPT, num_beams=2, past_key_values=cache)


def test_a_shared_cache_outside_an_enabled_model_is_an_error(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
    with pytest.raises(AttributeError, match=r"call the model itself .* after hf_fastdecode.enable"):
        model(PROMPT["input_ids"][:, :1], past_key_values=cache)


def test_prefill_refuses_what_is_no_prompt(model):
    with pytest.raises(ValueError, match=r"call hf_fastdecode.enable\(model\) first"):
        fd.prefill(model, PROMPT)
    with fd.enabled(model):
        with pytest.raises(ValueError, match=r"\[prompts, length\]"):
            fd.prefill(model, PROMPT["input_ids"][0])
        for inputs in ({"ids": PROMPT["input_ids"]}, "text", PROMPT["input_ids"].float()):
            with pytest.raises(ValueError, match="tokenizer"):
                fd.prefill(model, inputs)
        with pytest.raises(ValueError, match="padding_side='left'"):
            fd.prefill(model, {"input_ids": PROMPT["input_ids"], "attention_mask": PROMPT["attention_mask"] * 0})


def test_a_loop_of_the_users_own(model):
    """The cache works in direct forward passes too: greedy decoding by hand equals stock."""
    n, t = 3, 8
    stock = model.generate(**PROMPT, max_new_tokens=t, do_sample=False)[0, 80:]
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT["input_ids"][:, :-1])
        cache.batch_repeat_interleave(n)
        token, drawn = PROMPT["input_ids"][:, -1:].repeat(n, 1), []
        for step in range(t):
            position = torch.full((n, 1), 79 + step)
            token = model(token, past_key_values=cache, position_ids=position).logits[:, -1:].argmax(-1)
            drawn.append(token)
    assert torch.equal(torch.cat(drawn, 1), stock.expand(n, t))
