"""A kept cache is of the weights and adapters that made it."""

import copy
import pickle

import pytest
import torch
from torch.nn.utils import prune

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..tiny_models import seeded, tiny_model
from .calls import PROMPT, SAMPLING


def test_one_number_that_changes_is_noticed(model):
    """Whichever it is: versions are compared, not samples of values."""
    with fd.enabled(model):
        for index in range(0, 64, 7):
            cache = fd.prefill(model, PROMPT)
            with torch.no_grad():
                model.model.norm.weight[index] += 1
            with pytest.raises(ValueError, match="the cache was made with other weights"):
                model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})
            with torch.no_grad():
                model.model.norm.weight[index] -= 1


def test_a_replaced_tensor_is_noticed(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        weight, old = model.model.norm.weight, model.model.norm.weight.data
        weight.data = old.clone()
        with pytest.raises(ValueError, match="the cache was made with other weights"):
            model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})
        weight.data = old


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
    adapted = model.model.layers[0].self_attn.v_proj  # with the attributes of PEFT's layers
    vars(adapted).update(
        _disable_adapters=False, _active_adapter=["a"], merged_adapters=[], scaling={"a": 1.0, "b": 2.0}
    )
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        kept = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
        before = {name: getattr(adapted, name) for name in switch}
        vars(adapted).update(switch)
        for given in (cache, *kept):
            with pytest.raises(ValueError, match="made with other adapters, of another model or before these changed"):
                model.generate(**PROMPT, **SAMPLING, **{CACHE: given})
        vars(adapted).update(before)
        assert model.generate(**PROMPT, **SAMPLING, **{CACHE: cache}).shape == (4, 88)


def replaced_parameter(model):
    weight = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    weight[5:30, 3:40] *= -3  # between the numbers that are remembered
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight)


def assigned(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["model.embed_tokens.weight"][30:45] *= -1
    model.load_state_dict(state, assign=True)


def pruned(model):
    torch.manual_seed(0)
    prune.random_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.6)


def scaled_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def swapped_module(model):
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()


def changed_number(model):
    model.model.norm.variance_epsilon = 50.0


@pytest.mark.parametrize(
    "change", [replaced_parameter, assigned, pruned, scaled_buffer, swapped_module, changed_number]
)
@pytest.mark.parametrize("reuse", [False, True], ids=["kept", "reused"])
def test_what_decides_the_keys_is_noticed(change, reuse):
    model = tiny_model()
    with fd.enabled(model, reuse_prefix=reuse), torch.no_grad():
        if reuse:
            model.generate(**PROMPT, **SAMPLING)
        else:
            cache = fd.prefill(model, PROMPT)
        change(model)
        if reuse:
            shared = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
            assert fd.explain(model).last_call.known_tokens is None
        else:
            with pytest.raises(ValueError, match=r"the cache was made with other (weights|modules)"):
                model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})
    if reuse:
        assert torch.equal(shared, seeded(lambda: model.generate(**PROMPT, **SAMPLING)))


def test_training_mode_and_checkpointing_change_no_keys(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        model.train()
        assert model.generate(**PROMPT, **SAMPLING, **{CACHE: cache}).shape == (4, 88)
        model.eval()


def test_parameters_can_still_be_swapped():
    model = tiny_model()
    with fd.enabled(model, reuse_prefix=True):
        model.generate(**PROMPT, **SAMPLING, **{CACHE: fd.prefill(model, PROMPT)})
    other = torch.nn.Parameter(torch.zeros(64))
    torch.utils.swap_tensors(model.model.norm.weight, other)
    assert not model.model.norm.weight.any()


def embedded(model):
    return {"inputs_embeds": model.get_input_embeddings()(PROMPT["input_ids"]).detach()}


LOOPS = {
    "sampling": {},
    "beams": {"do_sample": False, "num_beams": 4},
    "hidden states": {"output_hidden_states": True},
    "prompt lookup": {"do_sample": False, "num_return_sequences": 1, "prompt_lookup_num_tokens": 3},
    "embeddings": {"inputs_embeds": None},
}


@pytest.mark.parametrize("loop", LOOPS)
def test_caches_of_all_loops_are_of_the_weights_that_filled_them(loop):
    model, call = tiny_model(), SAMPLING | LOOPS[loop] | {"return_dict_in_generate": True, "max_new_tokens": 6}
    prompt = embedded(model) | {"attention_mask": PROMPT["attention_mask"]} if "inputs_embeds" in call else PROMPT
    with fd.enabled(model, reuse_prefix=True):
        cache = model.generate(**{**call, **prompt})[CACHE]
        assert isinstance(cache, fd.SharedContextCache)
        if loop != "embeddings":  # whose ids are not known
            assert model.generate(**PROMPT, **SAMPLING, **{CACHE: cache}).shape == (4, 88)
        refused_after_a_step(model, cache, cache.fork(), copy.deepcopy(cache))


def test_caches_that_loops_of_the_user_keep():
    """Though `generate` returns none; those that it makes itself too."""
    model, kept = tiny_model(), []

    def loop(model, input_ids, **arguments):
        kept.extend([arguments[CACHE], fd.SharedContextCache()])
        for cache in kept:
            model(input_ids, **{CACHE: cache})
        return input_ids

    with fd.enabled(model), torch.no_grad():
        model.generate(**PROMPT, **SAMPLING, custom_generate=loop)
        assert isinstance(kept[0], fd.SharedContextCache)
        assert model.generate(**PROMPT, **SAMPLING, **{CACHE: kept[1]}).shape == (4, 88)
        refused_after_a_step(model, *kept)


def test_caches_that_processors_fill():
    model, cache = tiny_model(), fd.SharedContextCache()

    def fill(ids, scores):
        if cache.is_empty:
            model(PROMPT["input_ids"], **{CACHE: cache})
        return scores

    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING, logits_processor=[fill])
        refused_after_a_step(model, cache)


def test_caches_of_direct_passes():
    model, emptied = tiny_model(), fd.SharedContextCache()
    with fd.enabled(model), torch.no_grad():
        model(PROMPT["input_ids"], **{CACHE: (cache := fd.SharedContextCache())})
        model(PROMPT["input_ids"], **{CACHE: emptied})
        refused_after_a_step(model, cache)
        emptied.crop(-emptied.get_seq_length())
        model(PROMPT["input_ids"], **{CACHE: emptied})
        assert model.generate(**PROMPT, **SAMPLING, **{CACHE: emptied}).shape == (4, 88)


@pytest.mark.parametrize("begins", ["prefill", "pass", "generate"])
@pytest.mark.parametrize("in_loop", [False, True])
def test_a_cache_that_two_states_of_the_weights_filled_is_of_neither(begins, in_loop):
    """Also once the first ones are back."""
    model, ids = tiny_model(), PROMPT["input_ids"]
    scaling = {"a": 1.0}
    vars(model.model.layers[0].self_attn.v_proj).update(_active_adapter=["a"], scaling=scaling)

    def passes(model, input_ids, **arguments):
        cache = fd.SharedContextCache() if begins == "pass" else kept
        if begins == "pass":
            model(ids, **{CACHE: cache})
        scaling["a"] = 2.0
        model(ids[:, -1:], **{CACHE: cache})
        scaling["a"] = 1.0
        made.append(cache)
        return input_ids

    with fd.enabled(model), torch.no_grad():
        made, kept = [], fd.prefill(model, PROMPT)
        if begins == "generate":
            kept = model.generate(**PROMPT, **SAMPLING, return_dict_in_generate=True)[CACHE]
            kept.select_rows([0])
        if in_loop:
            model.generate(**PROMPT, **SAMPLING, custom_generate=passes)
        else:
            passes(model, ids)
        for cache in (*made, *map(copy.deepcopy, made)):
            with pytest.raises(ValueError, match="the cache was made with other adapters"):
                model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})


def refused_after_a_step(model, *caches):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    for cache in caches:
        with pytest.raises(ValueError, match="the cache was made with other weights"):
            model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})
