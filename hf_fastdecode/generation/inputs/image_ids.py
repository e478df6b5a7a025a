"""Ids for the tokens of images that say which images these are, so that kept prompts are found by tokens alone.

The tokens that stand for images have one id. In a cache that outlives its call they have negative ones, four that take
turns, made of a digest of the image's pixels, its tokens' positions, which some models count by the images of a whole
batch (HunYuan-VL), and whatever else belongs to it.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from .rows import InputRows

_IDS = 4  # of 62 bits each


def ids_of_images(images: InputRows, input_ids: Tensor, positions: Tensor | None) -> Tensor:
    """Ids ``[rows, width]`` int64, where tokens that stand for images have ids of their digests.

    Args:
        images: What the prompts come with.
        input_ids: ``[rows, width]``: those of the call, samples and beams included.
        positions: ``[..., rows or 1, width]``: theirs.

    Raises:
        Unsupported: Not all inputs are tensors of single rows.
    """
    ids = input_ids.to("cpu", torch.long, copy=True)
    for given in range(images.rows):
        rows = slice(given * images.copies, (given + 1) * images.copies)
        for image in images.images_of(given):
            parts = image.parts
            if positions is not None:
                of_row = positions[..., rows.start if positions.shape[-2] > 1 else 0, :]
                parts = parts | {"positions": of_row[..., image.places.to(of_row.device)]}
            digest = _digest(parts)
            ids[rows, image.places] = digest[torch.arange(len(image.places), device="cpu") % _IDS]
    return ids.to(input_ids.device)


def _digest(parts: dict[str, Tensor]) -> Tensor:
    """``[_IDS]`` int64 on the CPU, below 0."""
    digest = blake2b(digest_size=8 * _IDS)
    for name, part in sorted(parts.items()):
        digest.update(f"{name} {part.dtype} {tuple(part.shape)} ".encode())
        digest.update(part.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    numbers = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
    return -1 - (numbers & (1 << 62) - 1)
