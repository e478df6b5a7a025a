"""Images that a decoder's own layers attend to (Mllama): keys and values once for a prompt's samples and beams.

Such layers lie between those that attend to tokens, and hold keys and values of images in their places of one cache.
A prompt's pass computes them, by transformers' own attention, in which each token sees the images that a mask of the
model says. Tokens behind a prompt see what its last token does: of that, the keys and values are stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from transformers import Cache

from ...attention.placeholders import CrossKV
from .cross import Attend, EncodedInputs, HasInputs, StoredKV


class ImageInputs(EncodedInputs):
    """The images of each distinct prompt of a call, and the layers' keys and values of them.

    Args:
        count: Number of distinct prompts.
        tokens: Keys of a prompt's images in a layer, padding included.
        layers: The layers that attend to them.
        query_heads: Query heads of each.
        mask: Name of the model argument ``[rows, tokens, images, tiles]`` that says which tiles a token sees.
    """

    def __init__(self, count: int, tokens: int, layers: Collection[int], query_heads: int, mask: str):
        super().__init__({}, count, tokens)
        self.of_images, self.query_heads, self._name = frozenset(layers), query_heads, mask
        self._seen: Tensor | None = None  # by the last token of each row of the pass: [rows, tiles]
        self._keys_seen: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """None in the pass that stores images, which is given them; later ones see what a prompt's last token does."""
        return {} if self._group is not None else {self._name: None}

    @property
    def placeholders(self) -> dict[str, Any]:
        """None."""
        return {}

    def see(self, arguments: Mapping[str, Any]) -> None:
        """Read, of the arguments of a pass, which images its rows' last tokens see."""
        mask = arguments.get(self._name)
        self._seen = None if mask is None else mask[:, -1].flatten(1).bool()
        self._keys_seen = None

    def shown(self, tokens: int) -> Tensor | None:
        """The same of a layer's keys, ``[rows, tokens]`` bool; all of them when None."""
        if self._seen is not None and self._keys_seen is None:
            self._keys_seen = self._seen.repeat_interleave(tokens // self._seen.shape[1], 1)
        return self._keys_seen

    def view_of(self, cache: Cache, inputs: HasInputs, attend: Attend) -> ImageView:
        """As `EncodedInputs.view_of`."""
        return ImageView(cache, self, inputs, attend)


class ImageView:
    """What a decoder with such layers takes as its cache: one of tokens, and images in the layers that see them."""

    def __init__(self, cache: Cache, images: ImageInputs, inputs: HasInputs, attend: Attend):
        self._cache, self._images, self._tokens = cache, images, inputs.tokens
        self._in_capture = inputs is not images
        self.layers = [_ImageLayer(inputs, attend, index) for index in range(len(cache.layers))]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store images, and attend to them as they are; or append tokens."""
        if layer_idx not in self._images.of_images:
            return self._cache.update(keys, values, layer_idx, *args, **kwargs)
        self._images.store(layer_idx, keys, values, self._images.shown(keys.shape[2]))
        return keys, values

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Tokens before the pass, or those of a layer's images."""
        if layer_idx in self._images.of_images:
            return self._tokens
        # 5.17 asks thus whether images are stored, as they are before a step that is captured.
        return self._cache.get_seq_length() or int(self._in_capture)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class _ImageLayer:
    """What the model reads of a layer's images: that there are some, and handles in the place of keys and values."""

    is_initialized = True

    def __init__(self, inputs: HasInputs, attend: Attend, index: int):
        self.keys: CrossKV = _StoredImages(inputs, attend, index)
        self.values = self.keys


class _StoredImages(StoredKV):
    def numel(self) -> int:
        """More than none."""
        return 1
