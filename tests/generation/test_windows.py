"""Sliding windows and attention sinks: stock's tokens, for every place of a window's edge and every operator."""

import copy

import pytest
import torch
from transformers import DynamicCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.interface import shared_context_attention
from hf_fastdecode.attention.kv import SharedKV, SlidingWindow
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import modes

from ..cases import exhaustive_but
from ..tiny_models import ragged_prompts, seeded, tiny_model
from .calls import SAMPLING, as_in_stock, both

# 60 tokens that all rows share, then 4 to 30 of each prompt: a row has 64 to 90 tokens, and 14 new ones.
PROMPTS = ragged_prompts(90, 70, 81, 64, shared=60)
CALL = SAMPLING | {"num_return_sequences": 3, "max_new_tokens": 14}
# It ends at the token before, in the suffix, in nodes of depth 1, 0, in nodes of both, and for some rows nowhere. Of
# one token alone, stock's own cache keeps all tokens where its mask expects none.
WINDOWS = [2, 9, 30, 50, 64, 100]
MODELS = ["mistral-window", "gemma2", "gpt_oss"]
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # interpreting takes time by the KV head
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")


@pytest.mark.parametrize("window", exhaustive_but(WINDOWS[::2], WINDOWS))
@pytest.mark.parametrize("name", MODELS)
def test_a_window_may_end_anywhere(name, window):
    model = tiny_model(name, sliding_window=window)
    stock, shared, call = both(model, lambda: CALL, PROMPTS)
    assert call.path == "shared", call.reason
    assert call.prefilled_tokens == 60 + (30 + 10 + 21 + 4), call.forest
    assert torch.equal(shared, stock)
    assert f"within a window of {window} tokens" in call.layers[0]
    assert ("with sinks" in call.layers[1]) == (name == "gpt_oss")
    assert ("window" in call.layers[1]) == (name == "mistral-window")


@interpreted
@pytest.mark.parametrize(
    ("name", "window"), [("mistral-window", 2), ("mistral-window", 36), ("gpt_oss", 8), ("gpt_oss", 36)]
)
def test_the_kernels_see_as_far(name, window):
    """To the new tokens, the nodes below, the node above."""
    pytest.importorskip("triton")
    model = tiny_model(name, sliding_window=window, **FEW_HEADS)
    prompts = ragged_prompts(41, 36, shared=33)
    call = SAMPLING | {"num_return_sequences": 2, "max_new_tokens": 4}
    report = as_in_stock(model, lambda: model.generate(**prompts, **call), backend="triton")
    assert f"by triton, within a window of {window} tokens" in report.layers[0]


@interpreted
@pytest.mark.parametrize("name", ["mistral-window", "gpt_oss"])
def test_captured_steps(name, monkeypatch):
    """A step captured for rows within every window is captured again for longer rows, which then serves both."""
    pytest.importorskip("triton")
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    model = tiny_model(name, sliding_window=50, **FEW_HEADS)
    short, long = ragged_prompts(44, 38, shared=35), ragged_prompts(55, 51, shared=40)
    call = SAMPLING | {"num_return_sequences": 2, "max_new_tokens": 3}
    stock = [seeded(lambda prompt=prompt: model.generate(**prompt, **call)) for prompt in (short, long)]
    captures = []
    with fd.enabled(model, mode="graph", backend="triton"):
        for which in (0, 1, 0):
            prompt = (short, long)[which]
            assert torch.equal(seeded(lambda prompt=prompt: model.generate(**prompt, **call)), stock[which])
            captures.append(state_of(model).captures.count)
            report = fd.explain(model).last_call
            assert report.mode == "graph"
            assert ("within a window of 50 tokens" in report.layers[0]) == bool(which)
    assert captures == [1, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mistral-window", "gemma2"])
def test_captured_steps_on_a_gpu(name):
    """Rows shorter and longer than the window: the kernels of uncaptured steps, except for how work is divided."""
    model = tiny_model(name, hidden_size=256, sliding_window=200).bfloat16().cuda()
    calls = []
    for lengths in ((150, 120), (400, 450), (150, 120)):
        prompt = {key: value.cuda() for key, value in ragged_prompts(*lengths, shared=min(lengths) // 2).items()}
        calls.append(prompt | SAMPLING | {"max_new_tokens": 20})
    with fd.enabled(model, mode="eager", backend="triton"):
        eager = [seeded(lambda call=call: model.generate(**call)) for call in calls]
    with fd.enabled(model, mode="graph"):
        captured = [seeded(lambda call=call: model.generate(**call)) for call in calls]
        assert state_of(model).captures.count == 2
    assert min((a == b).float().mean() for a, b in zip(eager, captured, strict=True)) > 0.5


@pytest.mark.parametrize("window", [64, 80, 90, 200])
def test_a_window_that_holds_every_row_costs_nothing(window):
    """80 tokens and 10 new ones fit a window of 90."""
    model = tiny_model("mistral-window", sliding_window=window)
    stock, shared, call = both(model, lambda: SAMPLING | {"max_new_tokens": 10}, ragged_prompts(80))
    assert torch.equal(shared, stock)
    assert ("window" in call.layers[0]) == (window < 90)


@pytest.mark.parametrize("name", MODELS)
def test_a_node_longer_than_a_forward_pass(name):
    """Its second part sees the end of the first."""
    model = tiny_model(name, sliding_window=30)
    as_in_stock(model, lambda: model.generate(**PROMPTS, **CALL), max_prefill_tokens=17)


@pytest.mark.parametrize("window", [3, 30, 66])
@pytest.mark.parametrize("name", MODELS)
def test_several_tokens_at_once(name, window):
    """Direct forward passes of five tokens, then three more, as with stock's cache."""
    model = tiny_model(name, sliding_window=window)
    prompts = ragged_prompts(70, 70, 70, shared=60)["input_ids"]
    more = ragged_prompts(8, 8, 8, seed=3)["input_ids"]
    with fd.enabled(model), torch.no_grad():
        shared = fd.prefill(model, prompts)
        stock = DynamicCache(config=model.config)
        model(prompts, **{CACHE: stock})
        for start, stop in ((0, 5), (5, 8)):
            positions = torch.arange(70 + start, 70 + stop).expand(3, -1)
            logits = [
                model(more[:, start:stop], **{CACHE: cache}, position_ids=positions).logits
                for cache in (shared, stock)
            ]
            torch.testing.assert_close(*logits)
        seen = [3 * min(78, layer.window or 78) * layer.storage.bytes_per_token for layer in shared.layers]
        assert shared.nbytes.stock == sum(seen)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_prefilled_before_the_window_was_reached(name):
    """The 30 tokens prefilled fit the window of 40, the questions behind them do not."""
    model = tiny_model(name)
    whole = ragged_prompts(75, 61, shared=30)
    stock = seeded(lambda: model.generate(**whole, **CALL))
    with fd.enabled(model):
        cache = fd.prefill(model, whole["input_ids"][:1, :30])
        for _ in range(2):
            assert torch.equal(seeded(lambda: model.generate(**whole, **CALL, **{CACHE: cache})), stock)


def test_rows_that_end_leave_a_windowed_batch():
    model = tiny_model("gpt_oss", sliding_window=30)
    call = CALL | {"eos_token_id": list(range(3, 20)), "num_return_sequences": 4}
    stock, shared, report = both(model, lambda: call, PROMPTS)
    assert torch.equal(shared, stock)
    assert report.compactions >= 1


def test_reported_bytes_of_stock_are_those_of_its_windowed_cache():
    model = tiny_model("gemma2", sliding_window=30)
    call = CALL | {"return_dict_in_generate": True}
    stock = seeded(lambda: model.generate(**PROMPTS, **call))[CACHE]
    with fd.enabled(model):
        seeded(lambda: model.generate(**PROMPTS, **call))
        report = fd.explain(model).last_call
    # What it keeps between steps: of a local layer one token less than a step sees.
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers)
    assert report.nbytes.stock == kept + 12 * report.layer_sizes[0][0]


def test_chunked_attention_runs_stock_beyond_its_chunk():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 64, "intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 16}
    sizes |= {"vocab_size": 97, "pad_token_id": 0, "attn_temperature_tuning": False, "attention_chunk_size": 50}
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes)).eval()
    model.generation_config.eos_token_id = None
    stock, shared, call = both(model, lambda: CALL, ragged_prompts(60, 75, shared=40))
    assert call.path == "stock"
    assert "chunks of 50 tokens are shorter than the longest row" in call.reason
    assert torch.equal(shared, stock)
    _, _, call = both(model, lambda: SAMPLING | {"max_new_tokens": 4}, ragged_prompts(40, 46, shared=35))
    assert call.path == "shared"


def test_a_layer_and_a_mask_that_disagree_run_stock():
    """Stock's result then depends on which of its attention functions runs."""
    model = tiny_model("mistral-window")
    narrower = copy.deepcopy(model.config)
    narrower.sliding_window = 30
    for layer in model.model.layers:
        layer.self_attn.config = narrower
    stock, shared, call = both(model, lambda: CALL, PROMPTS)
    assert call.path == "stock"
    assert "MistralAttention names a sliding window of 30 tokens, but its mask one of 40" in call.reason
    assert torch.equal(shared, stock)


def test_a_model_that_takes_the_window_for_a_tensor_is_told():
    window = SlidingWindow(40)
    with pytest.raises(Unsupported, match="'shape': masks of a SharedContextCache are not tensors"):
        window.shape  # noqa: B018
    with pytest.raises(Unsupported, match="add: masks of a SharedContextCache are not tensors"):
        torch.zeros(1) + window


def test_sinks_of_another_shape_are_refused():
    class Keys(SharedKV):
        def attend(self, query, scoring):
            raise AssertionError("it would attend")

    message = r"attention sinks of shape \(1,\), and one number for each of its 4 query heads is supported"
    query = torch.zeros(1, 4, 1, 16)
    with pytest.raises(Unsupported, match=message):
        shared_context_attention(torch.nn.Module(), query, Keys(), Keys(), None, s_aux=torch.zeros(1))


def test_a_forced_fused_backend_refuses_a_window():
    model = tiny_model("mistral-window")
    with (
        fd.enabled(model, backend="cpu"),
        pytest.raises(
            ValueError, match=r"backend='cpu' cannot run: .* a sliding window in prefill; use backend='auto'"
        ),
    ):
        model.generate(**PROMPTS, **CALL)


@pytest.mark.parametrize("name", MODELS)
def test_gaps_in_a_mask_run_stock(name):
    """The second turn of a batch of chats: stock's window counts the pad tokens after a row's end."""
    model = tiny_model(name, sliding_window=40)
    ids = ragged_prompts(80)["input_ids"].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, 50:58] = 0
    stock, shared, call = both(model, lambda: CALL, {"input_ids": ids, "attention_mask": mask})
    assert call.path == "stock"
    assert "windows of 40 tokens" in call.reason
    assert torch.equal(shared, stock)
    with fd.enabled(model), pytest.raises(ValueError, match="windows of 40 tokens count as seen"):
        fd.prefill(model, {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("call", [{"do_sample": True, "num_return_sequences": 2}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_chat_of_rows_that_end_early(name, call, caplog):
    """A kept cache is left aside for such a turn, and serves the ones without gaps."""
    model = tiny_model(name, sliding_window=24)
    ids, new = ragged_prompts(40)["input_ids"].repeat(3, 1), {"max_new_tokens": 6, "return_dict_in_generate": True}
    ids[1:] = ids[1:].flip(0, 1)
    with fd.enabled(model):
        first = model.generate(ids, do_sample=False, **new, **{CACHE: fd.prefill(model, ids)})
    text = torch.cat([first.sequences, ids[:, :7]], 1)
    mask = torch.ones_like(text)
    mask[1, 43:46] = mask[2, 41:46] = 0
    turns = [{"input_ids": text, "attention_mask": mask}, {"input_ids": text}]
    stock = [seeded(lambda: model.generate(**turn, **call, **new).sequences) for turn in turns]  # noqa: B023
    with fd.enabled(model):
        for turn, expected in (*zip(turns, stock, strict=True), (turns[0], stock[0])):
            again = seeded(lambda: model.generate(**turn, **call, **new, **{CACHE: first[CACHE]}))  # noqa: B023
            assert torch.equal(again.sequences, expected)
            report = fd.explain(model).last_call
            assert report.path == ("shared" if "attention_mask" not in turn else "stock")
            assert "the given cache is not used" in report.reason or report.path == "shared"
            assert isinstance(again[CACHE], DynamicCache) == (report.path == "stock")
    assert sum("the given cache is not used" in one.message for one in caplog.records) == 1


def test_gaps_in_a_mask_that_no_window_counts():
    model = tiny_model("mistral-window", sliding_window=200)
    ids = ragged_prompts(80)["input_ids"].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, 50:58] = 0
    stock, shared, call = both(model, lambda: CALL, {"input_ids": ids, "attention_mask": mask})
    assert call.path == "shared", call.reason
    assert torch.equal(shared, stock)
    with fd.enabled(model):
        assert fd.prefill(model, {"input_ids": ids, "attention_mask": mask}).rows == 2


def test_embeddings_count_towards_the_window():
    model, prompt, more = tiny_model("mistral-window"), ragged_prompts(38)["input_ids"], torch.arange(3, 23)[None]
    embeds = model.get_input_embeddings()(more).detach()
    with torch.no_grad(), fd.enabled(model):
        by_ids = model(more, **{CACHE: fd.prefill(model, prompt)}).logits
        by_embeds = model(inputs_embeds=embeds, **{CACHE: fd.prefill(model, prompt)}).logits
        by_place = model(None, None, None, fd.prefill(model, prompt), embeds).logits
    assert torch.equal(by_embeds, by_ids)
    assert torch.equal(by_place, by_ids)


@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
def test_a_window_that_only_the_cache_has_runs_stock(name):
    """The config names a window, so stock's cache drops older keys, but the model's mask does not hide them."""
    model = tiny_model("llama-gqa", **{name: 40})
    stock, shared, call = both(model, lambda: CALL, PROMPTS)
    assert call.path == "stock"
    assert "LlamaAttention attends without one" in call.reason
    assert torch.equal(shared, stock)
    stock, shared, call = both(model, lambda: CALL | {"max_new_tokens": 4}, ragged_prompts(36))
    assert call.path == "shared", call.reason
    assert torch.equal(shared, stock)
