"""Forward passes over a shared-context cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .._compat import uncompiled_call


def forward_pass(model: PreTrainedModel, **arguments: Any) -> Any:
    """``model(**arguments)`` with hooks, but bypassing ``model.compile()``.

    Dynamo would trace the cache object at every layer and step, and recompile whenever it grows.
    """
    return uncompiled_call(model, **arguments)


def input_device(model: PreTrainedModel) -> torch.device:
    """Device for a pass's inputs. For an offloaded model, whose device is "meta", hooks move the inputs."""
    device = model.device if model.device.type != "meta" else model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device
