"""Positions that are not those of the attention mask, and calls that a class's own `generate` hands on."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.interface import without_blocks
from hf_fastdecode.generation.interception.switches import OwnGenerate, WrappedMethods

from ..architectures.classes import class_named, generating_classes, tiny_model_of
from ..tiny_models import ragged_prompts, seeded, tiny_model, tiny_model_of_type
from .calls import as_in_stock

RAGGED = ragged_prompts(57, 71, 64, shared=40)
SAMPLES = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 6}
BEAMS = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
BY_ROWS, PACKED = 57 + 71 + 64, 40 + 17 + 31 + 24

CLASSES = {
    "Exaone4_5_ForConditionalGeneration": BY_ROWS,  # gives no positions, and counts padding
    "Kosmos2TextForCausalLM": BY_ROWS,  # derives positions from ids
    "Gemma4UnifiedForConditionalGeneration": PACKED,  # makes masks with blocks, also where there are no images
    "JanusForConditionalGeneration": PACKED,  # has a generate of its own
}


@pytest.mark.parametrize("name", CLASSES)
def test_tokens_equal_stock(name):
    if name not in generating_classes():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = tiny_model_of(name)
    for call in (SAMPLES, BEAMS):
        stock = seeded(lambda call=call: model.generate(**RAGGED, **call))
        report = as_in_stock(model, lambda call=call: model.generate(**RAGGED, **call), "shared", min_saved_tokens=1)
        assert report.prefilled_tokens == CLASSES[name]
        with fd.enabled(model, min_saved_tokens=1):
            kept = {CACHE: fd.prefill(model, RAGGED["input_ids"][1:2, :40])}
            assert torch.equal(seeded(lambda call=call, kept=kept: model.generate(**RAGGED, **call, **kept)), stock)


def test_positions_from_the_cache_are_not_captured():
    model = tiny_model_of("Kosmos2TextForCausalLM")
    with fd.enabled(model, mode="graph"), pytest.raises(ValueError, match="derives positions from the length of"):
        model.generate(**RAGGED, **SAMPLES)


@pytest.fixture(scope="module")
def bart():
    sizes = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    return tiny_model_of_type("bart", **sizes, max_position_embeddings=512)


@pytest.mark.parametrize("call", [SAMPLES, BEAMS], ids=["sample", "beams"])
@pytest.mark.parametrize("more", [{"return_dict_in_generate": True}, {"output_hidden_states": True}], ids=str)
def test_padding_in_positions_leaves_no_cache(bart, call, more):
    """It would serve other prompts that begin alike, at other positions."""
    more = more | {"return_dict_in_generate": True}
    report = as_in_stock(
        bart, lambda: seeded(lambda: bart.generate(**RAGGED, **call, **more)).sequences, "stock", min_saved_tokens=1
    )
    assert "other positions than those counted from a row's first" in report.reason


def test_padding_in_positions_keeps_no_prompts(bart):
    """Prompts of one length are packed, and kept for later calls; those of a batch with padding are neither."""
    alike, call = ragged_prompts(64, 64, shared=40), SAMPLES | {"max_new_tokens": 3}
    with fd.enabled(bart, reuse_prefix=True, min_saved_tokens=1):
        for prompts, new in ((RAGGED, BY_ROWS), (alike, 88), (alike, 0), (RAGGED, BY_ROWS)):
            shared = seeded(lambda prompts=prompts: bart.generate(**prompts, **call))
            assert fd.explain(bart).last_call.prefilled_tokens == new
    assert torch.equal(shared, seeded(lambda: bart.generate(**RAGGED, **call)))


def test_blocks_of_images_stay():
    masking = pytest.importorskip("transformers.masking_utils")
    causal = masking.causal_mask_function
    for blocks, shown in (([-1, -1, -1], True), ([-1, 0, 0], False)):
        union = masking.or_masks(causal, masking.blockwise_overlay(torch.tensor([blocks])))
        assert (without_blocks(union, 3) is causal) is shown
        assert without_blocks(union, 1) is causal
    other = masking.or_masks(causal, lambda *places: True)
    assert without_blocks(other, 3) is other
    assert without_blocks(causal, 3) is causal


def test_calls_that_a_class_does_not_hand_on():
    if "JanusForConditionalGeneration" not in generating_classes():
        pytest.skip("this transformers has no Janus")
    janus = class_named("JanusForConditionalGeneration")
    replaced = type("Replaced", (janus,), {"generate": lambda self, **kwargs: None})
    own, others = (OwnGenerate(WrappedMethods(one, {}), one) for one in map(object.__new__, (janus, replaced)))
    assert own.hands_on({})
    assert not own.hands_on({"generation_mode": "image"})
    assert not others.hands_on({})


def tokens_or_error(model, ids, call):
    try:
        return seeded(lambda: model.generate(ids, **call)).tolist()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("name", ["MambaForCausalLM", "NemotronHForCausalLM", "BloomForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("call", [{"do_sample": True, "num_return_sequences": 2}, {"num_beams": 2}], ids=str)
def test_positions_of_one_row_for_several_prompts(name, call):
    """transformers repeats the row as often as a prompt: nothing reads it, or stock raises."""
    model, ids = tiny_model_of(name), torch.randint(5, 60, (2, 45))
    call = call | {"position_ids": torch.arange(45)[None], "max_new_tokens": 3}

    stock = tokens_or_error(model, ids, call)
    with fd.enabled(model, min_saved_tokens=1):
        assert tokens_or_error(model, ids, call) == stock
        path = fd.explain(model).last_call.path
    unread = ["BloomForCausalLM", *(["MambaForCausalLM"] if CACHE == "cache" else [])]  # before 5.24, Mamba runs stock
    assert path in (("shared",) if name in unread else ("failed", "stock"))


_ALIBI = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True, "multi_query": False}
UNREAD = {
    "bloom": lambda: tiny_model_of("BloomForCausalLM"),
    "mpt": lambda: tiny_model_of("MptForCausalLM"),
    "falcon": lambda: tiny_model_of_type("falcon", **_ALIBI),
    "bart": lambda: tiny_model_of("BartForCausalLM"),
    "mamba": lambda: tiny_model_of("MambaForCausalLM"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_positions_that_no_code_reads(name):
    """Whatever their shape and values: tokens are those of stock, and sharing is that of a call without them."""
    model, width = UNREAD[name](), RAGGED["input_ids"].shape[1]
    inputs = {key: value[[0, 0, 1, 1, 2, 2]] for key, value in RAGGED.items()}
    hidden = {"output_hidden_states": True, "return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 3}
    given = [torch.randint(0, 60, shape) for shape in ((3, 6, width), (4, 1, width), (6, width), (width,))]
    for call in (SAMPLES, BEAMS, hidden):

        def tokens(call=call, **more):
            found = seeded(lambda: model.generate(**inputs, **call, **more))
            return found if isinstance(found, torch.Tensor) else found.sequences

        stock = tokens()
        with fd.enabled(model, min_saved_tokens=1):
            tokens()
            path = fd.explain(model).last_call.path
            for positions in given:
                assert torch.equal(tokens(position_ids=positions), stock)
                assert fd.explain(model).last_call.path == path
    if name not in ("bart", "mamba"):
        assert path == "shared"


@pytest.mark.parametrize("name", UNREAD)
def test_booleans_as_positions_that_no_code_reads(name):
    """Transformers counts positions on, whether or not they are read, and raises for booleans."""
    model, ids = UNREAD[name](), ragged_prompts(40)["input_ids"]
    call = {"input_ids": ids, "position_ids": torch.ones(1, 40, dtype=torch.bool), **SAMPLES}
    with pytest.raises(NotImplementedError, match="Bool"):
        model.generate(**call)
    with fd.enabled(model, min_saved_tokens=1), pytest.raises(NotImplementedError, match="Bool"):
        model.generate(**call)


@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_positions_that_no_code_reads_in_direct_passes(name):
    model, ids = UNREAD[name](), RAGGED["input_ids"][1:2]
    with torch.no_grad():
        stock = model(ids).logits[:, 40:]
        with fd.enabled(model):
            cache = fd.prefill(model, ids[:, :40])
            places = torch.randint(0, 60, (3, 1, ids.shape[1] - 40))
            found = model(ids[:, 40:], position_ids=places, **{CACHE: cache}).logits
    torch.testing.assert_close(found, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("call", [{"do_sample": True, "num_return_sequences": 2}, {"num_beams": 2}], ids=str)
def test_ids_of_any_dtype(dtype, call):
    """Embeddings look up int64 and int32; for others stock's error is raised."""
    model, ids = tiny_model("llama-gqa"), torch.randint(5, 60, (1, 80)).to(dtype)

    call = call | {"max_new_tokens": 3}
    stock = tokens_or_error(model, ids, call)
    assert isinstance(stock, str) == (dtype is not torch.int32)
    with fd.enabled(model, min_saved_tokens=1):
        assert tokens_or_error(model, ids, call) == stock


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_positions_that_are_no_rows_of_a_table(dtype):
    """They equal those of the mask, and stock raises where the model looks them up."""
    model = tiny_model("gpt2")
    prompt = ragged_prompts(40)
    call = prompt | {"position_ids": torch.arange(40)[None].to(dtype), "max_new_tokens": 2, "num_return_sequences": 2}
    with pytest.raises(RuntimeError) as stock:
        model.generate(**call, do_sample=True)
    with (
        fd.enabled(model, min_saved_tokens=1, reuse_prefix=True),
        pytest.raises(RuntimeError, match=re.escape(str(stock.value))),
    ):
        model.generate(**call, do_sample=True)
