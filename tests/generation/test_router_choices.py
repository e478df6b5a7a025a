"""The experts that rows choose in `generate` (``output_router_choices=True``)."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.fused import experts
from hf_fastdecode.generation.routing.routers import Collected, routers_of, visiting

from ..tiny_models import ragged_prompts, tiny_model
from .launches import fuse_on_the_cpu
from .routing_models import CALL, FAMILIES, PROMPTS, SAMPLES, WIDTH, chosen_in, mixture, routers_in, rows_of, sampled
from .uncaptured import on_the_cpu


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("least", [1, 10**6], ids=["shared", "stock"])
def test_they_are_those_of_a_pass_over_the_rows(family, least):
    model = mixture(family)
    stock = sampled(model, output_router_choices=None)
    fd.enable(model, min_saved_tokens=least)
    output = sampled(model)
    assert fd.explain(model).last_call.path == ("shared" if least == 1 else "stock")
    assert torch.equal(output.sequences, stock.sequences)
    rows, choices = rows_of(output.sequences), output.router_choices
    expected = chosen_in(fd.disable(model), rows)
    assert len(choices) == len(expected)
    assert choices.experts == (8, 8)
    assert choices.stored.dtype == torch.uint8
    for row, (chosen, mask) in enumerate(zip(expected, rows["attention_mask"] > 0, strict=True)):
        assert torch.equal(choices.of_row(row).long().sort(-1)[0], chosen[mask][:-1].sort(-1)[0])
        assert choices.rows[row].ids.tolist() == rows["input_ids"][row][mask].tolist()


@pytest.mark.parametrize("least", [1, 10**6], ids=["shared", "stock"])
def test_passes_of_logits_processors_are_not_recorded(least):
    model = fd.enable(mixture(), min_saved_tokens=least)

    def passes(ids, scores):
        model(ids[:2, :5])
        model(ids[:, :5], use_cache=True, **{CACHE: DynamicCache()})
        model.generate(ids[:1, :5], max_new_tokens=1)
        return scores

    output = sampled(model, guidance_scale=1.5, logits_processor=[passes])
    rows = rows_of(output.sequences)
    expected = chosen_in(fd.disable(model), rows)
    for row, (chosen, mask) in enumerate(zip(expected, rows["attention_mask"] > 0, strict=True)):
        assert torch.equal(output.router_choices.of_row(row).long().sort(-1)[0], chosen[mask][:-1].sort(-1)[0])


def test_passes_that_overlap_in_threads_do_not_nest():
    model = mixture(num_hidden_layers=1)
    routers = routers_of(model)
    with ExitStack() as last:
        for _ in range(1000):
            current = ExitStack()
            current.enter_context(visiting(routers, Collected(routers)))
            last.close()
            last.push(current)
        model(**PROMPTS)
    assert vars(routers[0]).keys() == vars(mixture().model.layers[0].mlp.gate).keys()


def test_an_enabled_model_compiles_whole():
    model = fd.enable(tiny_model("llama-gqa"))
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    ids = torch.arange(8)[None]
    cache = StaticCache(model.config, max_cache_len=16)
    with torch.no_grad():
        found = compiled(input_ids=ids, **{CACHE: cache}).logits
        torch.testing.assert_close(found, model(ids).logits, rtol=0, atol=1e-5)


def test_shared_tokens_are_stored_once():
    """With many experts, of which no two tokens choose the same."""
    model = fd.enable(mixture(num_experts=300, num_local_experts=300, num_experts_per_tok=6), min_saved_tokens=1)
    choices = sampled(model).router_choices
    drawn = sum(len(row.ids) - 1 for row in choices.rows) - SAMPLES * (WIDTH + 60)
    assert len(choices.stored) == 40 + 30 + 20 + drawn
    assert choices.stored.dtype == torch.int16
    assert f"{choices.stored.nbytes:,} bytes" in repr(choices)


def test_rows_are_selected():
    model = fd.enable(mixture(), min_saved_tokens=1)
    choices = sampled(model).router_choices
    flags = torch.tensor([False, True, False, True, False, False])
    for rows in ([1, 3], torch.tensor([1, 3]), flags, slice(1, 4, 2)):
        part = choices[rows]
        assert part.stored is choices.stored
        assert [torch.equal(part.of_row(0), choices.of_row(1)), len(part)] == [True, 2]
    assert torch.equal(choices[5].of_row(0), choices.of_row(5))
    assert [len(choices[rows]) for rows in ([], ..., slice(9, 12))] == [0, 6, 0]
    assert [len(one) for one in choices] == [1] * 6
    wrong = 6, "a", 1.5
    for rows in (*wrong, None, True, [7], [True, False], torch.tensor([[0, 1]]), [[0], [1, 2]]):
        with pytest.raises(IndexError, match=r"choices of 6 rows have no .*; use numbers from -6 to 5, a slice"):
            choices[rows]
    for row in (*wrong, slice(2)):
        with pytest.raises(IndexError, match=r"choices of 6 rows have no row .*; use a number from -6 to 5"):
            choices.of_row(row)


def test_a_config_may_ask_and_prompts_are_not_taken_from_earlier_calls():
    model = fd.enable(mixture(), min_saved_tokens=1, reuse_prefix=True)
    expected = sampled(model).router_choices
    config = GenerationConfig(**{"pad_token_id": 0, **CALL})
    torch.manual_seed(0)
    found = model.generate(**PROMPTS, generation_config=config).router_choices
    assert torch.equal(found.of_row(2)[: WIDTH - 1], expected.of_row(2)[: WIDTH - 1])


def test_what_a_call_s_config_leaves_out_is_the_model_s():
    model = fd.enable(mixture(), min_saved_tokens=1)
    model.generation_config.output_router_choices = model.generation_config.return_dict_in_generate = True
    config = GenerationConfig(max_new_tokens=2)
    assert model.generate(**PROMPTS, generation_config=config).router_choices is not None
    assert model.generate(**PROMPTS, generation_config=config, output_router_choices=False).router_choices is None
    config.output_router_choices = False
    assert model.generate(PROMPTS["input_ids"], config).router_choices is None


def test_prompts_are_prefilled_in_chunks():
    model = mixture()
    expected = sampled(fd.enable(model, min_saved_tokens=1))
    found = sampled(fd.enable(model, min_saved_tokens=1, max_prefill_tokens=16))
    assert torch.equal(found.sequences, expected.sequences)
    for row in range(len(found.sequences)):
        assert torch.equal(found.router_choices.of_row(row), expected.router_choices.of_row(row))


@on_the_cpu
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_captured_steps_record_what_their_kernels_choose(family, monkeypatch, uncaptured):
    pytest.importorskip("triton")
    fuse_on_the_cpu(monkeypatch)
    seen, route = [], experts.route

    def counted(*arguments):
        seen.append(route(*arguments))
        return seen[-1]

    monkeypatch.setattr(experts, "route", counted)
    latents = {"kv_lora_rank": 64} if family == "deepseek_v2" else {"head_dim": 32}
    model = mixture(family, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, **latents).half()
    for router in routers_in(model) if family == "deepseek_v2" else ():
        router.float()  # as its checkpoints are loaded
    prompts, asked = ragged_prompts(20), CALL | {"max_new_tokens": 4, "eos_token_id": None, "num_return_sequences": 2}
    with fd.enabled(model, mode="graph", backend="triton", min_saved_tokens=1):
        choices = model.generate(**prompts, **asked).router_choices
        assert fd.explain(model).last_call.mode == "graph"
    assert len(seen) == 3
    for row in range(2):
        assert choices.of_row(row)[20:, 0].tolist() == [chosen[row].tolist() for _, _, chosen in seen]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"return_dict_in_generate": False}, "use return_dict_in_generate=True"),
        ({"num_beams": 3, "do_sample": False}, "runs beam search; use num_beams=1"),
        ({"use_cache": False}, "has no cache; leave out use_cache=False"),
        ({"custom_generate": lambda model, input_ids, **_: input_ids}, "leave custom_generate out"),
    ],
)
def test_what_is_not_recorded_is_refused(arguments, expected):
    with pytest.raises(ValueError, match=expected):
        sampled(fd.enable(mixture()), **arguments)


def test_given_caches_are_refused():
    model = fd.enable(mixture(), min_saved_tokens=1)
    for name, cache in ((CACHE, fd.prefill(model, PROMPTS)), ("past_key_values", DynamicCache())):
        with pytest.raises(ValueError, match=f"a cache that the call itself makes; leave {name} out"):
            sampled(model, **{name: cache})


def test_models_without_such_routers_are_refused():
    for kind in ("jetmoe", "llama4_text"):
        with pytest.raises(ValueError, match="LM has experts, but 0 supported routers"):
            sampled(fd.enable(mixture(kind)))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        sampled(fd.enable(tiny_model("llama-gqa")))


def test_layers_that_choose_unlike_numbers_are_refused():
    routers = [torch.nn.Identity(), torch.nn.Identity()]
    collected = Collected(routers)
    for layer, chosen in enumerate((2, 3)):
        collected(layer, lambda chosen=chosen: (torch.zeros(5, 8), torch.zeros(5, chosen, dtype=torch.long)))
    with pytest.raises(ValueError, match="unlike numbers of experts"):
        collected.of_layers()


def test_loops_over_shared_caches_that_are_not_ours_run_stock():
    model = fd.enable(mixture(), min_saved_tokens=1)
    output = sampled(model, output_hidden_states=True)
    assert "does not record the loop of" in fd.explain(model).last_call.reason
    assert len(output.router_choices) == len(output.sequences)
