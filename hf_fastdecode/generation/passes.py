"""A forward pass of a model over a shared-context cache."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def forward_pass(model: PreTrainedModel, **arguments: Any) -> Any:
    """``model(**arguments)``, hooks included, but for what ``model.compile()`` has put before it.

    dynamo would trace a cache that is no tensor at every layer and step, and compile anew whenever it has grown.
    """
    return model._call_impl(**arguments)
