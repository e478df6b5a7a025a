"""Positions in several planes (M-RoPE): one of equal planes, and prefill by rows where they differ."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation import call_context
from hf_fastdecode.generation.forward_pass import Positions, reduced
from hf_fastdecode.generation.prompts import first_pass
from hf_fastdecode.generation.prompts.by_rows import Rows
from hf_fastdecode.generation.prompts.prompt_plan import PromptGroup

from ..architectures.classes import tiny_model_of
from ..tiny_models import ragged_prompts, seeded
from .calls import as_in_stock, tokens_embedded

CLASSES = [
    "Qwen2VLForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Ernie4_5_VLMoeForConditionalGeneration",
]
PROMPTS = ragged_prompts(70, 90, 81, shared=60)
CALLS = [
    {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
    {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
]


@pytest.fixture(scope="module", params=CLASSES)
def planar(request):
    return tiny_model_of(request.param)


def planes_of(model, *, differ):
    """Positions ``[4, 3, 90]`` of the prompts, as for an image that begins at token 20: text, time, height, width."""
    text = (PROMPTS["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    planes = text[None].repeat(4, 1, 1)
    if differ:
        seen = text >= 20
        planes[2] = torch.where(seen, 20 + (text - 20) // 4, text)
        planes[3] = torch.where(seen, 20 + (text - 20) % 4, text)
    return planes


def run(model, call, **inputs):
    torch.manual_seed(0)
    return seeded(lambda: model.generate(**PROMPTS | inputs, **call, max_new_tokens=8))


@pytest.mark.parametrize("call", CALLS, ids=["sample", "beams"])
def test_text_alone_is_packed(planar, call):
    """What prompts begin with is computed once."""
    report = as_in_stock(planar, lambda: run(planar, call), "shared")
    assert report.prefilled_tokens == 60 + 10 + 30 + 21


@pytest.mark.parametrize(
    ("differ", "call", "limit"),
    [(True, CALLS[0], 16384), (True, CALLS[1], 1), (False, CALLS[0], 100), (False, CALLS[1], 16384)],
    ids=["planes differ", "planes differ, beams, a row at a time", "by force, a row at a time", "by force, beams"],
)
def test_by_rows(planar, call, differ, limit, monkeypatch):
    """A row for each distinct prompt, however many samples or beams it has, and in passes of few positions."""
    if not differ:
        for module in (call_context, first_pass):
            monkeypatch.setattr(module, "reduced", lambda ids, mask: Positions(ids, 0 if ids is None else len(ids)))
    planes = planes_of(planar, differ=differ)
    stock = run(planar, call, position_ids=planes)
    with fd.enabled(planar, max_prefill_tokens=limit), tokens_embedded(planar) as counted:
        assert torch.equal(run(planar, call, position_ids=planes), stock)
        report = fd.explain(planar).last_call
    assert report.path == "shared", report.reason
    assert report.prefilled_tokens == 70 + 90 + 81
    prefill = [count for count in counted if count > 9]
    assert sum(prefill) == 3 * 90
    assert len(prefill) == (1 if limit > 300 else 3)


def test_planes_that_differ_matter(planar):
    """Otherwise the tests above would show nothing."""
    both = [run(planar, CALLS[1], position_ids=planes_of(planar, differ=differ)) for differ in (True, False)]
    assert not torch.equal(*both)


def test_embeddings(planar):
    if planar.config.model_type.startswith("ernie"):
        pytest.skip("its class takes no inputs_embeds")
    embeddings = planar.get_input_embeddings()(PROMPTS["input_ids"]).detach()
    for differ in (True, False):
        given = {"inputs_embeds": embeddings, "position_ids": planes_of(planar, differ=differ)}
        given["attention_mask"] = PROMPTS["attention_mask"]
        as_in_stock(planar, lambda given=given: planar.generate(**given, **CALLS[0], max_new_tokens=6), "shared")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"return_dict_in_generate": True}, "the planes of position_ids differ, and the call's cache would be kept"),
        ({"output_hidden_states": True}, "output_hidden_states is for positions of text"),
    ],
)
def test_planes_that_differ_leave_no_cache(planar, more, reason):
    """It would know no planes, and serve other prompts that begin alike."""
    planes = planes_of(planar, differ=True)
    with fd.enabled(planar):
        run(planar, CALLS[0] | more, position_ids=planes)
        report = fd.explain(planar).last_call
    assert (report.path, reason in report.reason) == ("stock", True), report.reason


def test_kept_caches_of_text(planar):
    """Also of a model that has not run before: what a call sets anew, as an offset of positions, is no other model."""
    model, ids = copy.deepcopy(planar), PROMPTS["input_ids"][1:2]
    model.model.rope_deltas = None
    call = CALLS[0] | {"max_new_tokens": 6}
    stock = seeded(lambda: planar.generate(ids, **call))
    with fd.enabled(model):
        kept = fd.prefill(model, ids[:, :60])
        for _ in range(2):
            assert torch.equal(seeded(lambda: model.generate(ids, **call, **{CACHE: kept})), stock)
            assert fd.explain(model).last_call.prefilled_tokens == 30
            model.generate(ids[:, :70], max_new_tokens=2)  # sets the offset anew
        with pytest.raises(ValueError, match="is for positions of text, and the planes of position_ids differ"):
            run(model, CALLS[0], position_ids=planes_of(model, differ=True), **{CACHE: kept})
        for rows in (1, 3):
            model.model.rope_deltas = torch.full((rows, 1), -7)  # as a call with images leaves it
            assert torch.equal(seeded(lambda: model.generate(ids, **call, **{CACHE: kept})), stock)
            assert fd.explain(model).last_call.prefilled_tokens == 30


@pytest.mark.parametrize("call", CALLS, ids=["sample", "beams"])
def test_a_mask_with_a_hole(planar, call):
    mask = PROMPTS["attention_mask"].clone()
    mask[:, 65] = 0
    more = {"attention_mask": mask, "return_dict_in_generate": True}
    as_in_stock(planar, lambda: run(planar, call, **more).sequences)


def test_planes_that_are_equal_but_for_padding_are_one():
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    text = torch.tensor([[0, 0, 1], [0, 1, 2]])
    planes = text[None].repeat(3, 1, 1)
    planes[1:, 0, 0] = 1
    assert reduced(None, mask) == Positions(None)
    assert reduced(text, mask) == Positions(text)
    found = reduced(planes, mask)
    assert (found.planes, found.differ) == (3, False)
    assert torch.equal(found.ids, text)
    assert reduced(planes, None).differ
    planes[2, 1, 2] = 5
    assert reduced(planes, mask).differ


def test_the_first_row_of_each_prompt():
    groups = [PromptGroup(torch.tensor([1]), 2), PromptGroup(torch.tensor([2]), 3), PromptGroup(torch.tensor([3]), 1)]
    ids = torch.arange(6)[:, None]
    one = Rows(ids, None, torch.zeros(3, 1, 1)).distinct(groups)
    assert one.inputs.flatten().tolist() == [0, 2, 5]
    assert one.position_ids.shape == (3, 1, 1)
    each = Rows(ids, ids + 1, ids.T[..., None].expand(3, -1, -1)).distinct(groups).part(torch.tensor([1, 2]))
    assert (each.inputs.flatten().tolist(), each.attention_mask.flatten().tolist()) == ([2, 5], [3, 6])
    assert each.position_ids[2].flatten().tolist() == [2, 5]
