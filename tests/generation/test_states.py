"""Models whose layers have a state per row: it is computed once per distinct prompt, and forked to its rows.

One class of each kind; `make test-architectures` compares all of them.
"""

from __future__ import annotations

import copy

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.overrides import own_code_of
from hf_fastdecode.cache.layout import ModelLayout
from hf_fastdecode.generation.prompts import by_rows
from hf_fastdecode.generation.steps.modes import EagerSteps

from ..architectures.classes import tiny_model_of
from ..tiny_models import ragged_prompts, seeded
from .calls import tokens_embedded

RECENT = [
    "Mamba2ForCausalLM",  # no attention
    "RecurrentGemmaForCausalLM",  # states in its modules, which padding enters
    "xLSTMForCausalLM",  # the same of a cache of its own, and no attention
]

CLASSES = [
    "Qwen3NextForCausalLM",  # gated delta nets beside gated attention
    "Qwen3_5ForConditionalGeneration",  # whose positions have planes
    "NemotronHForCausalLM",  # layers of Mamba-2, of attention, and without a cache
    "FalconH1ForCausalLM",  # state and attention in one layer
    "Zamba2ForCausalLM",  # states in both kinds of layers
    "KimiLinearForCausalLM",  # states beside latents
    "Lfm2MoeForCausalLM",  # short convolutions
    "JambaForCausalLM",  # Mamba-1, whose scans begin anew
    "MiniMaxForCausalLM",  # lightning attention, whose states are in a cache of its own
    *([] if CACHE == "past_key_values" else RECENT),
]

OTHER_BEAMS = {"MiniMaxForCausalLM", "RecurrentGemmaForCausalLM"}
"""Classes of which transformers orders no states for beams, which are then others than without a cache."""

LENGTHS = (31, 45, 38)
PROMPTS = ragged_prompts(*LENGTHS, shared=20)
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 7}
GREEDY = {"do_sample": False, "max_new_tokens": 5}
BEAMS = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def model():
    return tiny_model_of("Qwen3NextForCausalLM")


@pytest.fixture(scope="module", params=CLASSES)
def each(request):
    return tiny_model_of(request.param)


def run(model, arguments, prompts=PROMPTS, **more):
    return seeded(lambda: model.generate(**prompts, **arguments, **more))


def continues(model):
    return ModelLayout.of(model).continues_states


def packs(model):
    """Whether prompts run end to end in one row; else each as a row, with the padding that stock gives it."""
    return ModelLayout.of(model).packs


def ending_early(model, prompts=PROMPTS):
    """Arguments with end tokens by which rows end after different numbers of steps."""
    new = run(model, SAMPLING, prompts)[:, -SAMPLING["max_new_tokens"] :]
    return SAMPLING | {"eos_token_id": [*new[:4, 2].tolist(), int(new[5, 4])]}


def test_tokens_are_stocks(each):
    arguments, name = ending_early(each), type(each).__name__
    stock, beams = run(each, arguments), BEAMS | ({"use_cache": False} if name in OTHER_BEAMS else {})
    beams = None if name == "xLSTMForCausalLM" else run(each, beams)
    with fd.enabled(each, min_saved_tokens=1):
        with tokens_embedded(each) as counted:
            assert torch.equal(run(each, arguments), stock)
        report = fd.explain(each).last_call
        assert (report.path, report.mode, report.prefilled_tokens) == ("shared", "eager", sum(LENGTHS))
        assert counted[0] == (sum(LENGTHS) if packs(each) else PROMPTS["input_ids"].numel())  # each prompt once
        assert report.compactions >= 1
        if beams is None:
            with pytest.raises(ValueError, match="the cache cannot be reordered"):
                run(each, BEAMS)
        else:
            assert torch.equal(run(each, BEAMS), beams)
            assert fd.explain(each).last_call.path == "shared"


def test_what_prompts_begin_with_is_computed_once(each, monkeypatch):
    """Rests run together behind it, no single token alone. Padding enters states as in stock."""
    prompts = ragged_prompts(33, 50, 50, 32, shared=32)
    arguments = SAMPLING | {"output_logits": True, "return_dict_in_generate": True}
    stock = run(each, arguments, prompts)
    with fd.enabled(each, min_saved_tokens=1, min_shared_tokens=8):
        with tokens_embedded(each) as counted:
            shared = run(each, arguments, prompts)
        report = fd.explain(each).last_call
    assert torch.equal(shared.sequences, stock.sequences)
    expected, shown = torch.stack(stock.logits), torch.stack(shared.logits)
    tolerance = 1e-4 if continues(each) else 1e-5
    torch.testing.assert_close(shown, expected, atol=tolerance * float(expected.std()), rtol=0)
    whole = 165 if packs(each) else prompts["input_ids"].numel()
    passes = [30, 2 + 3 + 2 * 20] if continues(each) else [whole]
    assert (counted[: len(passes)], report.prefilled_tokens) == (passes, sum(passes) if continues(each) else 165)


def test_what_prompts_begin_with_behind_kept_tokens_and_for_later_calls(model, monkeypatch):
    prompts, later = ragged_prompts(50, 45, shared=32), ragged_prompts(40, shared=32, seed=0)
    stock, beams, alone = run(model, SAMPLING, prompts), run(model, BEAMS, prompts), run(model, SAMPLING, later)
    gap = prompts | {"attention_mask": prompts["attention_mask"].clone()}
    gap["attention_mask"][0, 40] = 0
    stock_gap = run(model, SAMPLING, gap)
    with fd.enabled(model, min_saved_tokens=1, min_shared_tokens=8, reuse_prefix=True):
        assert torch.equal(run(model, BEAMS, prompts), beams)
        assert fd.explain(model).last_call.prefilled_tokens == 50 + 45 - 32
        assert torch.equal(run(model, SAMPLING, later), alone)
        assert fd.explain(model).last_call.known_tokens == (32,)
    with fd.enabled(model, min_saved_tokens=1, min_shared_tokens=8):
        kept = fd.prefill(model, prompts["input_ids"][:1, :12])
        assert torch.equal(run(model, SAMPLING, prompts, **{CACHE: kept}), stock)
        assert fd.explain(model).last_call.prefilled_tokens == 50 + 45 - 32 - 12
        kept = fd.prefill(model, prompts)
        assert (kept.node_tokens, len(kept.state_layers[0].ends)) == (50 + 45 - 32, 3)
        assert torch.equal(run(model, SAMPLING, gap), stock_gap)
        assert fd.explain(model).last_call.prefilled_tokens == 50 + 45 - 1


def test_a_kept_cache_is_continued_from_its_state(each):
    stock = run(each, SAMPLING)
    known = 20 if continues(each) else 0  # whole prompts are computed again
    with fd.enabled(each):
        kept = fd.prefill(each, PROMPTS["input_ids"][1:2, :20])
        for _ in range(2):
            assert torch.equal(run(each, SAMPLING, **{CACHE: kept}), stock)
            assert fd.explain(each).last_call.known_tokens == (known,) * 3


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "RecurrentGemmaForCausalLM"])
def test_a_returned_cache_is_continued_where_completions_or_prompts_end(name):
    """Where a pass continues from states; else whole prompts are computed again."""
    if name in RECENT and CACHE == "past_key_values":
        pytest.skip(f"this transformers computes {name} otherwise")
    model = tiny_model_of(name)
    first = run(model, SAMPLING)
    mask = torch.cat([PROMPTS["attention_mask"].repeat_interleave(3, 0), torch.ones(9, 12, dtype=torch.long)], 1)
    longer = {"input_ids": torch.cat([first, first[:, :5] + 1], 1), "attention_mask": mask}
    other = longer | {"input_ids": longer["input_ids"].clone()}
    other["input_ids"][:, -9] = 7
    stock = [run(model, GREEDY, prompts) for prompts in (longer, other)]
    with fd.enabled(model):
        returned = run(model, SAMPLING, return_dict_in_generate=True)
        assert torch.equal(returned.sequences, first)
        for prompts, tokens, more in zip((longer, other), stock, (6, 0), strict=True):  # the last one was only drawn
            assert torch.equal(run(model, GREEDY, prompts, **{CACHE: returned[CACHE]}), tokens)
            known = tuple((length + more) * continues(model) for length in LENGTHS for _ in range(3))
            assert fd.explain(model).last_call.known_tokens == known


def test_prompts_that_a_cache_holds_are_computed_again(model, caplog):
    """States know no earlier token, after which the last one's logits could be computed."""
    stock = run(model, SAMPLING)
    with fd.enabled(model):
        kept = fd.prefill(model, PROMPTS)
        assert kept.rows == 3
        assert torch.equal(run(model, SAMPLING, **{CACHE: kept}), stock)
        assert fd.explain(model).last_call.known_tokens == (0, 0, 0)
        assert "a state for each row" in str(fd.explain(model).last_call.lines())
    assert [record.getMessage() for record in caplog.records] == [
        "prompt 0 begins with 31 tokens of the given cache, of which 0 are not computed again: states continue where "
        "a prompt or a completion in the cache ends, by at least 2 new tokens"
    ]


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "JambaForCausalLM"])
def test_reuse_prefix_continues_the_prompts_of_earlier_calls(name):
    """As of a chat, each of whose prompts begins with the one before."""
    each = tiny_model_of(name)
    chat = [{name: one[1:2, :length] for name, one in PROMPTS.items()} for length in (20, 32, 45)]
    stock, beams = [run(each, SAMPLING, prompt) for prompt in chat], run(each, BEAMS, chat[2])
    known = [None, (20,), (32,)] if continues(each) else [None] * 3
    with fd.enabled(each, min_saved_tokens=1, min_shared_tokens=8, reuse_prefix=True):
        for prompt, tokens, length in zip(chat, stock, known, strict=True):
            assert torch.equal(run(each, SAMPLING, prompt), tokens)
            assert fd.explain(each).last_call.known_tokens == length
        assert torch.equal(run(each, BEAMS, chat[2]), beams)
        assert fd.explain(each).last_call.path == "shared"


def test_prompts_in_several_passes_and_gaps_in_a_mask(model):
    gaps = PROMPTS | {"attention_mask": PROMPTS["attention_mask"].clone()}
    gaps["attention_mask"][:, 25:28] = 0
    stock = run(model, SAMPLING, gaps)
    with fd.enabled(model, max_prefill_tokens=2 * 45), tokens_embedded(model) as counted:
        assert torch.equal(run(model, SAMPLING, gaps), stock)
    assert counted[:2] == [2 * 45, 45]


def test_another_loop_that_runs_stock_prefills_in_the_chunks_that_were_asked_for():
    """Each of which Mamba-1 scans anew."""
    each, chunks = tiny_model_of("JambaForCausalLM"), BEAMS | {"prefill_chunk_size": 8}
    stock, whole = run(each, chunks), run(each, BEAMS)
    assert not torch.equal(stock, whole)
    with fd.enabled(each, min_saved_tokens=10_000):
        assert torch.equal(run(each, chunks), stock)
        assert fd.explain(each).last_call.path == "stock"
        assert torch.equal(run(each, BEAMS), whole)


def test_long_prompts_run_in_parts_each_from_the_state_before(each):
    """No single token alone: 33 = 16 + 15 + 2."""
    prompts = ragged_prompts(31, 45, 33)
    stock, beams = run(each, SAMPLING, prompts), {**BEAMS, "use_cache": type(each).__name__ not in OTHER_BEAMS}
    beams = None if type(each).__name__ == "xLSTMForCausalLM" else run(each, beams, prompts)
    whole = [31, 45, 33] if packs(each) else [45] * 3
    passes = [16, 15, 16, 16, 13, 16, 15, 2] if continues(each) else whole
    with fd.enabled(each, min_saved_tokens=1, max_prefill_tokens=16):
        with tokens_embedded(each) as counted:
            assert torch.equal(run(each, SAMPLING, prompts), stock)
        assert counted[: len(passes)] == passes
        assert beams is None or torch.equal(run(each, BEAMS, prompts), beams)
        kept = fd.prefill(each, prompts)
        assert {len(layer.ends) for layer in kept.state_layers} == {3}


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "JambaForCausalLM"])
def test_passes_are_as_long_as_memory_allows(name, monkeypatch):
    """A short pass is counted, once. What continues no state runs whole, one prompt at a time."""
    model, prompts = tiny_model_of(name), {"input_ids": torch.arange(2 * 96).view(2, 96) % 90 + 3}
    stock, monkeypatched = run(model, SAMPLING, prompts), monkeypatch.setattr
    monkeypatched(by_rows, "_COUNTED", 8)
    monkeypatched(by_rows, "_FEW", 8)
    with fd.enabled(model):
        needed = by_rows.most_bytes(model, 8)
    monkeypatched(by_rows, "usable_memory", lambda device: 2 * 6 * needed)
    for before in ([8], []):
        with fd.enabled(model, min_saved_tokens=1), tokens_embedded(model) as counted:
            assert torch.equal(run(model, SAMPLING, prompts), stock)
        passes = [*before, *([48] * 4 if continues(model) else [96] * 2)]
        assert counted[: len(passes)] == passes


def test_memory_of_passes_is_counted_for_each_dtype(monkeypatch):
    model = copy.deepcopy(tiny_model_of("Qwen3NextForCausalLM"))
    monkeypatch.setattr(by_rows, "_COUNTED", 8)
    monkeypatch.setattr(by_rows, "_FEW", 8)
    with fd.enabled(model):
        needed = by_rows.most_bytes(model, 8)
        monkeypatch.setattr(by_rows, "usable_memory", lambda device: 2 * 600 * needed)
        assert by_rows.tokens_that_fit(model, 10**6) == 4800
        assert by_rows.tokens_that_fit(model.bfloat16(), 10**6) > 4800


def test_states_after_a_gap_in_a_mask_are_of_that_gap(model):
    """A gap's places move what convolutions see and let states decay, so that equal tokens have other states."""
    gap = {name: one[1:2].clone() for name, one in PROMPTS.items()}
    gap["attention_mask"][:, 25:28] = 0
    tokens = gap["input_ids"][gap["attention_mask"].bool()][None]
    longer = {"input_ids": torch.cat([tokens, tokens[:, :5]], 1)}
    stock = [run(model, SAMPLING, prompts) for prompts in (gap, longer)]
    with fd.enabled(model):
        for kept, prompts, new in ((tokens[:, :30], gap, stock[0]), (gap, longer, stock[1])):
            assert torch.equal(run(model, SAMPLING, prompts, **{CACHE: fd.prefill(model, kept)}), new)
            assert fd.explain(model).last_call.known_tokens == (0,)
    with fd.enabled(model, min_shared_tokens=8, reuse_prefix=True):
        for prompts, new in ((gap, stock[0]), (longer, stock[1]), (gap, stock[0])):
            assert torch.equal(run(model, SAMPLING, prompts), new)


def test_smaller_waves_when_memory_runs_out(model, monkeypatch):
    prompts = {key: value.repeat_interleave(3, 0) for key, value in PROMPTS.items()}
    stock, feed, steps = run(model, GREEDY, prompts), EagerSteps.feed, []

    def failing(self, ids, positions):
        steps.append(1)
        if self.cache.rows > 5 and len(steps) > 3:
            raise torch.OutOfMemoryError("on purpose")
        return feed(self, ids, positions)

    monkeypatch.setattr(EagerSteps, "feed", failing)
    with fd.enabled(model):
        assert torch.equal(run(model, GREEDY, prompts), stock)
        assert fd.explain(model).last_call.waves == 2


def test_a_step_overwrites_states_in_place_and_leaves_those_of_prompts(model):
    ids = PROMPTS["input_ids"][1:, :]
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, ids[:1])
        fork = cache.fork()
        fork.batch_repeat_interleave(2)
        layer = fork.state_layers[0]
        prompts = [one.clone() for one in next(iter(layer.ends.values())).tensors]
        addresses = []
        for token in ids[:, 10:13].T:
            stepped = model(token[:, None], **{CACHE: fork}).logits
            addresses.append([one.data_ptr() for one in layer.states.tensors])
        assert addresses[0] == addresses[1] == addresses[2]
        fork.reorder_cache(torch.tensor([1, 0]))
        assert addresses[0] == [one.data_ptr() for one in layer.states.tensors]
        assert all(map(torch.equal, prompts, next(iter(layer.ends.values())).tensors))
        assert cache.nbytes.stored - cache.node_tokens * 4 * 2 * 2 * 16 == layer.row_bytes
    whole = torch.cat([ids[:1].expand(2, -1), ids[:, 10:13]], 1)
    torch.testing.assert_close(stepped, model(whole).logits[:, -1:], atol=1e-4, rtol=1e-4)


def test_passes_of_several_tokens_continue_states_or_raise(each):
    ids = PROMPTS["input_ids"][1:2]
    with fd.enabled(each), torch.no_grad():
        cache = fd.prefill(each, ids[:, :30])
    own = own_code_of(type(each)) is not None  # whose code has messages of its own
    refusal = (ValueError, AttributeError)
    with pytest.raises(refusal, match=None if own else "enable"), torch.no_grad():
        each(ids[:, :3], **{CACHE: cache})  # of a model that is not enabled, which leaves no states behind
    with fd.enabled(each), torch.no_grad():
        if continues(each):
            continued, whole = each(ids[:, 30:], **{CACHE: cache}).logits, each(ids).logits[:, 30:]
            torch.testing.assert_close(continued, whole, atol=5e-5 * float(whole.std()), rtol=1e-5)
        else:
            with pytest.raises(ValueError, match="a pass of 15 tokens per row would not continue the states"):
                each(ids[:, 30:], **{CACHE: cache})


@pytest.mark.skipif(CACHE == "past_key_values", reason="models with states alone need transformers 5.24")
def test_states_are_of_one_dtype():
    """Of a model without keys, whose dtype would tell."""
    each = tiny_model_of("Mamba2ForCausalLM")
    with fd.enabled(each), torch.no_grad():
        cache = fd.prefill(each, PROMPTS["input_ids"][1:2, :30])
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="the cache holds states in"):
            run(each, GREEDY, **{CACHE: cache})
        assert torch.equal(run(each, GREEDY, **{CACHE: cache}), run(each, GREEDY))


def test_assisted_decoding_is_transformers_own():
    """Which removes drafts from states of convolutions, and refuses others."""
    each, prompt = tiny_model_of("Lfm2ForCausalLM"), {"input_ids": (torch.arange(40) % 7 + 3)[None]}
    stock, drafts = run(each, GREEDY, prompt), GREEDY | {"prompt_lookup_num_tokens": 3}
    with fd.enabled(each, min_saved_tokens=1):
        assert torch.equal(run(each, drafts, prompt), stock)
        report = fd.explain(each).last_call
    assert report.path == "stock"
    assert "transformers' own cache" in report.reason
    stateful = tiny_model_of("Qwen3NextForCausalLM")
    with fd.enabled(stateful), pytest.raises(ValueError, match="not supported with stateful models"):
        run(stateful, drafts, prompt)


def test_states_that_no_row_reaches_are_dropped(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPTS)
        assert len(cache.state_layers[0].ends) == 3
        cache.select_rows([2])
        assert len(cache.fork().state_layers[0].ends) == 1


def test_states_cannot_go_back(model):
    ids = PROMPTS["input_ids"][1:2]
    with fd.enabled(model), torch.no_grad():
        cache = fd.prefill(model, ids)
        model(ids[:, :1], **{CACHE: cache})
        with pytest.raises(ValueError, match="tokens cannot be removed from a cache with states"):
            cache.crop(-1)
        with pytest.raises(ValueError, match="tokens cannot be removed from a cache with states"):
            cache.drop_last([1])
        with pytest.raises(ValueError, match="the cache holds 1 rows, got tokens for 2"):
            model(ids[:, :1].expand(2, -1), **{CACHE: cache})
        model(ids[:, :1], **{CACHE: cache})
        with pytest.raises(IndexError):
            model(ids[:, :1] + 1000, **{CACHE: cache})
        with pytest.raises(ValueError, match="has left rows of this cache without their states"):
            model(ids[:, :1], **{CACHE: cache})
