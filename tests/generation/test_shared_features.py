"""Features of images that are encoded once, by methods that leave out images of padding."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

import hf_fastdecode as fd
from hf_fastdecode.generation.inputs.features import SharedFeatures
from hf_fastdecode.generation.inputs.rows import InputRows
from hf_fastdecode.generation.prompts import by_rows

from ..architectures.classes import tiny_model_of
from ..image_inputs import prompts_with_images


def encode(pixel_values):
    """As Idefics 3 in transformers 5.17: features of all images that are not zeros, end to end."""
    images = pixel_values.flatten(0, 1)
    real = images[images.flatten(1).any(1)]
    return BaseModelOutputWithPooling(pooler_output=real.flatten(2).mean(-1)[:, None])


def test_rows_of_several_images_with_padding_are_encoded_as_given():
    """Two rows of two images and of none have as many features as rows."""
    two, none = torch.randn(1, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 2, 3, 4, 4)
    features = SharedFeatures(SimpleNamespace(base_model=None))
    for rows in ([two, none, two], [two, none], [two, two]):
        pixels = torch.cat(rows)
        found = features.encode(encode, "get_image_features", {"pixel_values": pixels})
        assert torch.equal(found.pooler_output, encode(pixels).pooler_output)


def test_first_passes_with_images_do_not_wait_for_what_they_do_not_need(monkeypatch):
    """Gaps of masks matter to states alone, and the number of images to a lone one that fails."""
    model, waits, is_true = tiny_model_of("Qwen2_5_VLForConditionalGeneration"), [], Tensor.__bool__

    def noting(tensor):
        frame = sys._getframe(1)
        waits.extend([frame.f_lineno] if frame.f_code.co_filename == by_rows.__file__ else [])
        return is_true(tensor)

    monkeypatch.setattr(Tensor, "__bool__", noting)
    monkeypatch.setattr(InputRows, "counts_in_stock", None)  # which cannot be called
    prompts = prompts_with_images(model, (5, (4, 4), 9), (3, (4, 8, 1), 12))
    with fd.enabled(model, min_saved_tokens=1):
        model.generate(**prompts, do_sample=True, top_k=0, num_return_sequences=3, max_new_tokens=3)
        assert fd.explain(model).last_call.path == "shared"
    assert waits == []
