"""A cache that the user keeps: prefilled once, or returned by a call, and used by others."""

import copy
import logging
import pickle

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation.joined import JoinedWeights

from ..tiny_models import ragged_prompts, seeded, tiny_model
from .calls import PROMPT, SAMPLING


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


def test_of_a_cache_that_is_hardly_used_the_log_tells(model, caplog):
    ids = PROMPT["input_ids"]
    other = torch.cat([ids[:, :12], ids[:, 13:]], 1)
    with fd.enabled(model), caplog.at_level(logging.WARNING, logger="hf_fastdecode"):
        cache = fd.prefill(model, ids)
        model.generate(other[:, :20], **SAMPLING, past_key_values=cache)
        assert not caplog.records
        stock = seeded(lambda: model.generate(other, **SAMPLING, past_key_values=None))
        assert torch.equal(seeded(lambda: model.generate(other, **SAMPLING, past_key_values=cache)), stock)
        assert "tokens of each prompt that the given cache held: 12" in str(fd.explain(model))
    assert [record.getMessage() for record in caplog.records] == [
        "prompt 0 begins with 12 of the 80 or more tokens of the given cache; the rest of it is prefilled"
    ]


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
            token = model(token, past_key_values=cache, position_ids=position).logits[:, -1:].argmax(-1)
            drawn.append(token)
    assert torch.equal(torch.cat(drawn, 1), stock.expand(n, t))


@pytest.mark.parametrize("change", ["sgd", "adamw", "load", "data"])
def test_a_cache_of_weights_that_have_changed_is_an_error(change):
    model = tiny_model("llama-gqa")
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        out = model.generate(**PROMPT, **SAMPLING, past_key_values=cache, return_dict_in_generate=True)
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
        kept = [(cache, PROMPT["input_ids"]), (out.past_key_values, out.sequences[:1])]
        kept += [
            (copied(cache), PROMPT["input_ids"]) for copied in (copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)))
        ]
        for old, ids in kept:
            with pytest.raises(ValueError, match="the cache was made with other weights"):
                model.generate(ids, **SAMPLING, past_key_values=old)
        fresh = seeded(lambda: model.generate(**PROMPT, **SAMPLING, past_key_values=fd.prefill(model, PROMPT)))
    assert torch.equal(fresh, seeded(lambda: model.generate(**PROMPT, **SAMPLING)))


def test_a_cache_serves_a_copy_of_the_model(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            next(twin.parameters()).mul_(1)
        expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING, past_key_values=cache))
        for given in (cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert torch.equal(
                seeded(lambda given=given: twin.generate(**PROMPT, **SAMPLING, past_key_values=given)), expected
            )


@pytest.mark.parametrize("other", [{"seed": 5}, {"attention_bias": True}], ids=str)
def test_a_cache_of_other_weights_is_an_error(model, other):
    other = tiny_model("llama-gqa", **other)
    with fd.enabled(model), fd.enabled(other):
        cache = fd.prefill(other, PROMPT)
        with pytest.raises(ValueError, match="made with other weights, of another model or before these changed"):
            model.generate(**PROMPT, **SAMPLING, past_key_values=cache)


@pytest.mark.parametrize("changed", [False, True])
def test_a_cache_of_fewer_weights_is_an_error(changed):
    """An adapter of another dtype has been added since, and other weights may have changed."""
    model = tiny_model("llama-gqa")
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        with torch.no_grad():
            if changed:
                for weight in model.parameters():
                    weight.mul_(2)
        model.model.layers[0].mlp.adapter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match="made with other weights"):
            model.generate(**PROMPT, **SAMPLING, past_key_values=cache)


def test_weights_of_any_stride_are_known():
    model = tiny_model("llama-gqa")
    model.scale = torch.nn.Parameter(torch.arange(10.0)[::10])
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING, past_key_values=fd.prefill(model, PROMPT))


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids", "pixel_values"])
def test_prefill_refuses_what_it_would_ignore(model, name):
    with fd.enabled(model):
        assert fd.prefill(model, PROMPT | {name: None}).rows == 1
        with pytest.raises(ValueError, match=f"takes input_ids and attention_mask, got '{name}' too; leave it out"):
            fd.prefill(model, PROMPT | {name: torch.ones(1, 80, dtype=torch.long)})


def test_a_report_is_of_its_own_call(model):
    """Caches that come to lie where the call's was do not write to its report."""
    with fd.enabled(model), torch.no_grad():
        model.generate(**PROMPT, **SAMPLING)
        before = str(fd.explain(model).last_call)
        for _ in range(12):
            cache = fd.prefill(model, PROMPT["input_ids"][:, :9])
            model(torch.full((1, 9), 5), past_key_values=cache)
            del cache
        assert str(fd.explain(model).last_call) == before
        assert str(pickle.loads(pickle.dumps(fd.explain(model).last_call))) == before


def test_weights_that_are_no_numbers_are_still_the_same():
    model = tiny_model("llama-gqa")
    with fd.enabled(model), torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.nan
        model.generate(**PROMPT, **SAMPLING, past_key_values=fd.prefill(model, PROMPT))
        assert fd.explain(model).last_call.path == "shared"


def test_one_number_that_changes_is_noticed(model):
    """Whichever it is: versions are compared, not samples of values."""
    with fd.enabled(model):
        for index in range(0, 64, 7):
            cache = fd.prefill(model, PROMPT)
            with torch.no_grad():
                model.model.norm.weight[index] += 1
            with pytest.raises(ValueError, match="the cache was made with other weights"):
                model.generate(**PROMPT, **SAMPLING, past_key_values=cache)
            with torch.no_grad():
                model.model.norm.weight[index] -= 1


def test_a_replaced_tensor_is_noticed(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        weight, old = model.model.norm.weight, model.model.norm.weight.data
        weight.data = old.clone()
        with pytest.raises(ValueError, match="the cache was made with other weights"):
            model.generate(**PROMPT, **SAMPLING, past_key_values=cache)
        weight.data = old


def test_moved_weights_are_the_same(model):
    """Captured steps lay the weights of projections end to end, and `disable` moves them apart."""
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING, past_key_values=cache))
        weights = JoinedWeights()
        for change in (lambda: weights.join(model.model.layers), weights.separate):
            before = model.model.layers[0].self_attn.q_proj.weight.data_ptr()
            change()
            assert model.model.layers[0].self_attn.q_proj.weight.data_ptr() != before
            assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING, past_key_values=cache)), expected)
        weights.join(model.model.layers)
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[3, 5] += 1
        with pytest.raises(ValueError, match="the cache was made with other weights"):
            model.generate(**PROMPT, **SAMPLING, past_key_values=cache)


class Adapted(torch.nn.Linear):
    """A linear layer with an adapter that is switched by the attributes of PEFT's layers."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self._disable_adapters, self._active_adapter, self.merged_adapters = False, ["a"], []
        self.scaling = {"a": 1.0, "b": 2.0}

    def forward(self, inputs):
        factor = 0.0 if self._disable_adapters else sum(self.scaling[name] for name in self._active_adapter)
        return super().forward(inputs) + factor * inputs[..., : self.out_features].sin()


@pytest.mark.parametrize(
    "switch",
    [
        {"_disable_adapters": True},
        {"_active_adapter": ["b"]},
        {"merged_adapters": ["a"]},
        {"scaling": {"a": 0.5, "b": 2.0}},
    ],
    ids=lambda switch: next(iter(switch)),
)
def test_a_cache_of_other_adapters_is_an_error(switch):
    model = tiny_model()
    layer = model.model.layers[0].self_attn
    layer.v_proj = adapted = Adapted(layer.v_proj)
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        kept = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
        before = {name: getattr(adapted, name) for name in switch}
        vars(adapted).update(switch)
        for given in (cache, *kept):
            with pytest.raises(ValueError, match="made with other adapters, of another model or before these changed"):
                model.generate(**PROMPT, **SAMPLING, past_key_values=given)
        vars(adapted).update(before)
        assert model.generate(**PROMPT, **SAMPLING, past_key_values=cache).shape == (4, 96)
