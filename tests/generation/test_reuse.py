"""`enable(model, reuse_prefix=True)`: prompts that come one at a time prefill only what is new."""

import copy

import accelerate
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.layout import ModelLayout
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.model_state import state_of

from ..tiny_models import ragged_prompts, seeded, tiny_model

SAMPLING = {"do_sample": True, "top_k": 0, "max_new_tokens": 9}
BYTES = 2 * 2 * 2 * 16 * 4  # of a token: keys and values, layers, KV heads, head_dim, fp32


def prompts(count, *, length=97, shared=70, seed=0):
    """Prompts ``[1, length]`` that begin alike, one by one."""
    ids = ragged_prompts(*[length] * count, shared=shared, seed=seed)["input_ids"]
    return [{"input_ids": row[None], "attention_mask": torch.ones(1, length, dtype=torch.long)} for row in ids]


def run(model, prompt, **arguments):
    return seeded(lambda: model.generate(**prompt, **SAMPLING, **arguments))


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gemma2", "mistral-window"])
def test_only_what_is_new_is_prefilled(name):
    model = tiny_model(name)
    expected = [run(model, prompt) for prompt in prompts(4)]
    with fd.enabled(model, reuse_prefix=True):
        for index, (prompt, tokens) in enumerate(zip(prompts(4), expected, strict=True)):
            assert torch.equal(run(model, prompt), tokens)
            call = fd.explain(model).last_call
            assert call.path == "shared", call.reason
            assert call.prefilled_tokens == (97 if index == 0 else 27)
            assert call.known_tokens == (None if index == 0 else (70,))
        assert torch.equal(run(model, prompts(4)[2]), expected[2])  # its last token alone runs again
        assert fd.explain(model).last_call.prefilled_tokens == 0
        assert "stored before: 97" in str(fd.explain(model).last_call.lines())


def test_several_prompts_and_samples(model):
    first, second = ragged_prompts(80, 66, 91, shared=50), ragged_prompts(90, 51, 77, shared=50)
    expected = [run(model, batch, num_return_sequences=3) for batch in (first, second)]
    with fd.enabled(model, reuse_prefix=True):
        assert torch.equal(run(model, first, num_return_sequences=3), expected[0])
        assert torch.equal(run(model, second, num_return_sequences=3), expected[1])
        assert fd.explain(model).last_call.prefilled_tokens == 10 + 1 + 27  # the first two begin with the same 80


def test_a_growing_prompt_has_few_nodes(model):
    ids = ragged_prompts(400)["input_ids"]
    with fd.enabled(model, reuse_prefix=True):
        for length in range(70, 400, 11):
            prompt = {"input_ids": ids[:, :length], "attention_mask": torch.ones(1, length, dtype=torch.long)}
            shared = run(model, prompt)
            assert fd.explain(model).last_call.prefilled_tokens == (70 if length == 70 else 11)
            assert len(fd.explain(model).last_call.layers[0].split("node(s)")) < 12
    assert torch.equal(shared, run(model, prompt))


def test_memory_is_bounded(model):
    bound = 250 * BYTES
    with fd.enabled(model, reuse_prefix=bound):
        for index, prompt in enumerate(prompts(12)):
            run(model, prompt)
            kept = fd.explain(model).last_call.kept_bytes
            assert kept == min(97 + 27 * index, 70 + 27 * 6) * BYTES <= bound
        assert f"kept for later calls: {kept:,}" in str(fd.explain(model).last_call.lines())
        run(model, prompts(1, length=300)[0])
        assert fd.explain(model).last_call.kept_bytes == 0  # one call alone is more
        run(model, prompts(1)[0])
        assert fd.explain(model).last_call.prefilled_tokens == 97


@pytest.mark.parametrize("change", ["weights", "adapter", "autocast", "copy", "off"])
def test_what_is_kept_is_of_this_model(change):
    model = tiny_model()
    model.model.layers[0].scaling = {"a": 1.0}
    first, second = prompts(2)
    fd.enable(model, reuse_prefix=True)
    run(model, first)
    if change == "weights":
        with torch.no_grad():
            model.model.norm.weight[17] += 1
    elif change == "adapter":
        model.model.layers[0].scaling = {"a": 2.0}
    elif change == "copy":
        model = copy.deepcopy(model)
    elif change == "off":
        fd.enable(model)
        fd.enable(model, reuse_prefix=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
        shared = run(model, second)
        assert fd.explain(model).last_call.prefilled_tokens == 97
        fd.disable(model)
    if change != "autocast":  # under which they agree but for rounding
        assert torch.equal(shared, run(model, second))


@pytest.mark.parametrize("loop", ["ours", "beams"])
def test_numbers_that_changed_behind_the_version_counters(loop):
    """The weights' samples are compared while what reuses the prefix is computed, which is then computed anew."""
    model = tiny_model()
    first, second = prompts(2)
    arguments = {"num_beams": 2} if loop == "beams" else {"num_return_sequences": 2}
    with fd.enabled(model, reuse_prefix=True):
        run(model, first, **arguments)
        model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.5)
        shared = run(model, second, **arguments)
        report = fd.explain(model).last_call
        assert (report.path, report.prefilled_tokens, report.known_tokens) == ("shared", 97, None)
        again = run(model, second, **arguments)  # the whole prompt is stored
        assert fd.explain(model).last_call.known_tokens is not None
    assert torch.equal(shared, run(model, second, **arguments))
    assert torch.equal(again, shared)


def test_numbers_that_changed_and_changed_back(model):
    """What a call kept meanwhile is of the other numbers, also where it found nothing to reuse."""
    first, _ = prompts(2)
    (second,) = prompts(1, seed=5)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with fd.enabled(model, reuse_prefix=True):
        run(model, first)
        for parameter in model.parameters():
            parameter.data.mul_(-1.3)
        run(model, second)
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        found = run(model, second)
        assert fd.explain(model).last_call.known_tokens is None
    assert torch.equal(found, run(model, second))


def test_a_window_that_changed():
    model = tiny_model("mistral-window")
    first, second = prompts(2)
    with fd.enabled(model, reuse_prefix=True):
        run(model, first)
        model.config.sliding_window = 8
        found = run(model, second)
        assert fd.explain(model).last_call.known_tokens is None
    assert torch.equal(found, run(model, second))


def test_a_forward_at_the_address_of_an_earlier_one(model):
    first, _ = prompts(2)
    forward = LlamaMLP.forward
    with fd.enabled(model, reuse_prefix=True):
        for factor in (3.0, -2.0, 5.0, -4.0, 0.5):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LlamaMLP, "forward", lambda self, x, by=factor: by * forward(self, x))
                run(model, first)
            report = fd.explain(model).last_call
            assert report.path == "stock" or report.known_tokens is None


def test_a_given_cache_goes_first(model):
    first, second = prompts(2)
    with fd.enabled(model, reuse_prefix=True):
        run(model, first)
        cache = fd.prefill(model, second["input_ids"][:, :90])
        run(model, second, **{CACHE: cache})
        assert fd.explain(model).last_call.known_tokens == (90,)


@pytest.mark.parametrize("given", [-1, 1.5, "yes", None])
def test_the_option_is_checked(model, given):
    with pytest.raises(ValueError, match=f"reuse_prefix must be True .*, False, or the most bytes .* got {given!r}"):
        fd.enable(model, reuse_prefix=given)


@pytest.mark.parametrize("given", [1, 2, BYTES - 1])
def test_bytes_that_hold_no_token_are_refused(model, given):
    expected = f"reuse_prefix={given} is a number of bytes, and one token of this LlamaForCausalLM takes {BYTES} bytes"
    with pytest.raises(ValueError, match=expected):
        fd.enable(model, reuse_prefix=given)
    fd.enable(model, reuse_prefix=BYTES)
    with pytest.raises(ValueError, match=expected):
        fd.enable(model, reuse_prefix=given)
    fd.disable(fd.enable(model, reuse_prefix=0))


def test_models_that_run_stock_may_be_enabled_with_any_room(model, monkeypatch):
    """As where tensor parallelism splits a head, of which `ModelLayout.of` raises."""

    def raises(*_):
        raise Unsupported("a head is split")

    monkeypatch.setattr(ModelLayout, "of", raises)
    with fd.enabled(model, reuse_prefix=BYTES):
        run(model, prompts(1)[0])


def test_the_report_of_a_repeated_prompt_is_true(model):
    """All its tokens were stored before, but for the last, which is computed again as the first step."""
    with fd.enabled(model, reuse_prefix=True):
        (prompt,) = prompts(1)
        run(model, prompt)
        first = str(fd.explain(model).last_call.lines())
        assert "tokens prefilled: 97 (stock: 97)" in first
        assert "shared (its prompts are kept for later calls)" in first
        run(model, prompt)
        report = fd.explain(model)
    assert report.last_call.prefilled_tokens == 0
    assert "97 of 97 prompt tokens were stored before" in report.last_call.reason
    assert "0 of 97" not in str(report)
    assert "the last token of each prompt, again, as the first step: 1" in str(report)


def test_nodes_of_a_given_cache_are_not_passed_on(model):
    """Which a direct pass may have filled at other positions, or with other weights."""
    prompt = prompts(1)[0]
    expected = run(model, prompt)
    with fd.enabled(model, reuse_prefix=True), torch.no_grad():
        cache = fd.SharedContextCache()
        model(prompt["input_ids"][:, :90], **{CACHE: cache}, position_ids=torch.arange(90)[None] * 3)
        run(model, prompt, **{CACHE: cache})
        assert torch.equal(run(model, prompt), expected)
        assert fd.explain(model).last_call.known_tokens is None


def test_prompts_that_repeat_are_kept_once(model):
    with fd.enabled(model, reuse_prefix=True):
        for _ in range(3):
            for prompt in prompts(2):
                run(model, prompt)
        assert len(state_of(model).prefix_store._kept) == 2
        for index in range(70):
            run(model, prompts(1, length=65 + index % 3, shared=0, seed=index)[0])
        assert len(state_of(model).prefix_store._kept) == 64


def test_without_memory_for_merging_the_call_goes_on(model, monkeypatch):
    ids = ragged_prompts(300)["input_ids"]

    def fail(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("hf_fastdecode.cache.storage.TokenStorage.copied", fail)
    with fd.enabled(model, reuse_prefix=True):
        for length in range(70, 300, 11):
            prompt = {"input_ids": ids[:, :length], "attention_mask": torch.ones(1, length, dtype=torch.long)}
            shared = run(model, prompt)
    assert torch.equal(shared, run(model, prompt))


def test_an_offloaded_model():
    model = tiny_model()
    expected = [run(model, prompt) for prompt in prompts(2)]
    accelerate.cpu_offload(model, execution_device="cpu")
    with fd.enabled(model, reuse_prefix=True):
        for prompt, tokens in zip(prompts(2), expected, strict=True):
            assert torch.equal(run(model, prompt), tokens)
        assert fd.explain(model).last_call.prefilled_tokens == 27


def advised(caplog):
    return [one.getMessage() for one in caplog.records if "`reuse_prefix=True` keeps prompts" in one.getMessage()]


@pytest.mark.parametrize("arguments", [{}, {"num_return_sequences": 3}, {"num_beams": 2}])
def test_the_third_call_that_begins_like_an_earlier_one_says_what_would_help(model, caplog, arguments):
    with fd.enabled(model):
        for number, prompt in enumerate(prompts(6)):
            run(model, prompt, **arguments)
            assert len(advised(caplog)) == (number >= 3)  # the first began like none
    assert advised(caplog) == [
        "3 calls had a prompt that begins like an earlier call's; hf_fastdecode.enable with `reuse_prefix=True` "
        "keeps prompts, so that later calls prefill new tokens only"
    ]


def test_short_prompts_are_not_told_to_turn_on_what_is_on(model, caplog):
    with fd.enabled(model, reuse_prefix=True):
        run(model, ragged_prompts(20))
    (said,) = caplog.messages
    assert "sharing would save 20 tokens, fewer than 64 (min_saved_tokens); prompts this short are not kept" in said


def test_calls_in_between_do_not_matter(model, caplog):
    others = [ragged_prompts(97, seed=seed) for seed in (5, 6, 7, 8)]
    with fd.enabled(model):
        for prompt, other in zip(prompts(4), others, strict=True):
            run(model, prompt)
            run(model, other)
    assert len(advised(caplog)) == 1


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (lambda: prompts(8, shared=60), {}),
        (lambda: prompts(8, length=60, shared=60), {}),
        (lambda: prompts(8), {"reuse_prefix": True}),
        (lambda: prompts(8), {"min_saved_tokens": 71}),
        (lambda: [ragged_prompts(97, seed=seed) for seed in range(8)], {}),
    ],
    ids=["short beginning", "short prompts", "on already", "bound by the user", "nothing in common"],
)
def test_no_advice_where_it_would_not_help(model, caplog, made, options):
    with fd.enabled(model, **options):
        for prompt in made():
            run(model, prompt)
    assert not advised(caplog)


def test_no_advice_between_training_steps(model, caplog):
    with fd.enabled(model):
        for prompt in prompts(6):
            run(model, prompt)
            with torch.no_grad():
                next(model.parameters()).mul_(1.0)
    assert not advised(caplog)
