"""`slim_rope` of a model that is in use: each call goes by it, and no cache of the other layout is read."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.conversion.to_slim import to_slim

from .family_models import family_pair
from .slim_models import PLANS, TEXT, pair

OTHER = {"raw": "unrotate", "unrotate": "raw"}
ROPES = pytest.mark.parametrize("rope", OTHER)


def slim_model(rope: str, plan: str = "k", **options: Any) -> PreTrainedModel:
    return to_slim(pair(plan)[0], TEXT, plan=PLANS[plan], rope=rope, **options)


def test_between_calls() -> None:
    model, slim = pair()[0], deepcopy(pair()[1])
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(TEXT[None, :20], **options)
    for rope in ("unrotate", "raw", "unrotate"):
        slim.config.slim_rope = rope
        assert torch.equal(slim.generate(TEXT[None, :20], **options), expected)


@ROPES
@pytest.mark.parametrize("plan", ["k", "k+r"])
@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
@torch.no_grad()
def test_within_a_cache(rope: str, plan: str, cache_dtype: str) -> None:
    slim = slim_model(rope, plan, cache_dtype=cache_dtype, tolerance=1e9)
    for cache in (DynamicCache(config=slim.config), StaticCache(config=slim.config, max_cache_len=32)):
        slim.config.slim_rope = rope
        slim(TEXT[None, :20], **{CACHE: cache})
        held = [(layer.keys.shape, layer.values.shape) for layer in cache.layers]
        slim.config.slim_rope = OTHER[rope]
        with pytest.raises(ValueError, match=f"with slim_rope '{OTHER[rope]}', and the cache holds .* begin a new"):
            slim(TEXT[None, 20:21], **{CACHE: cache})
        assert [(layer.keys.shape, layer.values.shape) for layer in cache.layers] == held


@torch.no_grad()
def test_caches_of_ordinary_models() -> None:
    model, slim = pair()
    cache = DynamicCache(config=model.config)
    model(TEXT[None, :20], **{CACHE: cache})
    with pytest.raises(ValueError, match=r"caches 4 numbers per token .* holds 4 \* 16; begin a new cache"):
        slim(TEXT[None, 20:21], **{CACHE: cache})


@ROPES
@pytest.mark.parametrize("plan", ["k", "k+r"])
@torch.no_grad()
def test_within_a_shared_context_cache(rope: str, plan: str) -> None:
    slim = slim_model(rope, plan)
    with fd.enabled(slim):
        cache = fd.prefill(slim, TEXT[None, :20])
        slim(TEXT[None, 20:23], **{CACHE: cache})
        slim.config.slim_rope = OTHER[rope]
        with pytest.raises(ValueError, match="make it with"):
            slim(TEXT[None, 23:25], **{CACHE: cache})
        with pytest.raises(ValueError, match="begin a new cache where slim_rope changes"):
            cache.fork()


@torch.no_grad()
def test_unknown_values_are_refused() -> None:
    slim = deepcopy(pair()[1])
    for wrong in ("Unrotate", None, True):
        slim.config.slim_rope = wrong
        with pytest.raises(ValueError, match=f"slim_rope must be one of raw, unrotate, got {wrong!r}"):
            slim(TEXT[None, :20])
    long = deepcopy(family_pair("phi3-long", "k")[1])
    long.config.slim_rope = "unrotate"
    with pytest.raises(ValueError, match="of type 'longrope' change with the length of the text; set it to 'raw'"):
        long(TEXT[None, :20])
