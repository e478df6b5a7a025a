"""When sharing is worth its time, and what reports say where it is not."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation.prompts.gain import BATCH, COSTS, LOOPS, Estimate, HostCosts, Savings
from hf_fastdecode.generation.structure import Structure
from tools.host_costs import HEADER, KINDS, OTHER_LOOPS, line_of, loop_of_a_user
from tools.pages import DOCS

from ..architectures.classes import tiny_model_of
from ..image_inputs import prompts_with_images
from ..short_calls import ESTIMATED
from ..tiny_models import ragged_prompts, seeded
from .calls import as_in_stock
from .image_calls import SMALL


def prompts_that_begin_alike(name):
    """A model, and four prompts of it whose first 150 tokens are the same, behind an image if it takes one."""
    model = tiny_model_of(name)
    if "Conditional" not in name:
        return model, ragged_prompts(190, 180, 170, 185, shared=150)
    inputs = prompts_with_images(model, *((5, SMALL, 130 + rest) for rest in (40, 30, 20, 35)))
    ids, padding = inputs["input_ids"], (inputs["attention_mask"] == 0).sum(1)
    for row in range(1, 4):
        ids[row, padding[row] : padding[row] + 130] = ids[0, padding[0] : padding[0] + 130]
    return model, inputs


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen2_5_VLForConditionalGeneration"])
def test_prompts_that_begin_alike_and_share_nothing_are_told_so(name):
    """Further passes are worth a number of tokens, which the reason names; another bound makes them share."""
    model, prompts = prompts_that_begin_alike(name)
    call = {"max_new_tokens": 4, "do_sample": False}
    reason = as_in_stock(model, lambda: model.generate(**prompts, **call), "stock").reason
    assert "what prompts begin with would save" in reason
    assert "lower min_saved_tokens" in reason
    assert "next to each other" not in reason
    report = as_in_stock(model, lambda: model.generate(**prompts, **call), "shared", min_saved_tokens=64)
    assert report.prefilled_tokens < int(prompts["attention_mask"].sum()) - 300
    assert "would save" not in report.reason
    samples = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
    as_in_stock(model, lambda: model.generate(**prompts, **samples))
    as_in_stock(model, lambda: model.generate(**prompts, **samples), min_saved_tokens=64)


@pytest.fixture
def estimated(monkeypatch):
    """The estimate of time that calls on the CPU have, which other tests leave out."""
    monkeypatch.setattr(Estimate, "fewest", ESTIMATED)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


SAMPLES = {"do_sample": True, "num_return_sequences": 8, "max_new_tokens": 24, "min_new_tokens": 24}


@pytest.mark.parametrize(("kind", "name"), KINDS.items(), ids=KINDS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the estimate is of the CPU")
def test_short_calls_of_every_kind_run_stock_on_the_cpu(estimated, kind, name):
    """The reason names what would be saved, what would be enough, and the option, with which they share."""
    model = tiny_model_of(name)
    prompt = prompts_with_images(model, (24, SMALL, 24)) if kind == "images" else ragged_prompts(48)
    report = as_in_stock(model, lambda: model.generate(**prompt, **SAMPLES), "stock")
    numbers = re.match(
        r"sharing would save (\d+) tokens, and on the CPU a call like this gains from about (\d+) on; "
        "lower min_saved_tokens to share all the same: min_saved_tokens=64$",
        report.reason,
    )
    assert numbers, report.reason
    assert 64 < int(numbers[1]) < int(numbers[2])
    as_in_stock(model, lambda: model.generate(**prompt, **SAMPLES), "shared", min_saved_tokens=64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the estimate is of the CPU")
@pytest.mark.parametrize(
    "loop",
    [
        {"do_sample": False, "num_beams": 8},
        {"num_return_sequences": 8, "output_hidden_states": True, "return_dict_in_generate": True},
        {"num_return_sequences": 8, "custom_generate": loop_of_a_user},
    ],
    ids=["beams", "hidden-states", "users"],
)
def test_short_calls_of_other_loops_run_stock_on_the_cpu(estimated, model, loop):
    """They need more saved tokens than this package's loop; with the option they share."""
    prompt, tokens = ragged_prompts(48), {"do_sample": True, "max_new_tokens": 8, "min_new_tokens": 8} | loop

    def run():
        out = seeded(lambda: model.generate(**prompt, **tokens))
        return out if isinstance(out, torch.Tensor) else out.sequences

    stock = run()
    with fd.enabled(model):
        for _ in range(2):  # after all checks, and by shapes alone
            assert torch.equal(run(), stock)
            report = fd.explain(model).last_call
            assert report.path == "stock"
            assert "on the CPU a call like this gains from about" in report.reason
    with fd.enabled(model, min_saved_tokens=64):
        assert torch.equal(run(), stock)
        assert fd.explain(model).last_call.path == "shared"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the estimate is of the CPU")
def test_long_calls_share_on_the_cpu(estimated):
    """Few-shot prompts of the embedded model, and more so the more tokens a row draws of them."""
    model, _ = fd.load_embedded()
    prompt = {"input_ids": torch.randint(3, 500, (1, 600)), "num_return_sequences": 8, "do_sample": True}
    with fd.enabled(model):
        for count in (1, 2, 64):
            model.generate(**prompt, max_new_tokens=count)
            assert fd.explain(model).last_call.path == "shared", fd.explain(model).last_call.reason


def test_fewest_tokens_grow_with_steps_and_batches_of_nodes():
    costs, savings = HostCosts(1e-3, 3e-4), Savings(prefill=1e-5, step=1e-8)
    fewest = [savings.fewest(costs.of_call(steps, 4), steps) for steps in (0, 1, 10, 100)]
    assert fewest[0] == 100
    assert all(one < other for one, other in pairwise(fewest))
    for loop in OTHER_LOOPS:
        in_loop = costs + LOOPS[loop]
        assert in_loop.of_call(10, 4) == pytest.approx(costs.of_call(10, 4) + LOOPS[loop].of_call(10, 4))
        assert savings.fewest(in_loop.of_call(10, 4), 10) > fewest[2]
    assert costs.of_call(10, 4, 3) == pytest.approx(costs.of_call(10, 4) + 10 * 4 * 2 * BATCH)
    heavy = Savings(prefill=1e-2, step=1e-5)  # of half a billion weights
    assert heavy.fewest(costs.of_call(64, 24), 64) < 64


def test_a_token_saves_less_time_with_more_threads_and_of_fewer_experts(monkeypatch):
    model = tiny_model_of("MixtralForCausalLM")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = Savings.of(model, Structure(model))
    model.config.num_experts_per_tok = 1
    fewer = Savings.of(model, Structure(model))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    many = Savings.of(model, Structure(model))
    assert many.prefill < fewer.prefill < alone.prefill
    assert many.step == alone.step / 16


def test_a_model_that_does_not_name_its_embeddings_has_an_estimate(model, monkeypatch):
    """As those of other libraries."""

    def raises(self):
        raise NotImplementedError

    expected = Savings.of(model, Structure(model))
    monkeypatch.setattr(type(model), "get_input_embeddings", raises)
    assert Savings.of(model, Structure(model)).step == expected.step


def test_the_page_has_the_costs():
    lines = [line_of(kind, name, COSTS[kind]) for kind, name in KINDS.items()]
    lines += [line_of(f"{loop} loop, in addition", KINDS["keys and values"], LOOPS[loop]) for loop in OTHER_LOOPS]
    table = (DOCS / "limits.md").read_text().partition(HEADER)[2].splitlines(keepends=True)
    assert table[: len(lines)] == lines
