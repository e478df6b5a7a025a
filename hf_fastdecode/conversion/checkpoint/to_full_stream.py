"""Convert a slim checkpoint back to an ordinary one, layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...patches.layers.family import Family, language_config
from .families.configs import full_config, untied
from .slim_layer import recover_values
from .source import Checkpoint
from .to_slim_stream import cast, outside_layers


class FullStream:
    """The groups of tensors of an ordinary checkpoint, as `SlimStream` has those of a slim one.

    Args:
        source: A slim checkpoint.
        model_type: Of ordinary models, as `family_of_slim` gives it.
        family: Of them.
        dtype: Of the ordinary model.
    """

    def __init__(self, source: Checkpoint, model_type: str, family: Family, dtype: torch.dtype) -> None:
        self.source, self.model_type, self.family, self.dtype = source, model_type, family, dtype
        self.config = language_config(source.config)
        self.layers: int = self.config.num_hidden_layers
        self.known = source.layer_reports(self.layers)

    def __len__(self) -> int:
        return self.layers + 1

    def carried(self) -> dict[str, Tensor]:
        """Nothing: layers are recovered on their own."""
        return {}

    def resume(self, carried: dict[str, Tensor]) -> None:
        """Nothing was carried."""

    def group(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """The tensors of a group, and the report of a layer."""
        if index == 0:
            return outside_layers(self.source, self.family, self.dtype), None
        prefix = self.family.layer_prefix(index - 1)
        attention = prefix + self.family.attention
        stored = {name: self.source.tensor(name) for name in self.source.names() if name.startswith(prefix)}
        own = {name.removeprefix(attention): one for name, one in stored.items() if name.startswith(attention)}
        tensors = {name: cast(name, one, self.dtype) for name, one in stored.items() if not name.startswith(attention)}
        layer = self.config.layer_plans[index - 1]
        plain = {
            name: cast(attention + name, one, self.dtype) for name, one in own.items() if not name.startswith("slim.")
        }
        solved = layer.plan in ("k", "k+r")
        if solved:
            key_bias = own.get("k_proj.bias")
            weight, value_bias = recover_values(own["k_proj.weight"], key_bias, own)
            plain["v_proj.weight"] = weight.to(self.dtype)
            if key_bias is not None:
                plain["v_proj.bias"] = value_bias.to(self.dtype)
        if layer.plan != "kv":
            plain = self.family.ordinary(self.config, plain)
        tensors |= {attention + name: one for name, one in plain.items()}
        error = self.known[index - 1].get("recovered_error") if solved else 0.0
        return dict(sorted(tensors.items())), {**layer.to_dict(), "recovered_error": error}

    def finished(self, reports: list[Any]) -> Any:
        """The ordinary model's config."""
        made = full_config(self.family, self.source.config, self.model_type, self.dtype)
        return untied(made) if self.source.unties() else made
