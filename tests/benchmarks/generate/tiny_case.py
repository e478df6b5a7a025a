"""The case that tests of the bench measure."""

import torch

from benchmarks.generate.cases import GenerateCase

CPU = torch.device("cpu")
CASE = GenerateCase("tiny", 120, 4, 8, "float32")
PER_TOKEN = 2 * 2 * 2 * 32 * 4  # K and V, layers, KV heads, head_dim, bytes
