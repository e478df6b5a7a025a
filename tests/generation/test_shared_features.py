"""Features of images that are encoded once, by methods that leave out images of padding."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_fastdecode.generation.inputs.features import SharedFeatures


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
