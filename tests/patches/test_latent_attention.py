"""Multi-head latent attention: stock's tokens in fp32, what is stored, and nodes that are read as keys and values."""

from __future__ import annotations

import copy
import pickle
from weakref import WeakSet

import pytest
import torch
from torch import nn

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.launch import plan as own_nodes
from hf_fastdecode.cache.layers import latent
from hf_fastdecode.cache.layers.latent import ExpandedNodes
from hf_fastdecode.generation.steps import captured_prefill, loop_passes, modes
from hf_fastdecode.generation.steps.modes import EagerSteps
from hf_fastdecode.patches.architectures.latent_attention import _weight_and_bias

from ..architectures.compare import compared, stock_tokens
from ..generation.calls import as_in_stock
from ..generation.uncaptured import SAMPLING, on_the_cpu
from ..tiny_models import ragged_prompts, seeded, tiny_model_of_type

_SIZES = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"intermediate_size": 96, "max_position_embeddings": 512, "q_lora_rank": 32, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}
_EXPERTS = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
    "first_k_dense_replace": 1,
}

MODELS = {
    "without-query-ranks": ("deepseek_v2", {**_SIZES, **_EXPERTS, "q_lora_rank": None, "topk_method": "greedy"}),
    "two-in-a-layer": (
        "longcat_flash",
        {
            **{name: size for name, size in _SIZES.items() if name != "num_hidden_layers"},
            **{"num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "n_routed_experts": 4},
            **{"moe_topk": 2, "zero_expert_num": 2, "head_dim": 8},
        },
    ),
    "wide-values": ("deepseek_v3", {**_SIZES, **_EXPERTS, "v_head_dim": 32}),
    "scaled-depth": ("minicpm3", {**_SIZES, "scale_emb": 1, "dim_model_base": 64}),
}


def model_of(name: str, **fields):
    model_type, given = MODELS[name]
    return tiny_model_of_type(model_type, **{**given, **fields})


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_stock(name):
    """Greedy and sampled, left-padded prompts that begin alike, also over a kept cache; and beams."""
    model, prompts = model_of(name), ragged_prompts(57, 71, 64, shared=40)
    assert compared(model, prompts, stock_tokens(model, prompts)) == ("shared", "")
    beams = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
    as_in_stock(model, lambda: model.generate(**prompts, **beams), "shared", min_saved_tokens=1)


def test_contexts_are_continued_under_autocast():
    """Latents are then in half precision, and weights are not."""
    model, prompts = model_of("without-query-ranks"), ragged_prompts(57, 71, shared=40)
    call = {"do_sample": False, "max_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}

    def logits():
        return torch.stack(model.generate(**prompts, **call).logits)[:, :, :8]

    exact = logits()
    with torch.autocast("cpu", torch.bfloat16):
        stock = logits()
        with fd.enabled(model, min_saved_tokens=1):
            shared = logits()
            assert fd.explain(model).last_call.path == "shared"
    assert float((shared - exact).norm()) <= 2 * float((stock - exact).norm())


def test_what_else_a_projection_computes_counts():
    """Such as adapters, quantized weights, and hooks that fetch weights."""
    layer, like = model_of("without-query-ranks").model.layers[0].self_attn, torch.empty(0)
    projection, (weight, _) = layer.kv_b_proj, _weight_and_bias(layer, like)
    projection.forward = lambda latents: 2 * nn.functional.linear(latents, projection.weight)
    assert torch.equal(_weight_and_bias(layer, like)[0], 2 * weight)
    del projection.forward
    layer.kv_b_proj = nn.Sequential(projection, nn.Identity())
    assert torch.equal(_weight_and_bias(layer, like)[0], weight)


@pytest.mark.parametrize("kind", ["linear", "other"])
def test_biases_of_the_projection_count(kind):
    """Biases of values count; scores do not depend on those of keys."""
    model, prompts = model_of("without-query-ranks"), ragged_prompts(41, 36, shared=33)
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        projection.bias = nn.Parameter(torch.linspace(-2, 2, projection.out_features))
        if kind == "other":
            layer.self_attn.kv_b_proj = nn.Sequential(projection, nn.Identity())
    call = prompts | SAMPLING | {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 4}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, min_saved_tokens=1):
        output = seeded(lambda: model.generate(**call))
        assert fd.explain(model).last_call.path == "shared"
    torch.testing.assert_close(output.logits, stock.logits, rtol=1e-4, atol=1e-4)


@on_the_cpu
@pytest.mark.parametrize("samples", [3, 1])
def test_captured_steps(samples, monkeypatch):
    """Query heads in two groups; then two rows, whose completions become nodes."""
    pytest.importorskip("triton")
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    monkeypatch.setattr(own_nodes, "STEP", 4)
    heads, hidden = (18, 72) if samples == 3 else (2, 64)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": hidden}
    widths = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 32}
    model = model_of("without-query-ranks", **sizes, **widths)
    call = ragged_prompts(41, 36, shared=33) | SAMPLING | {"num_return_sequences": samples}
    call["max_new_tokens"] = 4 if samples == 3 else 10
    report = as_in_stock(model, lambda: model.generate(**call), mode="graph", backend="triton", min_saved_tokens=1)
    assert report.mode == "graph"
    assert "suffixes by triton, captured, as latents" in str(report.lines())


@on_the_cpu
@pytest.mark.parametrize(("tokens", "captured"), [(3, True), (6, False)])
def test_drafts_are_captured_as_far_as_tiles_hold_their_queries(tokens, captured, monkeypatch):
    """The kernels read all heads of a group; passes of more tokens run eagerly, by PyTorch's operators."""
    pytest.importorskip("triton")
    monkeypatch.setattr(loop_passes, "capture_reason", lambda *_: None)
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 18, "num_key_value_heads": 18, "hidden_size": 72}
    model = model_of("without-query-ranks", **sizes, qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=32)
    repeating = {key: part[:, :30].repeat(1, 2) for key, part in ragged_prompts(30).items()}
    call = repeating | {"max_new_tokens": 8, "prompt_lookup_num_tokens": tokens}
    report = as_in_stock(model, lambda: model.generate(**call), mode="graph", min_saved_tokens=1)
    assert report.path == "shared"
    refused = "layers with latents are captured with fewer than 16 tokens of each row" in report.mode_reason
    assert refused != captured, report.mode_reason


@on_the_cpu
def test_captured_prefill(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    monkeypatch.setattr(captured_prefill, "_PASSES_THAT_PAY_A_CAPTURE", {True: 1, False: 1})
    model, found = model_of("without-query-ranks"), []
    call = ragged_prompts(41, 36) | SAMPLING | {"output_logits": True, "return_dict_in_generate": True}
    for mode in ("eager", "graph"):
        with fd.enabled(model, mode=mode, min_saved_tokens=1):
            found.append(model.generate(**call | {"max_new_tokens": 1}))
            assert fd.explain(model).last_call.captured_prefill_tokens == (77 if mode == "graph" else 0)
    eager, captured = found
    torch.testing.assert_close(captured.logits, eager.logits)
    for one, other in zip(captured[CACHE].attention_layers, eager[CACHE].attention_layers, strict=True):
        for number, parts in one.storage.segments.items():
            torch.testing.assert_close(parts, other.storage.segments[number])


def compared_on_a_gpu(mode, prompts, call):
    """The report of a call in half precision, whose logits were compared with fp32's beside those of transformers."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "first_k_dense_replace": 2}
    widths = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_size": 256}
    model, length = model_of("without-query-ranks", **heads, **widths).cuda(), prompts["input_ids"].shape[1]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.div_(3)
    model, prompts = model.bfloat16(), {name: one.cuda() for name, one in prompts.items()}
    call = call | {"output_logits": True, "return_dict_in_generate": True}
    with fd.enabled(model, mode=mode, backend="triton", min_saved_tokens=1):
        found = seeded(lambda: model.generate(**prompts, **call))
        report = fd.explain(model).last_call
    assert report.mode == mode
    with torch.no_grad():
        exact, stock = (
            one(found.sequences[:, :-1]).logits[:, length - 1 :].float()
            for one in (copy.deepcopy(model).float(), model)
        )
    ours = torch.stack(found.logits, 1).float()
    assert float((ours - exact).norm()) <= 2 * float((stock - exact).norm())
    assert float((ours - exact).abs().max()) <= 2 * float((stock - exact).abs().max())
    return report


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_half_precision_on_a_gpu(mode):
    """Of rows whose completions become nodes."""
    compared_on_a_gpu(mode, ragged_prompts(70, 70, shared=60), SAMPLING | {"max_new_tokens": 150})


def test_a_copied_cache_is_continued_and_knows_its_bytes():
    model, prompt = model_of("without-query-ranks"), ragged_prompts(60)["input_ids"]
    call = {"do_sample": False, "max_new_tokens": 4}
    stock = model.generate(prompt, **call)
    with fd.enabled(model, min_saved_tokens=1):
        kept = fd.prefill(model, prompt[:, :50])
        for cache in (pickle.loads(pickle.dumps(kept)), copy.deepcopy(kept), kept):
            assert torch.equal(model.generate(prompt, **{CACHE: cache}, **call), stock)
    tokens, layers = 50, 2
    latents = 16 + 8
    assert kept.nbytes.stored == kept.nbytes.stock == tokens * layers * latents * 4


SAMPLES = SAMPLING | {"num_return_sequences": 3, "max_new_tokens": 8}


@pytest.fixture
def small(monkeypatch):
    """Bounds for tiny models: nodes of 4 rows, and from then on of 3."""
    monkeypatch.setattr(latent, "FEWEST_ROWS", 4)
    monkeypatch.setattr(latent, "FEWEST_ROWS_LATER", 3)
    monkeypatch.setattr(latent, "FEWEST_TOKENS", 8)
    monkeypatch.setattr(latent, "FEWEST_ROW_STEPS", 1)


def prompts():
    """Two problems behind a common beginning, with three samples each: two levels, of which one is expanded."""
    return ragged_prompts(57, 71, shared=40)


def expanded(model) -> bool:
    """Whether the report of the last call says so, of every layer."""
    lines = [line for line in fd.explain(model).last_call.lines() if "decode:" in line]
    return all("as latents; 1 node(s) as keys and values made once" in line for line in lines)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_expanded_nodes_equal_stock(name, small):
    model = model_of(name)
    for call in (SAMPLES, {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 4}):
        stock = seeded(lambda call=call: model.generate(**prompts(), **call))
        with fd.enabled(model, min_saved_tokens=1):
            assert torch.equal(seeded(lambda call=call: model.generate(**prompts(), **call)), stock)
            assert fd.explain(model).last_call.path == "shared"
            assert expanded(model) is ("num_beams" not in call)


def test_biases_of_the_projection_count_in_expanded_nodes(small):
    """Scores of latents leave out those of keys, which move all of them alike, and scores of expanded nodes do not."""
    model = model_of("without-query-ranks")
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        projection.bias = nn.Parameter(torch.linspace(-9, 9, projection.out_features))
    stock = seeded(lambda: model.generate(**prompts(), **SAMPLES))
    with fd.enabled(model, min_saved_tokens=1):
        assert torch.equal(seeded(lambda: model.generate(**prompts(), **SAMPLES)), stock)
        assert expanded(model)


def test_finished_rows_leave_nodes(small):
    """Until too few read them, which then read latents."""
    model = model_of("without-query-ranks")
    call = SAMPLES | {"num_return_sequences": 6, "max_new_tokens": 24, "pad_token_id": 0}
    free = seeded(lambda: model.generate(**prompts(), **call))
    call["eos_token_id"] = free[:, 71:].flatten().mode().values.item()
    report = as_in_stock(model, lambda: model.generate(**prompts(), **call), min_saved_tokens=1, sampler="hf")
    assert report.compactions


def test_kept_caches_keep_latents(small):
    """Expanded nodes end with the call, so that changed weights count in the next one."""
    model, prompt = model_of("without-query-ranks"), prompts()["input_ids"][1:]
    call = SAMPLES | {"num_return_sequences": 6}
    for _ in range(2):
        with torch.no_grad():
            model.model.layers[0].self_attn.kv_b_proj.weight.mul_(1.5)
        stock = seeded(lambda: model.generate(prompt, **call))
        with fd.enabled(model, min_saved_tokens=1):
            kept = fd.prefill(model, prompt[:, :50])
            before = kept.nbytes
            whole = {CACHE: kept, "return_dict_in_generate": True}
            found = seeded(lambda whole=whole: model.generate(prompt, **whole, **call))
            assert torch.equal(found.sequences, stock)
            assert "node(s) as keys and values made once" in str(fd.explain(model).last_call.lines())
            assert found[CACHE].state.expanded is None
            assert kept.state.expanded is None
            assert kept.nbytes == before


def test_nodes_that_do_not_fit_stay_latents(small, monkeypatch):
    """The most read ones go first."""
    model = model_of("without-query-ranks")
    a_token = 2 * 4 * (16 + 16) * 4  # layers, heads, a key and a value, fp32
    call = SAMPLES | {"num_return_sequences": 4}
    stock = seeded(lambda: model.generate(**prompts(), **call))
    for tokens, nodes in ((1000, 3), (50, 1), (10, 0)):
        monkeypatch.setattr(latent, "_most_bytes", lambda free, tokens=tokens: tokens * a_token)
        with fd.enabled(model, min_saved_tokens=1):
            assert torch.equal(seeded(lambda: model.generate(**prompts(), **call)), stock)
            found = f"as latents; {nodes} node(s) as keys and values made once" in str(
                fd.explain(model).last_call.lines()
            )
            assert found is (nodes > 0)


def test_rows_that_begin_anew_expand_anew(small, monkeypatch):
    """In waves, each of which has keys and values of its own: those before are freed."""
    model, feed, found = model_of("without-query-ranks"), EagerSteps.feed, WeakSet()

    def failing(self, ids, positions):
        found.add(self.cache.state.expanded)
        assert len(found) == 1
        if self.cache.rows > 5:
            raise torch.OutOfMemoryError("on purpose")
        return feed(self, ids, positions)

    monkeypatch.setattr(EagerSteps, "feed", failing)
    call = SAMPLES | {"num_return_sequences": 5, "max_new_tokens": 3}
    assert as_in_stock(model, lambda: model.generate(**prompts(), **call), min_saved_tokens=1, sampler="hf").waves == 2


def test_when_keys_and_values_pay():
    """By rows, tokens, and the rows' steps to come."""
    nodes = [Node(Span(0, 0, 1000), 0, 64), Node(Span(1, 0, 1000), 0, 8, 1), Node(Span(1, 0, 100), 8, 40, 1)]
    assert latent.paying_nodes(Forest(64, nodes), 100) == nodes[:1]
    assert latent.paying_nodes(Forest(64, nodes), 10) == []


def test_nodes_are_split_by_runs_and_rows():
    runs = [Span(3, 10, 50), Span(4, 0, 30)]
    nodes = [
        Node(Span(3, 10, 20), 0, 8),
        Node(Span(3, 30, 30), 0, 5, 1),
        Node(Span(4, 0, 30), 5, 3, 1),  # too few rows
        Node(Span(4, 20, 20), 0, 5, 2),  # not all of it in a run
    ]
    forest = Forest(8, nodes)
    split = ExpandedNodes(runs, {}, 4).split(forest)
    assert split.expanded.paths == ((Span(0, 0, 20), Span(0, 20, 30)),) * 5 + ((Span(0, 0, 20),),) * 3
    assert split.as_stored.paths == ((Span(4, 20, 20),),) * 5 + ((Span(4, 0, 30),),) * 3


@on_the_cpu
def test_captured_steps_over_expanded_nodes(small, monkeypatch):
    """Heads whose values are wider than the unrotated part of keys; rows end, until too few read keys and values."""
    pytest.importorskip("triton")
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    monkeypatch.setattr(modes, "_STEPS_OF_A_CAPTURE", 0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    widths = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 32}
    model = model_of("without-query-ranks", **sizes, **widths)
    call = ragged_prompts(41, 36, shared=33) | SAMPLES | {"max_new_tokens": 6, "pad_token_id": 0}
    drawn = seeded(lambda: model.generate(**call))[:, 41:]
    call["eos_token_id"] = [*drawn[1:3, 1].tolist(), *drawn[3:5, 2].tolist()]
    stock = seeded(lambda: model.generate(**call))
    found = []
    for more in ({}, {"eos_token_id": None}):
        with fd.enabled(model, mode="graph", backend="triton", min_saved_tokens=1, sampler="hf"):
            found.append(seeded(lambda more=more: model.generate(**call | more)))
            last = fd.explain(model).last_call
            assert last.mode == "graph"
            assert expanded(model) is bool(more)
            assert "captured, as latents" in str(fd.explain(model).last_call.lines())
            assert bool(last.compactions) is not bool(more)
    assert torch.equal(found[0], stock)
    assert torch.equal(found[1][:, 41:], drawn)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_expanded_nodes_in_half_precision_on_a_gpu(mode, monkeypatch):
    """Of prompts of 300 tokens."""
    monkeypatch.setattr(latent, "FEWEST_TOKENS", 8)
    call = SAMPLES | {"max_new_tokens": 40, "num_return_sequences": 40}
    report = compared_on_a_gpu(mode, ragged_prompts(300, 300, shared=240), call)
    assert "3 node(s) as keys and values made once" in str(report.lines())
