"""Positions of cached keys, counted from masks, or cached beside keys after RoPE (`slim_rope`); tokens are stock's."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import QuantizedCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.kv import SuffixLengths
from hf_fastdecode.conversion.convert import Settings, convert_checkpoint
from hf_fastdecode.conversion.fit.cached_numbers import DIGITS, position_bytes, with_positions, without_positions
from hf_fastdecode.conversion.layer_converter import PlanChoice
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.patches.layers.rotation import key_positions, require_counted, visible_slots

from ..cases import exhaustive_but
from ..conversion.checkpoints import VOCABULARY, saved
from ..tiny_models import ragged_prompts
from .family_models import FAMILIES, WITH_INPUTS, family_condition, family_model, family_pair
from .slim_models import PLANS, TEXT, condition, generate, logits, pair, relative

EPS = torch.finfo(torch.float32).eps
ROTARY = [name for name in FAMILIES if name not in (*WITH_INPUTS, "phi3-long")]  # whose frequencies change


def unrotating(plan: str = "k+r", variant: str = "plain") -> tuple[PreTrainedModel, PreTrainedModel]:
    """An ordinary Llama and its slim form that caches keys after RoPE; not to be changed."""
    return pair(plan, variant, "unrotate")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_positions_are_exact(dtype: torch.dtype) -> None:
    positions = torch.tensor([[0, 1, 255, 256, 257], [-1, -(2**23), 65535, 131071, 2**23 - 1]])
    stored = torch.arange(30).view(2, 1, 5, 3).to(dtype)
    kept, read = without_positions(with_positions(stored, positions))
    assert torch.equal(kept, stored)
    assert torch.equal(read, positions)
    _, shared = without_positions(with_positions(stored, positions[:1]))
    assert torch.equal(shared, positions[:1].expand(2, -1))


@pytest.mark.parametrize("name", exhaustive_but(ROTARY[::3], ROTARY))
def test_greedy_over_padded_rows(name: str) -> None:
    model = family_model(name)
    slim = to_slim(model, TEXT, plan=PLANS["k+r"], rope="unrotate")
    expected = generate(model)
    found = generate(slim, **{CACHE: DynamicCache(config=slim.config)})
    assert torch.equal(found.sequences, expected.sequences)
    error = relative(torch.stack(found.logits), torch.stack(expected.logits))
    assert error < family_condition(slim) * EPS
    assert [layer.values.shape[-1] for layer in found[CACHE].layers] == [4 + DIGITS, 9 + DIGITS]
    with fd.enabled(slim):
        samples = {"do_sample": True, "top_k": 0, "num_return_sequences": 3}
        shared = generate(slim, **samples).sequences
        assert fd.explain(slim).last_call.path == ("stock" if name == "phi3-window" else "shared")
    assert torch.equal(shared, generate(model, **samples).sequences)


@pytest.mark.parametrize("variant", ["biases", "yarn", "wide-heads"])
@pytest.mark.parametrize("plan", ["k", "mixed"])
def test_llama(plan: str, variant: str) -> None:
    """YaRN's tables have an attention factor, which un-rotation divides by."""
    expected, found = (generate(model) for model in unrotating(plan, variant))
    assert torch.equal(found.sequences, expected.sequences)
    error = relative(torch.stack(found.logits), torch.stack(expected.logits))
    assert error < condition(pair(plan, variant)[0]) * EPS


@pytest.mark.parametrize("name", ["phi3-window", "codegen"])
def test_static_caches(name: str) -> None:
    model, slim = family_pair(name, "k+r")
    slim = deepcopy(slim)
    slim.config.slim_rope = "unrotate"  # of a model that was converted otherwise: no weight differs
    options = {**ragged_prompts(30, 70), "cache_implementation": "static"}
    assert torch.equal(generate(slim, **options).sequences, generate(model, **options).sequences)


JUMPS = [torch.arange(20), torch.arange(7), torch.tensor([60, 61, 61, 62, 400]), torch.tensor([5])]
"""Positions of four passes: they begin again, repeat, jump and go back."""


def in_passes(model: PreTrainedModel, cache: Any, passes: list[Tensor], rows: int = 1) -> Tensor:
    texts = TEXT[: sum(map(len, passes)) * rows].view(rows, -1).split([len(one) for one in passes], 1)
    logits = [model(ids, **{CACHE: cache}, position_ids=one[None]).logits for ids, one in zip(texts, passes)]
    return torch.cat(logits, 1)


@torch.no_grad()
@pytest.mark.parametrize(
    "first", [[], [torch.cat([torch.arange(-5, 15), torch.arange(20)])]], ids=["passes", "packed"]
)
def test_any_positions(first: list[Tensor]) -> None:
    """Keys are rotated when they are cached, so that no later pass needs to count their positions."""
    model, slim = unrotating()
    passes = [*first, *JUMPS]
    expected, found = (in_passes(one, DynamicCache(config=one.config), passes) for one in (model, slim))
    assert relative(found, expected) < condition(model) * EPS
    if first:
        with pytest.raises(ValueError, match=r"position_ids must rise by 1"):
            in_passes(pair()[1], DynamicCache(), passes)


@torch.no_grad()
def test_any_positions_of_suffixes() -> None:
    """In shared-context caches too, also after suffixes have become nodes."""
    model, slim = unrotating()
    expected = in_passes(model, DynamicCache(config=model.config), JUMPS)
    with fd.enabled(slim):
        cache = fd.prefill(slim, TEXT[None, :20])
        ids = TEXT[None, 20:33].split([len(one) for one in JUMPS[1:]], 1)
        found = []
        for part, positions in zip(ids, JUMPS[1:]):
            found.append(slim(part, **{CACHE: cache}, position_ids=positions[None]).logits)
            cache = cache.fork()
    assert relative(torch.cat(found, 1), expected[:, 20:]) < condition(model) * EPS


@torch.no_grad()
@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_suffixes_of_different_lengths(cache_dtype: str) -> None:
    """Slots after a suffix are undefined: no element and no position of them may be read."""
    model = pair()[0]
    slim = to_slim(model, TEXT, plan=PLANS["k+r"], cache_dtype=cache_dtype, tolerance=1e9, rope="unrotate")
    found = []
    with fd.enabled(slim):
        for poison in (False, True):
            cache = fd.prefill(slim, TEXT[None, :20])
            cache.batch_repeat_interleave(3)
            slim(TEXT[20:32].view(3, 4), **{CACHE: cache})
            cache.drop_last([1, 3, 2])
            if poison:
                lengths = cache.state.suffixes.lengths
                cache.state.suffixes.lengths = SuffixLengths(4, lengths.per_row)
                for layer in cache.layers:
                    for part in layer.storage.suffix:
                        for row, length in enumerate((3, 1, 2)):
                            part[row, :, length:] = 255 if part.dtype == torch.uint8 else torch.nan
            found.append(slim(TEXT[40:46].view(3, 2), **{CACHE: cache}).logits[:, -1])
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
    if cache_dtype == "auto":
        for row, kept in enumerate((3, 1, 2)):
            text = torch.cat([TEXT[:20], TEXT[20 + 4 * row :][:kept], TEXT[40 + 2 * row : 42 + 2 * row]])
            torch.testing.assert_close(found[0][row], model(text[None]).logits[0, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_errors_are_alike_and_as_planned(cache_dtype: str) -> None:
    """Rotation keeps norms, and the plan measures what is cached: its bytes, positions included, and its errors."""
    model = family_model("qwen2").bfloat16()
    choice: dict[str, Any] = {"plan": PLANS["k+r"], "cache_dtype": cache_dtype, "tolerance": 1e9}
    oracle = logits(deepcopy(model).double())
    errors = {}
    for rope in ("raw", "unrotate"):
        slim = to_slim(model, TEXT, rope=rope, **choice)
        cache = DynamicCache(config=slim.config)
        errors[rope] = relative(logits(slim, cache), oracle)
        tokens = cache.get_seq_length()
        found = [(layer.keys.nbytes + layer.values.nbytes) // tokens for layer in cache.layers]
        dtype = torch.int8 if cache_dtype == "int8" else torch.float16
        scales = 2 * (4 + 1) if cache_dtype == "int8" else 0
        beside = position_bytes(dtype) if rope == "unrotate" else 0
        assert found == [(64 + rank) * dtype.itemsize + scales + beside for rank in (4, 9)]
    assert 0.5 < errors["unrotate"] / errors["raw"] < 2


def test_gradients() -> None:
    model, slim = unrotating()
    gradients = []
    for one in (model, slim):
        trained = deepcopy(one).train()
        trained(TEXT[None, :40], labels=TEXT[None, :40]).loss.backward()
        gradients.append(trained.get_input_embeddings().weight.grad)
    assert relative(gradients[1], gradients[0]) < condition(model) * EPS * 10


@pytest.mark.usefixtures("undrawn")
def test_a_checkpoint(tmp_path: Path) -> None:
    model = family_model("gpt_neox", vocab_size=VOCABULARY)
    source, folder, back = (tmp_path / one for one in ("source", "slim", "full"))
    saved(model, source)
    reports = {}
    for rope, target in (("raw", None), ("unrotate", folder)):
        choice = PlanChoice(rank=5, rope=rope)
        reports[rope] = convert_checkpoint(Settings(str(source), target, choice=choice, verify=target is not None))
    sizes = [report["bytes_per_token"] for report in reports.values()]
    assert sizes[1] - sizes[0] == 2 * position_bytes(torch.float32)
    for raw, other in zip(*(report["layers"] for report in reports.values())):
        assert raw["value_error"] != other["value_error"]
        assert 0.5 < other["output_error"] / raw["output_error"] < 2
    slim = AutoModelForCausalLM.from_pretrained(folder)
    assert slim.config.slim_rope == "unrotate"
    assert torch.equal(generate(slim).sequences, generate(model).sequences)
    convert_checkpoint(Settings(str(folder), back, format="full"))
    assert not any(name.startswith("slim_") for name in AutoConfig.from_pretrained(back).to_dict())


@torch.no_grad()
def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"`rope` must be one of raw, unrotate, got 'both'"):
        to_slim(pair()[0], TEXT, rope="both")
    with pytest.raises(ValueError, match=r"slim_rope must be one of raw, unrotate, got 'both'"):
        AutoConfig.for_model("slim_llama", slim_rope="both")
    with pytest.raises(ValueError, match="needs RoPE, and slim_gpt2 has none; set it to 'raw'"):
        to_slim(family_model("gpt2"), TEXT, rope="unrotate")
    with pytest.raises(
        ValueError, match="rope 'unrotate' needs fixed frequencies, and those of RoPE of type 'longrope'"
    ):
        to_slim(family_model("phi3-long"), TEXT, rope="unrotate")
    with pytest.raises(ValueError, match=r"slim_t5 has none; set it to 'raw'"):
        AutoConfig.for_model("slim_t5", slim_rope="unrotate")
    for name, plan, reason in (
        ("gpt2", "x", r"slim_gpt2 has none; set it to 'raw'"),
        ("phi3-long", "k", r"needs fixed frequencies, .* type 'longrope' change .*; set it to 'raw'"),
        ("llama", "k", r"slim_rope must be one of raw, unrotate, got 'both'"),
    ):
        slim = deepcopy(family_pair(name, plan)[1])
        slim.config.slim_rope = "unrotate" if name != "llama" else "both"
        with pytest.raises(ValueError, match=reason):
            slim(TEXT[None, :4])
        with pytest.raises(ValueError, match=reason):
            type(slim.config)(**slim.config.to_dict())
    cache = DynamicCache()
    cache.__class__ = QuantizedCache  # whose backends are not installed
    with pytest.raises(ValueError, match="a QuantizedCache rounds the positions"):
        unrotating()[1](TEXT[None, :4], **{CACHE: cache})


OTHER = {"raw": "unrotate", "unrotate": "raw"}
ROPES = pytest.mark.parametrize("rope", OTHER)


def slim_model(rope: str, plan: str = "k", **options: Any) -> PreTrainedModel:
    return to_slim(pair(plan)[0], TEXT, plan=PLANS[plan], rope=rope, **options)


def test_between_calls() -> None:
    model, slim = pair()[0], deepcopy(pair()[1])
    options = {"max_new_tokens": 8, "do_sample": False}
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
    with pytest.raises(ValueError, match=r"caches 4 elements per token .* holds 4 \* 16; begin a new cache"):
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


MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1]])
POSITIONS = (MASK.cumsum(-1) - 1).masked_fill(MASK == 0, 0)  # as generate makes them


@pytest.mark.parametrize("cached", [0, 3, 5, torch.tensor(4)])
@pytest.mark.parametrize("shift", [0, 100])
@pytest.mark.parametrize("slots", [6, 9])
def test_left_padding_and_holes(cached: int | torch.Tensor, shift: int, slots: int) -> None:
    """Tokens of this pass have the positions given, cached ones those before, whatever the first number is."""
    given = POSITIONS[:, int(cached) :] + shift
    found = key_positions(given, visible_slots(MASK), cached, slots)
    assert found.shape == (3, slots)
    assert torch.equal(found[:, :6][MASK == 1], (POSITIONS + shift)[MASK == 1])
    assert torch.equal(found[:, int(cached) : 6], given)


def test_without_a_mask_slots_are_positions() -> None:
    found = key_positions(torch.tensor([[7, 8]]), None, 4, 8)
    assert found[0, :6].tolist() == [3, 4, 5, 6, 7, 8]


def test_masks_of_four_dimensions() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    boolean = (MASK[:, None, None, :] == 1) & causal
    added = torch.where(boolean, 0.0, torch.finfo(torch.float32).min)
    for mask in (boolean, added):
        assert torch.equal(visible_slots(mask), MASK == 1)
        assert torch.equal(visible_slots({"full_attention": mask}), MASK == 1)
    window = boolean & ~causal.tril(-4)  # of 4 tokens: the last one sees 4 of 6 slots
    assert torch.equal(visible_slots(window), MASK == 1)
    assert visible_slots(None) is None
    assert torch.equal(visible_slots(MASK, 2), MASK[:, 2:] == 1)
    with pytest.raises(ValueError, match="of 2 or 4 dimensions, got 3"):
        visible_slots(boolean[:, 0])


def test_rows_of_padding_alone_are_harmless() -> None:
    found = key_positions(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 4, dtype=torch.bool), 2, 4)
    assert found.shape == (1, 4)


def test_positions_that_skip() -> None:
    require_counted(POSITIONS[:2], MASK[:2] == 1)
    require_counted(POSITIONS[:, 3:], None)
    with pytest.raises(ValueError, match="must rise by 1"):
        require_counted(torch.tensor([[0, 1, 0, 1]]), None)
