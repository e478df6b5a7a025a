"""Calls whose decoding loop is not ours: transformers' beam search and assisted decoding, and loops of the user's."""

import logging

import pytest
import torch
import transformers
from transformers import DynamicCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.shared import SharedContextCache

from ...tiny_models import ragged_prompts, seeded, tiny_model
from ..calls import PROMPT, as_in_stock, tokens_embedded

PROMPTS = ragged_prompts(80, 71)
BEAMS = {"num_beams": 4, "max_new_tokens": 6}
CALLS = {
    "beams": {**BEAMS, "num_return_sequences": 4},
    "beam-sample": {**BEAMS, "num_return_sequences": 2, "do_sample": True, "top_k": 0},
    "beams-with-scores": {**BEAMS, "return_dict_in_generate": True, "output_scores": True},
    "hidden-states": {
        "do_sample": True,
        "top_k": 0,
        "num_return_sequences": 3,
        "max_new_tokens": 6,
        "output_hidden_states": True,
        "return_dict_in_generate": True,
    },
}
EVERY = [(name, call) for name in ("llama-gqa", "gemma2") for call in CALLS]
EVERY += [(name, "beams-with-scores") for name in ("llama-mha", "qwen3", "gpt2", "mistral-window")]


def sequences(out):
    return out if isinstance(out, torch.Tensor) else out.sequences


def both(model, prompt, arguments, **options):
    """What stock and shared decoding return, the same tokens; how many are embedded in each, and the shared report."""
    with tokens_embedded(model) as by_stock:
        stock = seeded(lambda: model.generate(**prompt, **arguments))
    with fd.enabled(model, **options), tokens_embedded(model) as by_us:
        shared = seeded(lambda: model.generate(**prompt, **arguments))
        assert torch.equal(sequences(shared), sequences(stock))
        return stock, shared, by_stock, by_us, fd.explain(model).last_call


@pytest.mark.parametrize(("name", "call"), EVERY)
def test_tokens_are_those_of_stock(name, call):
    model = tiny_model(name)
    stock, shared, by_stock, by_us, report = both(model, PROMPTS, CALLS[call])
    assert report.path == "shared"
    assert by_us == [int(PROMPTS["attention_mask"].sum()), *by_stock[1:]]  # prompts once, then as many steps
    assert report.stored_tokens == int(PROMPTS["attention_mask"].sum())
    if call == "beams-with-scores":
        torch.testing.assert_close(shared.sequences_scores, stock.sequences_scores)
        assert isinstance(shared[CACHE], SharedContextCache)
    if call == "hidden-states":
        real = PROMPTS["attention_mask"].repeat_interleave(3, 0).bool()
        for own, theirs in zip(shared.hidden_states, stock.hidden_states, strict=True):
            for mine, other in zip(own, theirs, strict=True):
                seen = real if mine.shape[1] > 1 else slice(None)
                assert mine.shape == other.shape
                torch.testing.assert_close(mine[seen], other[seen], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("name", "draft"),
    [("llama-gqa", "model"), ("llama-gqa", "lookup"), ("gemma2", "model"), ("gemma2", "lookup"), ("gpt2", "model")],
)
def test_drafts_over_a_kept_prompt(name, draft):
    """One row shares nothing with others, but its prompt may have been prefilled before."""
    model = tiny_model(name)
    arguments = {"max_new_tokens": 10}
    arguments |= {"assistant_model": tiny_model(name, seed=3)} if draft == "model" else {"prompt_lookup_num_tokens": 3}
    try:
        stock = model.generate(**PROMPT, **arguments)
    except RuntimeError as error:  # windows of a draft in transformers 5.17
        pytest.skip(f"stock transformers fails itself: {error}")
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT["input_ids"])
        with tokens_embedded(model) as embedded:
            shared = model.generate(**PROMPT, **arguments, **{CACHE: cache})
        report = fd.explain(model).last_call
    assert torch.equal(shared, stock)
    assert report.path == "shared"
    assert embedded[0] < 20  # the last token and its draft
    assert cache.suffix_length == 0


@pytest.mark.skipif(not hasattr(transformers, "Gemma4AssistantConfig"), reason="transformers has no such drafter yet")
def test_a_drafter_that_reads_keys_and_values():
    """It gets them as stock has them: the call runs stock, or says why it cannot use the cache it was given."""
    model, arguments = tiny_model("gemma4_text"), {"max_new_tokens": 8, "do_sample": False}
    text = model.config.to_dict() | {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0}
    config = transformers.Gemma4AssistantConfig(text_config=type(model.config)(**text), backbone_hidden_size=64)
    drafter = transformers.Gemma4AssistantForCausalLM(config).eval()
    drafter.generation_config.num_assistant_tokens = 4
    arguments["assistant_model"] = drafter
    *_, report = both(model, PROMPT, arguments, reuse_prefix=True)
    assert (report.path, "its drafter reads each row's keys and values" in report.reason) == ("stock", True)
    with fd.enabled(model), pytest.raises(ValueError, match=r"drafter reads each row's keys and values .*; leave"):
        model.generate(**PROMPT, **arguments, **{CACHE: fd.prefill(model, PROMPT["input_ids"])})


def test_a_sampled_draft():
    model, arguments = tiny_model("llama-gqa"), {"max_new_tokens": 10, "do_sample": True, "top_k": 0}
    arguments["assistant_model"] = tiny_model("llama-gqa", seed=3)
    *_, report = both(model, PROMPT, arguments, reuse_prefix=True)
    assert report.path == "shared"


def test_beams_over_a_kept_prompt(model):
    with fd.enabled(model):
        stock = model.generate(**PROMPT, **BEAMS, use_cache=False)
        cache = fd.prefill(model, PROMPT["input_ids"][:, :60])
        with tokens_embedded(model) as embedded:
            assert torch.equal(model.generate(**PROMPT, **BEAMS, **{CACHE: cache}), stock)
        assert embedded[0] == 20
        other = ragged_prompts(40, seed=8)
        with pytest.raises(ValueError, match="does not begin with tokens of the cache"):
            model.generate(**other, **BEAMS, **{CACHE: cache})


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["the longer one first", "the shorter one first"])
def test_beams_over_kept_prompts_of_which_one_begins_the_other(model, order):
    """The last token of each is computed again, also where the cache holds it for the other."""
    whole, begins = ragged_prompts(80)["input_ids"][0], torch.zeros(80, dtype=torch.long)
    begins[20:] = whole[:60]
    ids = torch.stack([whole, begins])[order]
    prompts = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    with fd.enabled(model):
        cache = fd.prefill(model, prompts)
    stock, *_ = both(model, prompts, BEAMS)
    with fd.enabled(model):
        assert torch.equal(model.generate(**prompts, **BEAMS, **{CACHE: cache}), stock)
        assert fd.explain(model).last_call.path == "shared"


def test_a_returned_beam_cache_refuses_masks_that_hide_tokens(model):
    with fd.enabled(model), torch.no_grad():
        out = model.generate(**PROMPT, **BEAMS, return_dict_in_generate=True)
        cache, token = out[CACHE], torch.full((4, 1), 7)
        mask = torch.ones(4, cache.get_seq_length() + 1, dtype=torch.long)
        model(token, attention_mask=mask, **{CACHE: cache})
        mask = torch.cat([mask, mask[:, :1]], dim=1)
        mask[:, 40] = 0
        with pytest.raises(ValueError, match="attention_mask hides tokens"):
            model(token, attention_mask=mask, **{CACHE: cache})


def test_beams_permute_indices_and_move_no_storage(model):
    """Keys and values stay where they were written, and nodes are planned once."""
    places, forests = [], []
    update = SharedContextCache.reorder_cache

    def watched(cache, rows):
        update(cache, rows)
        places.append([part.data_ptr() for layer in cache.layers for part in layer.storage.suffix or ()])
        forests.append(id(cache.state.forest))

    with pytest.MonkeyPatch.context() as patch, fd.enabled(model):
        patch.setattr(SharedContextCache, "reorder_cache", watched)
        model.generate(**PROMPTS, **CALLS["beam-sample"])
    assert len(places) == 6
    assert all(place == places[1] for place in places[1:])
    assert len(set(forests)) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels take float32 only where they are interpreted")
def test_beams_by_the_kernels():
    model = tiny_model("llama-mqa", num_hidden_layers=1)
    arguments = {"num_beams": 2, "max_new_tokens": 5}
    *_, report = both(model, ragged_prompts(40), arguments, backend="triton", min_saved_tokens=1)
    assert "by triton" in report.layers[0]


def test_embedded_prompts(model):
    """As vision encoders and soft prompts make them; equal vectors are equal tokens."""
    embedded = model.get_input_embeddings()(PROMPTS["input_ids"]).detach()
    prompt = {"inputs_embeds": embedded, "attention_mask": PROMPTS["attention_mask"]}
    arguments = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 8}
    *_, report = both(model, prompt, arguments, reuse_prefix=True)
    assert report.prefilled_tokens == int(PROMPTS["attention_mask"].sum())
    alike = {name: part[:1].repeat(2, *[1] * (part.dim() - 1)) for name, part in prompt.items()}
    alike["inputs_embeds"][1, -1] = embedded[1, -1]
    *_, report = both(model, alike, arguments)
    assert report.prefilled_tokens == 81
    with fd.enabled(model), pytest.raises(ValueError, match="cannot be compared with inputs_embeds"):
        model.generate(**prompt, **arguments, **{CACHE: fd.prefill(model, PROMPTS)})


@pytest.mark.parametrize(("padded", "tasks"), [(True, None), (False, None), (True, torch.arange(2))])
def test_virtual_tokens_that_a_method_of_the_instance_puts_before_prompts(model, monkeypatch, padded, tasks):
    """PEFT's prompt tuning: no positions; with the cache's newer name the tokens come before each step too."""
    prepare = model.prepare_inputs_for_generation
    tokens = torch.randn(2, 4, model.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def with_virtual_tokens(input_ids, attention_mask=None, task_ids=None, **kwargs):
        mask = attention_mask  # None if nothing is hidden
        if mask is not None:
            mask = torch.cat((torch.ones(len(mask), 4, dtype=torch.long), mask), 1)
        inputs = prepare(input_ids, attention_mask=mask, **kwargs)
        inputs.pop("position_ids", None)
        assert (task_ids is None) == (tasks is None)
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            return inputs
        embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
        virtual = tokens[:1].expand(len(embedded), -1, -1) if task_ids is None else tokens[task_ids]
        return inputs | {"inputs_embeds": torch.cat((virtual, embedded), 1)}

    monkeypatch.setattr(model, "prepare_inputs_for_generation", with_virtual_tokens, raising=False)
    # Without this transformers refuses task_ids, which it does not know.
    monkeypatch.setattr(model, "_validate_model_kwargs", lambda arguments: None, raising=False)
    prompts = PROMPTS if padded else ragged_prompts(60, 60)
    call = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 9}
    if tasks is not None:
        call["task_ids"] = tasks
    report = as_in_stock(model, lambda: model.generate(**prompts, **call), min_saved_tokens=1)
    assert report.path == ("stock" if padded else "shared")


def greedy(model, input_ids, **arguments):
    """A loop as users write them, that asks for the logits of all tokens."""
    cache, fed = arguments[CACHE], input_ids
    for _ in range(6):
        logits = model(fed, **{CACHE: cache}, attention_mask=arguments.get("attention_mask")).logits
        assert logits.shape[:2] == fed.shape
        fed = logits[:, -1:].argmax(-1)
        input_ids = torch.cat([input_ids, fed], dim=1)
        if arguments.get("attention_mask") is not None:
            ones = arguments["attention_mask"].new_ones(len(fed), 1)
            arguments["attention_mask"] = torch.cat([arguments["attention_mask"], ones], dim=1)
    return input_ids


def test_a_loop_of_the_users(model):
    arguments = {"custom_generate": greedy, "num_return_sequences": 1, "max_new_tokens": 6}
    alike = {name: part.repeat(2, 1) for name, part in PROMPT.items()}
    _, _, by_stock, by_us, report = both(model, alike, arguments)
    assert report.path == "shared"
    assert by_us == [80, *by_stock[1:]]
    assert "custom_generate" in report.sampler_reason


def test_a_loop_that_runs_no_model(model):
    with fd.enabled(model):
        out = model.generate(**PROMPT, custom_generate=lambda model, input_ids, **_: input_ids + 1, max_new_tokens=4)
        assert torch.equal(out, PROMPT["input_ids"] + 1)
        assert fd.explain(model).last_call.path == "stock"
        assert "custom_generate has not called the model" in fd.explain(model).last_call.reason
        assert model.generate(PROMPT["input_ids"], *[None] * 10, max_new_tokens=4).shape == (1, 84)


def test_a_loop_goes_on_with_the_cache_it_was_given_where_nothing_is_shared(model):
    def loop(model, input_ids, **arguments):
        token, cache = input_ids, arguments[CACHE]
        for _ in range(3):
            token = model(token, **{CACHE: cache}).logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, token], 1)
        assert cache.get_seq_length() == 82
        return input_ids

    as_in_stock(model, lambda: model.generate(PROMPT["input_ids"], custom_generate=loop), "stock")


def test_a_loop_that_reads_keys_is_told_what_to_do(model):
    def reads(model, input_ids, **arguments):
        model(input_ids, **{CACHE: arguments[CACHE]})
        return arguments[CACHE].layers[0].keys

    alike = {name: part.repeat(2, 1) for name, part in PROMPT.items()}
    with fd.enabled(model):
        with pytest.raises(AttributeError, match=rf"pass {CACHE}=transformers.DynamicCache\(\)"):
            model.generate(**alike, custom_generate=reads, max_new_tokens=4)
        keys = model.generate(**alike, custom_generate=reads, max_new_tokens=4, **{CACHE: DynamicCache()})
    assert keys.shape[2] == 80


def test_a_model_that_cannot_share_goes_on_with_transformers_cache(model, monkeypatch):
    """Whether attention can be shared shows in the pass itself."""
    monkeypatch.setattr(model.model.layers[1].self_attn, "is_causal", False)
    _, _, by_stock, by_us, report = both(model, PROMPTS, CALLS["beams"])
    assert report.path == "stock"
    assert "is_causal=False" in report.reason
    assert by_us[-len(by_stock) :] == by_stock


def test_options_that_another_loop_does_not_have_are_told(model, caplog):
    with caplog.at_level(logging.WARNING, logger="hf_fastdecode"), fd.enabled(model, sampler="fast"):
        model.generate(**PROMPT, **BEAMS)
        reason = fd.explain(model).last_call.mode_reason
    assert [record.message for record in caplog.records if record.name == "hf_fastdecode"] == [
        "sampler='fast' not used: generation mode 'beam_search' uses another decoding loop"
    ]
    assert reason == "the model must be on one CUDA device, got cpu"


def test_a_forced_mode_holds_for_other_loops(model):
    with fd.enabled(model, mode="graph"), pytest.raises(ValueError, match="cannot run: the model must be on one CUDA"):
        model.generate(**PROMPT, **BEAMS)


def test_processes_that_must_keep_step(model):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        stock, shared, *_, report = both(model, PROMPTS, {**BEAMS, "synced_gpus": True})
    finally:
        torch.distributed.destroy_process_group()
    assert report.path == "stock"
    assert "synced_gpus=True" in report.reason
    assert torch.equal(shared, stock)


def test_prompts_in_chunks(model):
    _, _, _, by_us, report = both(model, PROMPTS, {**BEAMS, "prefill_chunk_size": 32})
    assert report.path == "shared"
    assert max(by_us) == 32


def test_a_first_draft_is_verified_in_one_pass(model):
    call = {"prefill_chunk_size": 8, "prompt_lookup_num_tokens": 2, "max_new_tokens": 5}
    repeating = PROMPT["input_ids"][:, :20].repeat(1, 3)
    *_, by_us, report = both(model, {"input_ids": repeating, "attention_mask": torch.ones_like(repeating)}, call)
    assert report.path == "stock"
    assert by_us[0] == 62
