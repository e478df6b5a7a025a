"""Prompts with images: each distinct input once, by rows, as in stock."""

from __future__ import annotations

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation.inputs import features
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.prompts import by_rows, prefixes

from ..architectures.classes import tiny_model_of
from ..image_inputs import prompts_with_images
from ..module_calls import before_calls
from ..tiny_models import seeded
from .calls import as_in_stock
from .image_calls import CLASSES, SEVERAL, SMALL, TALL, TOWERS, WITH_STATES_TOO, run

OTHERS = {
    "LlavaForConditionalGeneration": "image",
    "Gemma3ForConditionalGeneration": "image",  # tokens of an image see each other, and windows end in prompts
    "PaliGemmaForConditionalGeneration": "image",  # so do those of a prompt; positions begin at 1
    "Idefics3ForConditionalGeneration": "image",  # a row of images for each prompt
    "Qwen3VLForConditionalGeneration": "video",
    "Qwen2AudioForConditionalGeneration": "audio",
}


FEW = {"min_saved_tokens": 1, "min_shared_tokens": 4}


@pytest.fixture(scope="module", params=CLASSES)
def model(request):
    return tiny_model_of(request.param)


def compared(model, inputs, call, **options):
    """The report of a call with stock's tokens, and the patches of each run of the vision tower after stock's."""
    counted = []

    def called():
        counted.clear()
        return run(model, inputs, call)

    with before_calls(model.model.visual, lambda args, kwargs: counted.append(_images_of(args, kwargs))):
        return as_in_stock(model, called, **{"min_saved_tokens": 1, **options}), counted


@pytest.mark.parametrize("call", ["samples", "beams"])
def test_different_images(model, call):
    """As many images as there are, of any sizes, and a prompt without one."""
    inputs = prompts_with_images(model, *SEVERAL)
    report, counted = compared(model, inputs, call)
    assert report.path == "shared", report.reason
    assert report.prefilled_tokens == int(inputs["attention_mask"].sum())
    assert counted == [16 + 32 + 24]


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms(name):
    """The vision tower, or the audio encoder, sees each distinct input once."""
    model = tiny_model_of(name)
    inputs = prompts_with_images(model, (5, SMALL, 9), (3, TALL, 12), kind=OTHERS[name])
    stock = {call: run(model, inputs, call) for call in ("greedy", "samples")}
    other = {key: part.flip(-1) * 2 if part.is_floating_point() else part for key, part in inputs.items()}
    assert not torch.equal(run(model, other, "samples"), stock["samples"])  # else this would show nothing
    twice = {key: part.repeat_interleave(2, 0) for key, part in inputs.items()}
    if OTHERS[name] == "video":
        first, second = inputs["pixel_values_videos"].split([16, 32])
        twice["pixel_values_videos"] = torch.cat([first, first, second, second])
    for call in ("samples", "beams"):
        report = as_in_stock(model, lambda call=call: run(model, inputs, call), "shared", min_saved_tokens=1)
        assert report.prefilled_tokens == int(inputs["attention_mask"].sum())
    with fd.enabled(model, min_saved_tokens=1):
        assert torch.equal(run(model, twice, "greedy"), stock["greedy"].repeat_interleave(2, 0))
        assert fd.explain(model).last_call.prefilled_tokens == report.prefilled_tokens


@pytest.mark.parametrize("call", ["greedy", "samples", "beams"])
def test_repeated_prompts_are_one_input(model, call):
    one, two = SEVERAL[:2]
    inputs = prompts_with_images(model, one, two)
    twice = {
        name: part.repeat_interleave(2, 0)
        for name, part in inputs.items()
        if name not in ("pixel_values", "image_grid_thw")
    }
    grids, (first, second) = inputs["image_grid_thw"], inputs["pixel_values"].split([16, 56])
    twice["image_grid_thw"] = torch.cat([grids[:1], grids[:1], grids[1:], grids[1:]])
    twice["pixel_values"] = torch.cat([first, first, second, second])
    report, counted = compared(model, twice, call, max_prefill_tokens=50)
    assert report.prefilled_tokens == int(inputs["attention_mask"].sum())
    assert counted == [16, 56]  # in passes of few positions


@pytest.mark.parametrize("name", TOWERS)
def test_an_image_of_several_prompts_is_encoded_once(name):
    """Although other texts come before it; in passes of one prompt too, where neighbours have it."""
    model, counted = tiny_model_of(name), []
    first, other = (4, 4, 1), (8, 4, 2)
    inputs = prompts_with_images(model, (5, first, 9), (3, first, 7), (4, other, 6), (2, other, 8))
    stock = {call: run(model, inputs, call) for call in ("samples", "beams")}
    once = [16 + 32] if name.startswith("Qwen") else [2]
    each = [16, 32] if name.startswith("Qwen") else [1, 1]
    tower = getattr(model.model, TOWERS[name])
    with before_calls(tower, lambda args, kwargs: counted.append(_images_of(args, kwargs))):
        for most, runs in ((16384, once), (1, each)):
            with fd.enabled(model, min_saved_tokens=1, max_prefill_tokens=most):
                for call, tokens in stock.items():
                    counted.clear()
                    assert torch.equal(run(model, inputs, call), tokens)
                    assert fd.explain(model).last_call.path == "shared"
                    assert counted == runs


def _images_of(args, kwargs):
    """Patches, or images, that a vision tower is called with."""
    return len(args[0] if args else next(kwargs[name] for name in ("hidden_states", "pixel_values") if name in kwargs))


@pytest.mark.parametrize("name", WITH_STATES_TOO)
def test_questions_about_the_same_images_share_what_comes_before(name, monkeypatch):
    """Images, and text around them, in nodes of two levels; the questions' own tokens run in passes of their own."""
    model, counted = tiny_model_of(name), []
    inputs = prompts_with_images(model, (5, SMALL, 20), (5, SMALL, 24), (5, SMALL, 17), (6, TALL, 9), (2, TALL, 8))
    lengths = inputs["attention_mask"].sum(1).tolist()
    begin_alike(inputs, 0, 1, lengths[0] - 12)
    begin_alike(inputs, 0, 2, lengths[0] - 16)  # with four tokens behind the image
    tower = getattr(model.model, TOWERS.get(name, "visual"))
    for call, most in (("greedy", 16384), ("samples", 16384), ("beams", 40)):
        stock = run(model, inputs, call)
        with fd.enabled(model, min_saved_tokens=1, min_shared_tokens=4, max_prefill_tokens=most):
            counted.clear()
            with before_calls(tower, lambda args, kwargs: counted.append(_images_of(args, kwargs))):
                assert torch.equal(run(model, inputs, call), stock)
            report = fd.explain(model).last_call
        assert report.path == "shared", report.reason
        assert report.prefilled_tokens == sum(lengths) - (lengths[0] - 12) - (lengths[0] - 16)
        assert sum(counted) == (16 + 32 if name.startswith("Qwen") else 2)


def begin_alike(inputs, one, other, count):
    """Give one row the first tokens of another's prompt, whose images it has too."""
    ids, widths = inputs["input_ids"], (inputs["attention_mask"] == 0).sum(1)
    ids[other, widths[other] : widths[other] + count] = ids[one, widths[one] : widths[one] + count]


def test_code_that_asks_for_images_shares_no_beginning(monkeypatch):
    """Where text alone fails, because something is None that images would make."""
    model = tiny_model_of("Qwen3VLForConditionalGeneration")
    inputs = prompts_with_images(model, (5, SMALL, 20), (5, SMALL, 24))
    begin_alike(inputs, 0, 1, 16)

    def prefill_passes(*args, **kwargs):
        raise AttributeError("'NoneType' object has no attribute 'shape'")

    monkeypatch.setattr(prefixes, "prefill_passes", prefill_passes)
    report, _ = compared(model, inputs, "samples", min_shared_tokens=4)
    assert report.prefilled_tokens == int(inputs["attention_mask"].sum())


def test_lists_of_each_images_numbers_keep_images_together():
    pixels = {"pixel_values": torch.zeros(2, 3), "layers": [-2, -1, 0]}
    assert len(features._images("image", pixels)) == 2
    assert features._images("image", pixels | {"patches_of_images": [1, 1]}) is None


def test_a_beginning_ends_before_other_images(model, monkeypatch):
    """Which run behind what prompts share, in a pass of their own."""
    inputs = prompts_with_images(model, (9, SMALL, 9), (9, (4, 4, 1), 9), (9, TALL, 9), (9, SMALL, 4, SMALL, 9))
    for other in (1, 2, 3):
        begin_alike(inputs, 0, other, 9)
    report, counted = compared(model, inputs, "samples", min_shared_tokens=4)
    assert report.prefilled_tokens == int(inputs["attention_mask"].sum()) - 3 * 10
    assert sum(counted) == 16 + 16 + 32 + (16 if model.config.model_type == "qwen3_5" else 0)  # rests of other lengths
    report, _ = compared(model, inputs, "beams", min_shared_tokens=4)
    assert report.prefilled_tokens == int(inputs["attention_mask"].sum())


def test_prompts_that_attend_both_ways_share_no_beginning(monkeypatch):
    """PaliGemma's, of which one without an image does so in a pass of its own too."""
    model = tiny_model_of("PaliGemmaForConditionalGeneration")
    inputs = prompts_with_images(model, (5, SMALL, 20), (5, SMALL, 24), (5, TALL, 10), (14,))
    begin_alike(inputs, 0, 1, 35)
    report = as_in_stock(model, lambda: run(model, inputs, "samples"), "shared", **FEW, max_prefill_tokens=40)
    assert report.prefilled_tokens == int(inputs["attention_mask"].sum())


def test_passes_fit_in_free_memory(monkeypatch):
    """The first one with an image, of one prompt, is counted, once; and only the images of its prompts are encoded."""
    model = tiny_model_of("Qwen3VLForConditionalGeneration")
    inputs = prompts_with_images(model, *[(5, (4, 4, seed), 9) for seed in range(1, 7)])
    monkeypatch.setattr(by_rows, "_FEW", 8)
    monkeypatch.setattr(by_rows, "_bytes_with_images", {})
    report, counted = compared(model, inputs, "samples")
    assert counted == [6 * 16]  # free memory is not known on a CPU
    monkeypatch.setattr(by_rows, "usable_memory", lambda device: 1)
    for runs in ([16] * 6, [32] * 3):
        assert compared(model, inputs, "samples")[1] == runs
        needed = by_rows._bytes_with_images[model][model.dtype]
        monkeypatch.setattr(by_rows, "usable_memory", lambda device, needed=needed: 2 * needed * 50)
    assert report.path == "shared"


def test_equal_tokens_with_other_images_are_other_inputs(model):
    inputs = prompts_with_images(model, (5, (4, 4, 1), 9), (5, (4, 4, 2), 9))
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[name] = inputs[name][:1].repeat(2, 1)
    report, counted = compared(model, inputs, "samples")
    assert report.prefilled_tokens == 2 * 20
    assert counted == [32]
    tokens = run(model, inputs, "greedy")
    assert not torch.equal(*tokens)  # else this would show nothing


def test_calls_that_save_too_little_run_stock(model):
    inputs = prompts_with_images(model, *SEVERAL)
    for least in (1, 1000):
        report, _ = compared(model, inputs, "greedy" if least == 1 else "samples", min_saved_tokens=least)
        assert report.path == "stock"
        assert "sharing would save" in report.reason


def test_calls_leave_the_model_untouched(model):
    """Although transformers sets an offset of positions anew: what was found about the model holds for later calls."""
    inputs = prompts_with_images(model, SEVERAL[0])
    with fd.enabled(model, min_saved_tokens=1):
        run(model, inputs, "samples")
        known = state_of(model).structure._known
        run(model, inputs, "samples")
        assert state_of(model).structure._known is known


def test_token_types_of_text_alone_say_nothing(model):
    """Prompts that begin alike then share what they begin with."""
    inputs = prompts_with_images(model, (80,), (80,))
    inputs["input_ids"][1, :40] = inputs["input_ids"][0, :40]
    report, _ = compared(model, inputs, "samples", min_shared_tokens=16)
    assert report.prefilled_tokens == 120


def test_a_generate_that_makes_several_calls(monkeypatch):
    """Images that were held back in one of them are not those of the next."""
    model = tiny_model_of(CLASSES[0])
    calls = [prompts_with_images(model, (5, SMALL, 9)), prompts_with_images(model, (5, TALL, 9))]
    generate = model.generate

    def each(**kwargs):
        return [generate(**inputs, **kwargs) for inputs in calls]

    def drawn():
        return seeded(lambda: model.generate(num_return_sequences=3, do_sample=True, max_new_tokens=4))

    monkeypatch.setattr(model, "generate", each, raising=False)
    stock = drawn()
    with fd.enabled(model, min_saved_tokens=1):
        assert all(map(torch.equal, drawn(), stock))
        assert fd.explain(model).last_call.path == "shared"


@pytest.mark.parametrize(
    "name", ["PaliGemmaForConditionalGeneration", "Gemma3ForConditionalGeneration", "Idefics3ForConditionalGeneration"]
)
def test_chunks_of_a_call_that_runs_stock(name):
    """Those of transformers, which cut tokens off that see each other, or leave images out in some releases."""
    model = tiny_model_of(name)
    inputs = prompts_with_images(model, (5, (4, 4), 9), (3, (4, 4, 1), 12))
    whole, chunks = run(model, inputs, "beams"), inputs | {"prefill_chunk_size": 9}
    stock = run(model, chunks, "beams")
    assert "Idefics3" in name or not torch.equal(stock, whole)
    for least, expected in ((1, whole), (10_000, stock)):
        with fd.enabled(model, min_saved_tokens=least):
            assert torch.equal(run(model, chunks, "beams"), expected)
            assert fd.explain(model).last_call.path == ("shared" if least == 1 else "stock")


def test_hidden_states_with_images_run_stock(model):
    inputs = prompts_with_images(model, SEVERAL[0])
    asked = {"return_dict_in_generate": True, "output_hidden_states": True, "max_new_tokens": 3, "do_sample": False}
    stock = model.generate(**inputs, **asked)
    with fd.enabled(model, min_saved_tokens=1):
        found = model.generate(**inputs, **asked)
        report = fd.explain(model).last_call
    assert "output_hidden_states is for positions of text" in report.reason
    assert torch.equal(found.sequences, stock.sequences)
    for one, other in zip(found.hidden_states[-1], stock.hidden_states[-1], strict=True):
        torch.testing.assert_close(one, other)
