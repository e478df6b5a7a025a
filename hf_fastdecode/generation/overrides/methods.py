"""Overrides of an enabled model's methods.

Each is called with the state (`ModelState`), the model and the method's arguments:

- ``generate`` passes this package's decoding loop as ``custom_generate``, transformers' official extension point,
  called with the same prepared arguments as its own loops. The loop forwards unsupported calls to transformers' loops.
- ``_extract_generation_mode_kwargs`` and ``_get_deprecated_gen_repo``: with a ``custom_generate``, transformers 5.17
  to 5.23 drop the streamer, the tokenizer (stop_strings) and the deprecated modes; these two hide ours.
- ``_prepare_cache_for_generation``, which `generate` calls once it knows the mode: decides whether the call can share,
  and gives other decoding loops a cache that prefills on their first pass (`first_pass`).
- `_compat.ENCODE`, which `generate` calls to run an encoder: runs it once for neighbouring rows of one input.
- ``_expand_inputs_for_generation``, and `ENCODE` where images are a decoder's: hold back images, video or audio of a
  call (`inputs.hooks`).
- ``forward``: activates the functions of `attention.interface` for passes with a shared-context cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..._compat import ENCODE
from ..inputs.hooks import expand_inputs
from .forward import forward
from .generate import (
    encode,
    extract_generation_mode_kwargs,
    generate,
    get_deprecated_gen_repo,
    prepare_cache_for_generation,
)

METHODS: dict[str, Callable[..., Any]] = {
    "forward": forward,
    "generate": generate,
    "_extract_generation_mode_kwargs": extract_generation_mode_kwargs,
    "_get_deprecated_gen_repo": get_deprecated_gen_repo,
    "_prepare_cache_for_generation": prepare_cache_for_generation,
    ENCODE: encode,
    "_expand_inputs_for_generation": expand_inputs,
}
"""Overrides by method name."""
