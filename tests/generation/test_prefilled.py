"""Kept caches: prefilled once, or returned by a call, and used by later calls."""

import copy
import logging
import pickle

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..tiny_models import ragged_prompts, seeded, tiny_model
from .calls import PROMPT, SAMPLING


def drawn(model, prompt=PROMPT, cache=None, **more):
    """Samples of prompts, from one seed, with a cache if there is one."""
    given = more if cache is None else more | {CACHE: cache}
    return seeded(lambda: model.generate(**prompt, **SAMPLING | given))


def test_a_prefilled_cache_serves_many_calls(model):
    stock = drawn(model)
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        before = (cache.nbytes, repr(cache))
        for _ in range(3):
            assert torch.equal(drawn(model, cache=cache), stock)
            assert fd.explain(model).last_call.prefilled_tokens == 0
        assert (cache.nbytes, repr(cache)) == before


def test_a_prefilled_prefix_is_extended(model):
    stock = drawn(model)
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT["input_ids"][:, :60])
        shared = drawn(model, cache=cache)
        assert fd.explain(model).last_call.prefilled_tokens == 20
        assert cache.rows == 1
        assert cache.get_seq_length() == 60
    assert torch.equal(shared, stock)


def test_of_a_cache_that_is_hardly_used_the_log_tells(model, caplog):
    ids = PROMPT["input_ids"]
    other = torch.cat([ids[:, :12], ids[:, 13:]], 1)
    with fd.enabled(model), caplog.at_level(logging.WARNING, logger="hf_fastdecode"):
        cache = fd.prefill(model, ids)
        model.generate(other[:, :20], **SAMPLING, **{CACHE: cache})
        assert not caplog.records
        stock = drawn(model, {"input_ids": other})
        assert torch.equal(drawn(model, {"input_ids": other}, cache), stock)
        assert "tokens of each prompt that were stored before: 12" in str(fd.explain(model).last_call.lines())
    assert [record.getMessage() for record in caplog.records] == [
        "prompt 0 begins with 12 of the 80 or more tokens of the given cache; the rest of it is prefilled"
    ]


def test_a_loop_that_asks_for_all_logits_is_told_what_that_costs(model, caplog):
    """Its prompt begins with all of the cache, which is not reused all the same."""

    def greedy(model, input_ids, *args, **kwargs):
        tokens, cache = input_ids, kwargs[CACHE]
        for _ in range(2):
            logits = model(tokens, **{CACHE: cache}).logits[:, -1:]
            tokens = logits.argmax(-1)
            input_ids = torch.cat([input_ids, tokens], dim=1)
        return input_ids

    ids = PROMPT["input_ids"]
    with fd.enabled(model):
        cache = fd.prefill(model, ids[:, :60])
        shared = model.generate(ids, custom_generate=greedy, max_new_tokens=2, **{CACHE: cache})
    assert torch.equal(shared, model.generate(ids, do_sample=False, max_new_tokens=2))
    (said,) = caplog.messages
    assert "60 tokens that the given cache holds are computed again; pass logits_to_keep=1" in said


def test_one_prefix_serves_prompts_that_leave_it_anywhere(model):
    prefix = ragged_prompts(64)["input_ids"][0]
    tails = [ragged_prompts(20, seed=seed)["input_ids"][0] for seed in (1, 2)]
    rows = [torch.cat([prefix, tails[0]]), torch.cat([prefix[:50], tails[1], tails[0][:14]])]
    prompt = {"input_ids": torch.stack(rows), "attention_mask": torch.ones(2, 84, dtype=torch.long)}
    stock = drawn(model, prompt)
    with fd.enabled(model):
        shared = drawn(model, prompt, fd.prefill(model, prefix[None]))
        assert fd.explain(model).last_call.prefilled_tokens == 20 + 34
    assert torch.equal(shared, stock)


def test_a_conversation_goes_on_from_the_returned_cache(model):
    def turns(shared):
        first = drawn(model, return_dict_in_generate=True)
        more = torch.cat([first.sequences, ragged_prompts(7, seed=4)["input_ids"].repeat(4, 1)], 1)
        prompt = {"input_ids": more, "attention_mask": torch.ones_like(more)}
        return drawn(model, prompt, first[CACHE] if shared else None, num_return_sequences=1)

    stock = turns(False)
    with fd.enabled(model):
        assert torch.equal(turns(True), stock)
        assert fd.explain(model).last_call.prefilled_tokens == 4 * 8  # the last token drawn was never fed


def test_a_conversation_from_a_cache_that_needed_no_prefill(model):
    with fd.enabled(model):
        first = drawn(model, cache=fd.prefill(model, PROMPT), return_dict_in_generate=True)
        more = {"input_ids": torch.cat([first.sequences, ragged_prompts(7, seed=4)["input_ids"].repeat(4, 1)], 1)}
        shared = drawn(model, more, first[CACHE], num_return_sequences=2)
    assert torch.equal(shared, drawn(model, more, num_return_sequences=2))


def unpadded(prompts):
    """The tokens of each row of a padded batch."""
    return [ids[mask.bool()] for ids, mask in zip(prompts["input_ids"], prompts["attention_mask"], strict=True)]


@pytest.mark.parametrize("form", ["tensors", "tuple", "lists", "both", "mapping", "padded lists", "int32"])
def test_prompts_of_unequal_length_in_a_list(model, form):
    prompts = ragged_prompts(70, 90, 55, shared=40)
    tensors = unpadded(prompts)
    given = {
        "tensors": tensors,
        "tuple": tuple(tensors),
        "lists": [row.tolist() for row in tensors],
        "both": [tensors[0], *(row.tolist() for row in tensors[1:])],
        "mapping": {"input_ids": [row.tolist() for row in tensors], "attention_mask": [[1] * len(r) for r in tensors]},
        "padded lists": {name: part.tolist() for name, part in prompts.items()},
        "int32": [row.int() for row in tensors],
    }[form]
    stock = drawn(model, prompts)
    with fd.enabled(model):
        cache = fd.prefill(model, given)
        assert (cache.rows, cache.nbytes.stored < cache.nbytes.stock) == (3, True)
        assert torch.equal(drawn(model, prompts, cache), stock)
        assert fd.explain(model).last_call.prefilled_tokens == 0
        assert repr(cache) == repr(fd.prefill(model, prompts))
    assert cache.node_tokens == 40 + 30 + 50 + 15
    assert cache.get_seq_length() == 90


def test_prompts_of_one_length_in_a_list_are_the_tensor(model):
    ids = ragged_prompts(50, 50, shared=33)["input_ids"]
    with fd.enabled(model):
        listed, whole = (fd.prefill(model, prompts) for prompts in (list(ids), ids))
    assert (listed.forest, listed.get_seq_length()) == (whole.forest, whole.get_seq_length())


def test_what_any_prompts_have_in_common_is_stored_once(model):
    """Prompts that share but are not neighbours: of two problems in turn, and one of them twice."""
    first, second = (unpadded(ragged_prompts(60, 70, 64, shared=40, seed=seed)) for seed in (1, 2))
    rows = [first[0], second[0], first[1], second[1], first[0], second[2]]
    with fd.enabled(model):
        cache = fd.prefill(model, rows)
        assert cache.node_tokens == (40 + 20 + 30) + (40 + 20 + 30 + 24)
        assert [cache.path_tokens(path).tolist() for path in cache.forest.paths] == [row.tolist() for row in rows]
        token = torch.arange(5, 5 + len(rows))[:, None]
        logits = model(token, **{CACHE: cache}).logits[:, -1]
    for row, own, found in zip(rows, token, logits, strict=True):
        expected = model(torch.cat([row, own])[None]).logits[0, -1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_prompts_share_in_the_order_given_where_sorting_stores_no_less(model):
    """Spans of consecutive rows then lie evenly in storage, and one call attends to all of them."""
    ids = ragged_prompts(*[80] * 6, shared=40)["input_ids"]
    with fd.enabled(model):
        cache = fd.prefill(model, ids)
    assert [len(level) for level in cache.forest.batches] == [1, 1]


def test_further_prompts_find_what_the_prefilled_ones_have_in_common(model):
    prompts = unpadded(ragged_prompts(70, 90, 55, 81, shared=40))
    others = [{"input_ids": prompt[None]} for prompt in prompts[2:]]
    expected = [drawn(model, prompt) for prompt in others]
    with fd.enabled(model):
        cache = fd.prefill(model, prompts[:2])
        for prompt, stock in zip(others, expected, strict=True):
            assert torch.equal(drawn(model, prompt, cache), stock)
            assert fd.explain(model).last_call.prefilled_tokens == prompt["input_ids"].shape[1] - 40


def test_a_cache_of_another_text_is_an_error(model):
    with fd.enabled(model):
        cache = fd.prefill(model, ragged_prompts(40, seed=8)["input_ids"])
        with pytest.raises(ValueError, match="does not begin with tokens of the cache"):
            drawn(model, cache=cache)


def test_a_shared_cache_outside_an_enabled_model_is_an_error(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
    with pytest.raises(ValueError, match=r"the LlamaForCausalLM that filled it is no longer enabled; call .*enable"):
        model(PROMPT["input_ids"][:, :1], **{CACHE: cache})
    with pytest.raises(AttributeError, match=r"call the model itself .* after hf_fastdecode.enable"):
        tiny_model("llama-gqa")(PROMPT["input_ids"][:, :1], **{CACHE: fd.SharedContextCache()})


def test_prefill_refuses_what_is_no_prompt(model):
    with pytest.raises(ValueError, match=r"call hf_fastdecode.enable\(model\) first"):
        fd.prefill(model, PROMPT)
    with fd.enabled(model):
        with pytest.raises(ValueError, match=r"\[prompts, length\]"):
            fd.prefill(model, PROMPT["input_ids"][0])
        for inputs in ({"ids": PROMPT["input_ids"]}, "text"):
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
            token = model(token, **{CACHE: cache}, position_ids=position).logits[:, -1:].argmax(-1)
            drawn.append(token)
    assert torch.equal(torch.cat(drawn, 1), stock.expand(n, t))


@pytest.mark.parametrize("change", ["sgd", "adamw", "load", "data"])
def test_a_cache_of_weights_that_have_changed_is_an_error(change):
    model = tiny_model("llama-gqa")
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        out = drawn(model, cache=cache, return_dict_in_generate=True)
        if change in ("sgd", "adamw"):
            model(PROMPT["input_ids"], labels=PROMPT["input_ids"]).loss.backward()
            weights = model.parameters()
            rule = torch.optim.SGD(weights, lr=0.1) if change == "sgd" else torch.optim.AdamW(weights, fused=True)
            rule.step()
        elif change == "load":
            model.load_state_dict({name: 2 * part for name, part in model.state_dict().items()})
        else:
            for parameter in model.parameters():
                parameter.data.mul_(2)
        kept = [(cache, PROMPT["input_ids"]), (out[CACHE], out.sequences[:1])]
        kept += [
            (copied(cache), PROMPT["input_ids"]) for copied in (copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)))
        ]
        for old, ids in kept:
            with pytest.raises(ValueError, match="the cache was made with other weights"):
                model.generate(ids, **SAMPLING, **{CACHE: old})
        fresh = drawn(model, cache=fd.prefill(model, PROMPT))
    assert torch.equal(fresh, drawn(model))


def test_a_cache_serves_a_copy_of_the_model(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            next(twin.parameters()).mul_(1)
        expected = drawn(model, cache=cache)
        for given in (cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert torch.equal(drawn(twin, cache=given), expected)


@pytest.mark.parametrize("other", [{"seed": 5}, {"attention_bias": True}], ids=str)
def test_a_cache_of_other_weights_is_an_error(model, other):
    other = tiny_model("llama-gqa", **other)
    with fd.enabled(model), fd.enabled(other):
        cache = fd.prefill(other, PROMPT)
        with pytest.raises(ValueError, match="made with other weights, of another model or before these changed"):
            drawn(model, cache=cache)


@pytest.mark.parametrize("changed", [False, True])
def test_a_cache_of_fewer_weights_is_an_error(changed):
    """An adapter of another dtype was added after the cache was made, and other weights may have changed."""
    model = tiny_model("llama-gqa")
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        with torch.no_grad():
            if changed:
                for weight in model.parameters():
                    weight.mul_(2)
        model.model.layers[0].mlp.adapter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match="made with other weights"):
            drawn(model, cache=cache)


def test_weights_of_any_stride_are_known():
    model = tiny_model("llama-gqa")
    model.scale = torch.nn.Parameter(torch.arange(10.0)[::10])
    with fd.enabled(model):
        drawn(model, cache=fd.prefill(model, PROMPT))


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids", "pixel_values"])
def test_prefill_refuses_what_it_would_ignore(model, name):
    with fd.enabled(model):
        assert fd.prefill(model, PROMPT | {name: None}).rows == 1
        with pytest.raises(ValueError, match=f"takes input_ids and attention_mask, got '{name}' too; leave it out"):
            fd.prefill(model, PROMPT | {name: torch.ones(1, 80, dtype=torch.long)})


def test_a_report_is_of_its_own_call(model):
    """A cache allocated at the address of the call's does not write to its report."""
    with fd.enabled(model), torch.no_grad():
        model.generate(**PROMPT, **SAMPLING)
        before = str(fd.explain(model).last_call)
        for _ in range(12):
            cache = fd.prefill(model, PROMPT["input_ids"][:, :9])
            model(torch.full((1, 9), 5), **{CACHE: cache})
            del cache
        assert str(fd.explain(model).last_call) == before
        assert str(pickle.loads(pickle.dumps(fd.explain(model).last_call))) == before


def test_weights_that_are_no_numbers_are_still_the_same():
    model = tiny_model("llama-gqa")
    with fd.enabled(model), torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.nan
        drawn(model, cache=fd.prefill(model, PROMPT))
        assert fd.explain(model).last_call.path == "shared"


LIMITED = {
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("kind", LIMITED)
def test_prefill_refuses_prompts_that_no_call_could_go_on_from(kind):
    """Where rotary frequencies change with the text length, keys stored beyond it would have other frequencies."""
    model = tiny_model("llama-gqa", **LIMITED[kind], max_position_embeddings=64)
    arguments = {"do_sample": False, "max_new_tokens": 1}
    ids = ragged_prompts(63, seed=5)["input_ids"]
    padded = ragged_prompts(63, 63, seed=5)
    with fd.enabled(model):
        given = model.generate(ids, **arguments, **{CACHE: fd.prefill(model, ids)})
        for longer in (64, 65, 80):
            prompts = ragged_prompts(longer, 40)
            with pytest.raises(ValueError, match=rf"{longer} tokens.* beyond 64 tokens.* at most 63"):
                fd.prefill(model, prompts)
        wide = {name: torch.cat([torch.zeros(2, 9, dtype=torch.long), part], 1) for name, part in padded.items()}
        assert fd.prefill(model, wide).rows == 2  # padding is no text
    assert torch.equal(given, model.generate(ids, **arguments))


@pytest.mark.parametrize("kind", LIMITED)
def test_continuations_end_where_frequencies_change(kind):
    """Also of several prompts with padding, behind prompts or completions, and after a stock call beyond the limit."""
    model = tiny_model("llama-gqa", **LIMITED[kind], max_position_embeddings=64)
    prompts, longer = ragged_prompts(59, 50, 55, shared=30), ragged_prompts(70)
    greedy = {"do_sample": False, "max_new_tokens": 5}

    def continued(new, cache, inputs=prompts):
        call = greedy | {"max_new_tokens": new, "return_dict_in_generate": True}
        return model.generate(**inputs, **call, **{CACHE: cache})

    stock = model.generate(**prompts, **greedy)
    with fd.enabled(model, min_saved_tokens=1):
        model.generate(**longer, **greedy)
        kept = fd.prefill(model, prompts["input_ids"][:1, :30])
        with pytest.raises(ValueError, match="changes beyond 64 tokens, and max_length is 65"):
            continued(6, kept)
        assert torch.equal(continued(5, kept).sequences, stock)
        begun = continued(3, kept)
        mask = torch.cat([prompts["attention_mask"], torch.ones(3, 3, dtype=torch.long)], 1)
        behind = {"input_ids": begun.sequences, "attention_mask": mask}
        assert torch.equal(continued(2, begun[CACHE], behind).sequences, stock)
        with pytest.raises(ValueError, match="changes beyond 64 tokens"):
            continued(3, begun[CACHE], behind)


@pytest.mark.parametrize("between", [4, 80], ids=["short", "longer than the limit"])
@pytest.mark.parametrize("kind", LIMITED)
def test_frequencies_that_every_pass_writes_are_no_other_weights(kind, between):
    """transformers writes those of `inv_freq` in place, or replaces them, also where they stay as they are."""
    model = tiny_model("llama-gqa", **LIMITED[kind], max_position_embeddings=64)
    prompt, arguments = ragged_prompts(50, seed=5), {"do_sample": False, "max_new_tokens": 4}
    other = ragged_prompts(between, seed=6)
    expected = model.generate(**prompt, **arguments)
    with fd.enabled(model, reuse_prefix=True, min_saved_tokens=1):
        cache = fd.prefill(model, prompt["input_ids"][:, :40])
        for _ in range(2):
            assert torch.equal(model.generate(**prompt, **arguments, **{CACHE: cache}), expected)
            assert fd.explain(model).last_call.known_tokens == (40,)
            model.generate(**other, **arguments)
        for known in (None, (50,)):
            assert torch.equal(model.generate(**prompt, **arguments), expected)
            assert fd.explain(model).last_call.known_tokens == known
            model.generate(**other, **arguments)


@pytest.mark.parametrize("read", [list, iter, lambda cache: [*cache], lambda cache: dict(enumerate(cache))])
def test_who_iterates_over_a_returned_cache_is_told_what_to_do(model, read):
    """transformers' caches give the keys and values of each layer."""
    with fd.enabled(model):
        out = drawn(model, return_dict_in_generate=True)
    assert isinstance(out[CACHE], fd.SharedContextCache)
    with pytest.raises(
        TypeError, match=rf"no 'keys' tensor: .* pass {CACHE}=transformers.DynamicCache\(\) to generate"
    ):
        read(out[CACHE])
