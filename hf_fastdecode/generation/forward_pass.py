"""A forward pass of a model over a shared-context cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def forward_pass(model: PreTrainedModel, **arguments: Any) -> Any:
    """``model(**arguments)``, hooks included, but for what ``model.compile()`` has put before it.

    dynamo would trace a cache that is no tensor at every layer and step, and compile anew whenever it has grown.
    """
    return model._call_impl(**arguments)


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a pass takes its tokens. An offloaded model calls itself "meta"; its hooks move what they are given."""
    device = model.device if model.device.type != "meta" else model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device
