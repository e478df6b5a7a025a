"""Small calls whose captured steps run uncaptured, over the same tables, where kernels are interpreted."""

from __future__ import annotations

import pytest
import torch

SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 4}
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")

# Interpreting takes time by the program: one for each layer, KV head and row.
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
