"""Whose images are whose in batches of images, videos or sounds of different sizes, beside prompts without any."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.inputs import items
from hf_fastdecode.generation.inputs.given import GivenInputs
from hf_fastdecode.generation.inputs.rows import InputRows

from ..architectures.classes import tiny_model_of
from ..cases import exhaustive_but
from ..image_inputs import prompts_with_images
from .calls import as_in_stock
from .image_calls import run

A, B, C, LARGE = (4, 4, 1), (4, 4, 2), (4, 4, 3), (8, 8, 5)
TWO, OTHER, ONE, NONE = (4, A, 3, B, 2), (4, A, 3, C, 2), (6, LARGE, 7), (5,)
BATCHES = {  # where an image has as many tokens as the average, a prompt may have more or fewer of them
    "two, one": [TWO, ONE],
    "one, two, none": [ONE, TWO, NONE],
    "none, equal, other": [NONE, TWO, TWO, OTHER, ONE],
    "none, two, one": [NONE, TWO, ONE, ONE],
}
CASES = {
    "Mistral3ForConditionalGeneration": "image",  # image_sizes, with other tokens between the rows of an image
    "Lfm2VlForConditionalGeneration": "image",  # spatial_shapes
    "AudioFlamingo3ForConditionalGeneration": "audio",  # a mask of frames
    "AyaVisionForConditionalGeneration": "image",
    "Cohere2VisionForConditionalGeneration": "image",
    "DeepseekOcr2ForConditionalGeneration": "image",  # tiles of all images, and numbers of them
    "Gemma3ForConditionalGeneration": "image",
    "Gemma4ForConditionalGeneration": "image",  # image_position_ids
    "Glm4vForConditionalGeneration": "video",  # in tokens of images
    "GlmAsrForConditionalGeneration": "audio",
    "Idefics2ForConditionalGeneration": "image",
    "Idefics3ForConditionalGeneration": "image",  # a row of images, and of padding, for each prompt
    "InternVLForConditionalGeneration": "image",
    "Kimi_K25ForConditionalGeneration": "video",  # frames pooled to one
    "LightOnOcrForConditionalGeneration": "image",
    "LlavaForConditionalGeneration": "image",
    "LlavaNextForConditionalGeneration": "image",  # tiles, as many as image_sizes say
    "LlavaOnevisionForConditionalGeneration": "image",
    "MiniMaxM3SparseForConditionalGeneration": "video",
    "Ovis2ForConditionalGeneration": "image",
    "Qwen2AudioForConditionalGeneration": "audio",
    "Qwen2_5OmniThinkerForConditionalGeneration": "audio",
    "Qwen2_5_VLForConditionalGeneration": "video",
    "Qwen3ASRForConditionalGeneration": "audio",
    "Qwen3VLForConditionalGeneration": "video",
    "VideoLlama3ForConditionalGeneration": "image",
    "VoxtralForConditionalGeneration": "audio",
}
STOCK = {  # before transformers 5.24
    "DeepseekOcr2ForConditionalGeneration": "every step takes the argument 'pixel_values_local'",
    "MiniMaxM3SparseForConditionalGeneration": "attends to the images of all rows",
}
OLDER = ["Qwen2_5OmniThinkerForConditionalGeneration", "VideoLlama3ForConditionalGeneration"]  # with other code there
SHARED = [name for name in CASES if CACHE == "cache" or name not in STOCK]
QUICK = [*SHARED[:3], *([] if CACHE == "cache" else OLDER)]


@pytest.mark.parametrize("name", exhaustive_but(QUICK, SHARED))
def test_prompts_get_their_own(name):
    """In one pass, in many, sampled and greedy: the tokens of stock for rows that are repeated by hand."""
    model, kind = tiny_model_of(name), CASES[name]
    for batch in BATCHES.values():
        check_each(model, batch, (16384, 16), kind)


def check_each(model, batch, bounds, kind="image", paths=("shared", "stock")):
    """Compare samples and greedy tokens with those of stock for rows repeated by hand; returns the inputs."""
    inputs = prompts_with_images(model, *batch, kind=kind, sized=True)
    copies = prompts_with_images(model, *[prompt for prompt in batch for _ in range(3)], kind=kind, sized=True)
    expected = run(model, copies, "one sample"), run(model, inputs, "greedy")
    for most in bounds:
        with fd.enabled(model, min_saved_tokens=1, max_prefill_tokens=most):
            for call, tokens in zip(("samples", "greedy"), expected, strict=True):
                assert torch.equal(run(model, inputs, call), tokens)
                assert call == "greedy" or fd.explain(model).last_call.path in paths
    return inputs


@pytest.mark.parametrize("name", exhaustive_but(QUICK, [name for name in SHARED if "Qwen2Audio" not in name]))
def test_equal_prompts_are_one_input(name):
    """Where prompts have several images of different sizes too."""
    model, prompts = tiny_model_of(name), [TWO, TWO, (4, A, 3, LARGE, 2), ONE, ONE]
    inputs = prompts_with_images(model, *prompts, kind=CASES[name], sized=True)
    lengths = inputs["attention_mask"].sum(1).tolist()
    report = as_in_stock(model, lambda: run(model, inputs, "greedy"), min_saved_tokens=1, max_prefill_tokens=16)
    assert (report.path, report.prefilled_tokens) == ("shared", sum(lengths) - lengths[0] - lengths[3])


@pytest.mark.skipif(CACHE == "cache", reason="transformers 5.24 and later encode each image alone, and once")
@pytest.mark.parametrize("name", STOCK)
def test_what_older_releases_run_stock(name):
    model, other = tiny_model_of(name), (4, C, 5)
    inputs = prompts_with_images(model, TWO, TWO, other, kind=CASES[name], sized=True)
    for call in ("greedy", "samples"):
        report = as_in_stock(model, lambda call=call: run(model, inputs, call), "stock", min_saved_tokens=1)
        assert STOCK[name] in report.reason


@pytest.mark.parametrize("name", [name for name in QUICK if "Lfm2" not in name])  # whose states go on at ends alone
def test_kept_caches_know_each_of_a_prompts_images(name):
    """A prompt whose second image is another goes on behind the first."""
    model, kind = tiny_model_of(name), CASES[name]
    inputs, other = (prompts_with_images(model, one, kind=kind, sized=True) for one in (TWO, OTHER))
    stock = run(model, prompts_with_images(model, *[OTHER] * 3, kind=kind, sized=True), "one sample")
    with fd.enabled(model):
        kept = fd.prefill(model, inputs)
        assert torch.equal(run(model, other | {CACHE: kept}, "samples"), stock)
        known = fd.explain(model).last_call.known_tokens[0]
    token = getattr(model.config, f"{kind}_token_id")
    assert 0 < int((other["input_ids"][0, :known] == token).sum()) < int((other["input_ids"] == token).sum())


def test_images_of_one_token():
    """Whose encoder drops a dimension where one is alone, and raises: in stock's calls with a single image only."""
    model, one, other = tiny_model_of("Mistral3ForConditionalGeneration"), (2, 2, 1), (2, 2, 2)
    for batch in ([(4, one, 5), (3, one, 9)], [(4, one, 5), (3, other, 9), (5, one, other, 6)]):
        inputs = check_each(model, batch, (16384, 4), paths=("shared",))
    single = {name: value[:1] for name, value in inputs.items()}
    for call in ("greedy", "samples"):  # before 5.24, stock encodes it for each sample
        outcomes = []
        for enabled in (nullcontext, lambda: fd.enabled(model, min_saved_tokens=1)):
            with enabled():
                try:
                    outcomes.append(run(model, single, call).tolist())
                except RuntimeError as error:
                    outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_no_size_is_counted_that_is_not_asked_for(monkeypatch):
    """An encoder's pass counts the tokens of each size once, where prompts run apart."""
    model = tiny_model_of("Mistral3ForConditionalGeneration")
    inputs, counted = prompts_with_images(model, TWO, ONE, NONE, sized=True), []
    encoded = items._features_made
    monkeypatch.setattr(items, "_features_made", lambda *args: counted.append(1) or encoded(*args))
    for most, sizes in ((16384, 0), (16, 2)):
        with fd.enabled(model, min_saved_tokens=1, max_prefill_tokens=most):
            run(model, inputs, "samples")
            assert len(counted) == sizes
            run(model, inputs, "samples")
            assert len(counted) == sizes


IMAGE, SOUND = 90, 91
_CONFIG = PreTrainedConfig(image_token_id=IMAGE, audio_token_id=SOUND)


def rows_of(tokens: list[list[int]], arguments: Mapping[str, Tensor], counts: Mapping[int, int] | None = None):
    """Of prompts with these tokens; images of pixels of this first number have so many tokens."""
    given = GivenInputs(arguments)
    given.expand(lambda **kwargs: None, torch.tensor(tokens), 1)
    known = counts or {}
    return InputRows(given, _CONFIG, lambda kind, size, parts: known.get(int(parts["pixel_values"].flatten()[0])))


def test_images_of_unknown_sizes_are_not_shared_out():
    """Although the average number of tokens divides those of each prompt."""
    sizes = {"image_sizes": torch.tensor([[1, 1], [1, 1], [2, 2]]), "pixel_values": torch.tensor([[0], [0], [1]])}
    tokens = [[IMAGE] * 2 + [5, 5], [IMAGE] * 4]
    assert rows_of(tokens, sizes, {0: 1, 1: 4}).apart
    for counts in ({}, {0: 1, 1: 5}, {0: 2, 1: 4}):
        assert rows_of(tokens, sizes, counts).unclear == "image_sizes"
    own = rows_of(tokens, sizes, {0: 1, 1: 4}).of([1])
    assert own["image_sizes"].tolist() == [[2, 2]]


def test_patches_of_an_image_are_no_tokens_of_a_prompt():
    """As many images as prompts, of as many patches as prompts have tokens: the first prompt has both images."""
    pixels = {"pixel_values": torch.arange(2 * 4 * 20.0).view(2, 4, 20)}
    rows = rows_of([[IMAGE, 5, IMAGE, 5], [5, 5, 5, 5]], pixels)
    assert torch.equal(rows.of([0])["pixel_values"], pixels["pixel_values"])
    assert rows.of([1]) == {}


def test_arguments_whose_names_say_no_kind():
    """Belong to the only kind that there is; of images and sounds, to neither."""
    tokens = [[IMAGE, 5, SOUND], [IMAGE, 5, SOUND]]
    images, sounds = torch.zeros(2, 3), torch.ones(2, 7)
    mask = {"padding_mask": torch.ones(2, 7).long()}
    assert rows_of(tokens, {"input_features": sounds} | mask).apart
    assert rows_of(tokens, {"input_features": sounds, "pixel_values": images} | mask).unclear == "padding_mask"


@pytest.mark.parametrize("numbers", [[0, 2], [2, 0], [1, 1], [2, 1]])
def test_tiles_that_single_images_may_have_or_not(numbers):
    """As many tiles as images: with numbers other than one of each, it is not known which is meant."""
    tiles = {"pixel_values": torch.zeros(2, 3), "pixel_values_local": torch.zeros(sum(numbers), 3)}
    rows = rows_of([[IMAGE] * 3, [IMAGE] * 3], tiles | {"num_local_patches": torch.tensor(numbers)})
    assert rows.apart == (numbers in ([1, 1], [2, 1]))


def test_rows_of_images_of_which_some_are_padding():
    """A prompt without an image has a row of zeros, which is no image of the prompt before."""
    pixels = torch.zeros(3, 2, 3, 4, 4)
    pixels[0], pixels[2, 0] = 1.0, 1.0
    tokens = [[IMAGE] * 4, [5] * 4, [IMAGE] * 2 + [5, 5]]
    assert not rows_of(tokens, {"pixel_values": pixels}).apart
