"""Prompts that one row alone has: slim models with `enable` store them in suffixes, and nodes only what is shared.

Kernels are interpreted here; steps of captured modes run uncaptured.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.shared import SharedContextCache
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.generation.prompts import packed
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.generation.steps.modes import EagerSteps
from hf_fastdecode.kernels.device import triton_is_installed
from hf_fastdecode.patches.layers import slim_attention
from hf_fastdecode.patches.layers.slim_attention import SlimTokens

from ..generation.calls import tokens_embedded
from ..tiny_models import ragged_prompts, seeded
from .family_models import PLANS, family_model, family_pair
from .slim_models import TEXT, pair

pytestmark = [
    pytest.mark.skipif(not triton_is_installed(), reason="needs Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU"),
    pytest.mark.usefixtures("uncaptured"),
]
ALONE = ragged_prompts(24, 19)
MANY = {name: value[[0, 0, *range(1, 9)]] for name, value in ragged_prompts(9, *[10] * 8).items()}
BEHIND_A_HEAD = ragged_prompts(24, 22, 23, shared=17)
SAMPLE: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 5}


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[SharedContextCache]:
    """The caches into whose suffixes prompts were prefilled."""
    seen: list[SharedContextCache] = []
    prefill = packed.prefill_unshared

    def watched(model: PreTrainedModel, cache: SharedContextCache, *args: Any, **kwargs: Any) -> dict[int, Tensor]:
        seen.append(cache)
        return prefill(model, cache, *args, **kwargs)

    monkeypatch.setattr("hf_fastdecode.generation.prompts.start.prefill_unshared", watched)
    monkeypatch.setattr("hf_fastdecode.generation.decoding.loop.prefill_unshared", watched)
    return seen


def both(
    model: PreTrainedModel, slim: PreTrainedModel, call: dict[str, Any], **options: Any
) -> tuple[Tensor, Tensor, Any]:
    """Tokens of the ordinary model in stock transformers and of the slim one, and the call's report."""
    stock = seeded(lambda: model.generate(**call))
    options = {"mode": "graph", "backend": "triton", "min_saved_tokens": 1, "min_shared_tokens": 8} | options
    with fd.enabled(slim, **options):
        return stock, seeded(lambda: slim.generate(**call)), fd.explain(slim).last_call


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize(
    ("name", "plan"), [("llama", "k+r"), ("gpt2", "k"), ("gpt_neox", "k+r")], ids=lambda value: value
)
def test_prompts_behind_a_head(name: str, plan: str, mode: str, caches: list[SharedContextCache]) -> None:
    """The head is a node, whose keys and values the rest of each prompt reads."""
    model, slim = family_pair(name, plan)
    stock, found, report = both(model, slim, BEHIND_A_HEAD | SAMPLE, mode=mode)
    assert torch.equal(found, stock)
    assert (report.path, report.mode) == ("shared", mode)
    assert (report.prefilled_tokens, report.stored_tokens, report.own_tokens) == (35, 17, 18)
    (cache,) = caches
    assert [segment.keys.shape[1] for segment in cache.layers[0].storage.segments.values()] == [17]
    assert cache.suffix_lengths.tolist() == [24 - 17 + 4, 22 - 17 + 4, 23 - 17 + 4]
    assert "slim suffixes by slim_decode" in report.layers[0]


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_one_row_stores_nothing_in_nodes(mode: str, caches: list[SharedContextCache]) -> None:
    """Nothing is shared, yet the call does not run stock."""
    model, slim = pair("k+r")
    with tokens_embedded(slim) as embedded:
        stock, found, report = both(model, slim, ragged_prompts(24) | SAMPLE, mode=mode)
    assert torch.equal(found, stock)
    assert (report.path, report.mode) == ("shared", mode)
    assert embedded == [24, 1, 1, 1, 1]
    (cache,) = caches
    assert not any(cache.layers[0].storage.segments.values())
    per_token = sum(layer.storage.suffix_bytes_per_token for layer in cache.layers)
    assert report.nbytes.stored == (24 + 4) * per_token == cache.nbytes.stored
    assert cache.nbytes.allocated == (24 + 5) * per_token
    assert report.nbytes.stock == (24 + 4) * per_token


def test_reports_count_what_each_row_holds(caches: list[SharedContextCache]) -> None:
    slim = pair("k+r")[1]
    with fd.enabled(slim, mode="graph", backend="triton"):
        slim.generate(**ALONE, **SAMPLE)
        report = fd.explain(slim).last_call
    assert report.nbytes.stored == caches[0].nbytes.stored
    assert "of these, stored with one row alone: 43" in str(report.lines())


@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_prompts_in_chunks(tokens: int, caches: list[SharedContextCache]) -> None:
    """A chunk reads the chunks before it as they are cached, with values made anew."""
    model, slim = pair("k+r")
    stock, found, _ = both(model, slim, BEHIND_A_HEAD | SAMPLE, max_prefill_tokens=tokens)
    assert torch.equal(found, stock)
    assert len(caches) == 1


def test_values_of_long_prompts_are_made_in_parts(
    caches: list[SharedContextCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a chunk reads at once, in fp32 and in several steps, would take gigabytes of a long prompt."""
    monkeypatch.setattr(slim_attention, "_TOKENS_AT_ONCE", 3)
    lengths, read = [], SlimTokens.read

    def watched(self: SlimTokens, keys: Tensor, *args: Any) -> slim_attention.CachedTokens:
        lengths.append(keys.shape[2])
        return read(self, keys, *args)

    monkeypatch.setattr(SlimTokens, "read", watched)
    model, slim = pair("k+r")
    stock, found, _ = both(model, slim, ALONE | SAMPLE | {"max_new_tokens": 2}, max_prefill_tokens=10)
    assert torch.equal(found, stock)
    assert max(lengths) == 3
    assert len(caches) == 1


def test_rows_that_share_beside_rows_that_do_not(caches: list[SharedContextCache]) -> None:
    model, slim = pair("k+r")
    prompts = {name: value[[0, 0, 1]] for name, value in ALONE.items()}
    stock, found, report = both(model, slim, prompts | SAMPLE)
    assert torch.equal(found, stock)
    assert caches == []  # suffixes of 0, 0 and 19 tokens would be padded too much
    assert report.own_tokens == 0
    stock, found, report = both(model, slim, MANY | SAMPLE)
    assert torch.equal(found, stock)
    assert len(caches) == 1
    assert (report.stored_tokens, report.own_tokens) == (9, 8 * 10)


def test_prompts_of_too_different_lengths_stay_in_nodes(caches: list[SharedContextCache]) -> None:
    model, slim = pair("k+r")
    stock, found, report = both(model, slim, ragged_prompts(24, 3) | SAMPLE)  # 48 tokens of suffixes, for 27
    assert torch.equal(found, stock)
    assert caches == []
    assert report.stored_tokens == 27


def test_eight_bits(caches: list[SharedContextCache]) -> None:
    """Tokens are those of PyTorch's operators with the prompts in nodes, as far as 8 bits let them."""
    slim = to_slim(family_model("qwen2"), TEXT, plan=PLANS["k+r"], cache_dtype="int8", tolerance=1e9)
    call = ALONE | {"max_new_tokens": 2, "do_sample": False}
    with fd.enabled(slim, mode="graph", backend="triton"):
        found = slim.generate(**call)
    assert len(caches) == 1
    assert caches[0].layers[0].storage.suffix.keys.dtype == torch.uint8  # with the scales
    assert torch.equal(found, slim.generate(**call))


def test_suffixes_that_grow_and_rows_that_finish(
    caches: list[SharedContextCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_fastdecode.cache.storage._FIRST_CAPACITY", 4)
    monkeypatch.setattr(modes, "_STEPS_OF_A_CAPTURE", 0)  # of so few steps none pays for a capture
    model, slim = pair("k+r")
    ends = SAMPLE | {"eos_token_id": list(range(3, 30)), "pad_token_id": 0, "max_new_tokens": 16}
    prompts = ragged_prompts(24, 22, 23, 24, 23, shared=17)
    stock, found, report = both(model, slim, prompts | ends)
    assert torch.equal(found, stock)
    assert report.compactions >= 1
    assert caches[0].layers[0].storage.capacity > 24 - 17 + 4


@pytest.mark.parametrize(
    ("prompts", "after", "rows"),
    [
        (BEHIND_A_HEAD, 2, [3, 2, 1]),
        pytest.param(BEHIND_A_HEAD, 0, [3, 2, 1], marks=pytest.mark.exhaustive),
        pytest.param(MANY, 0, None, marks=pytest.mark.exhaustive),
    ],
)
def test_smaller_waves_when_memory_runs_out(
    prompts: dict[str, Tensor],
    after: int,
    rows: list[int] | None,
    caches: list[SharedContextCache],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each wave prefills the prompts of its rows anew, if they have some for themselves."""
    model, slim = pair("k+r")
    call = prompts | SAMPLE | {"do_sample": False}
    _, _, whole = both(model, slim, call, mode="eager")
    caches.clear()
    feed, done = EagerSteps.feed, []

    def failing(self: EagerSteps, ids: Tensor, positions: Tensor) -> Tensor:
        if self.cache.rows > 2 and len(done) >= after:
            raise torch.OutOfMemoryError("on purpose")
        done.append(1)
        return feed(self, ids, positions)

    monkeypatch.setattr(EagerSteps, "feed", failing)
    stock, found, report = both(model, slim, call, mode="eager")
    assert torch.equal(found, stock)
    assert report.waves >= 2
    assert report.nbytes == whole.nbytes
    assert rows is None or [cache.rows for cache in caches] == rows


def test_a_prefill_that_fails_leaves_empty_suffixes(monkeypatch: pytest.MonkeyPatch) -> None:
    slim = pair("k+r")[1]
    seen: list[SharedContextCache] = []
    passes = packed.packed_passes

    def failing(model: PreTrainedModel, cache: SharedContextCache, *args: Any, **kwargs: Any) -> Any:
        if not cache.state.suffix_rows:  # of nodes
            yield from passes(model, cache, *args, **kwargs)
            return
        seen.append(cache)
        yield next(passes(model, cache, *args, **kwargs))
        assert cache.layers[0].storage.suffix is not None
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(packed, "packed_passes", failing)
    with fd.enabled(slim, mode="graph", backend="triton", max_prefill_tokens=7), pytest.raises(torch.OutOfMemoryError):
        slim.generate(**ALONE, **SAMPLE)
    assert seen[0].suffix_lengths.tolist() == [0, 0]
    assert seen[0].layers[0].storage.suffix is None
    assert not seen[0].state.suffix_rows


def test_a_returned_cache_can_be_continued(caches: list[SharedContextCache]) -> None:
    """Its suffixes, prompts and all, become nodes of the next call."""
    model, slim = pair("k+r")
    greedy = {"do_sample": False, "max_new_tokens": 4}
    with fd.enabled(slim, mode="graph", backend="triton"):
        first = slim.generate(**ALONE, **greedy, return_dict_in_generate=True)
        assert first[CACHE] is caches[0]
        mask = torch.cat([ALONE["attention_mask"], torch.ones(2, 4).long()], 1)
        turn = greedy | {"attention_mask": mask}
        loaded = pickle.loads(pickle.dumps(first[CACHE]))
        expected = model.generate(first.sequences, **turn)
        for cache in (first[CACHE], loaded):
            assert torch.equal(slim.generate(first.sequences, **turn, **{CACHE: cache}), expected)
            assert fd.explain(slim).last_call.known_tokens == (27, 22)
    assert len(caches) == 1


@pytest.mark.parametrize("lengths", [(28, 27), (18, 18)])
def test_windows_that_hide_nothing(lengths: tuple[int, int], caches: list[SharedContextCache]) -> None:
    """A row's own prompt counts once in its length, so that the call does not run stock."""
    model, slim = family_pair("phi3-window", "k")  # a window of 40 tokens
    prompts = ragged_prompts(*lengths, shared=8)
    stock, found, report = both(model, slim, prompts | SAMPLE, min_shared_tokens=4)
    assert torch.equal(found, stock)
    assert report.path == "shared"
    assert len(caches) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype, caches: list[SharedContextCache]) -> None:
    """Chunks that are read back have the dtype of the pass, not of the weights."""
    slim = pair("k+r")[1]
    with torch.autocast("cpu", dtype), fd.enabled(slim, mode="eager", backend="triton", max_prefill_tokens=7):
        slim.generate(**ragged_prompts(24), do_sample=False, max_new_tokens=1)
    assert len(caches) == 1


@pytest.mark.parametrize(
    ("plan", "options"),
    [("mixed", {}), ("k+r", {"backend": "auto"}), ("k+r", {"reuse_prefix": True})],
    ids=["layers with values", "no kernels", "kept prefixes"],
)
def test_where_prompts_stay_in_nodes(plan: str, options: dict[str, Any], caches: list[SharedContextCache]) -> None:
    slim = pair(plan)[1]
    options = {"mode": "graph", "backend": "triton"} | options
    if options["backend"] == "auto":  # captured steps would need kernels
        options |= {"mode": "eager", "min_saved_tokens": 1, "min_shared_tokens": 8}
    with fd.enabled(slim, **options):
        slim.generate(**BEHIND_A_HEAD, **SAMPLE)
        assert fd.explain(slim).last_call.path == "shared"
    assert caches == []
