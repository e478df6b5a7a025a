"""Conversion of a checkpoint layer by layer, with no more than a layer and a shard in memory.

The calibration text runs through the layers as they are converted: each is built from its own weights, takes what the
one before it gave, and its attention's inputs are what it is measured on. Layers run in the dtype of the result: a
cache of inputs is then not charged with rounding that the model does anyway, and plans are those of `to_slim`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ...patches.layers.family import Family, attention_inputs, language_config
from .families.configs import slim_config, untied
from .find import CheckpointError
from .plan_choice import PlanChoice
from .slim_layer import config_entries, convert_layer, matrix_dtype
from .source import Checkpoint


class SlimStream:
    """The groups of tensors of a slim checkpoint: one of all that is outside layers, then one per layer.

    Args:
        source: An ordinary checkpoint.
        family: Of its config.
        choice: Of caches.
        dtype: Of the slim model.
        ids: Calibration text, ``[tokens]``.
    """

    def __init__(
        self, source: Checkpoint, family: Family, choice: PlanChoice, dtype: torch.dtype, ids: Tensor
    ) -> None:
        self.source, self.family, self.choice, self.dtype, self.ids = source, family, choice, dtype, ids
        self.config = deepcopy(language_config(source.config))
        self.layers: int = self.config.num_hidden_layers
        self.config._attn_implementation = "sdpa"
        self.rotary = None if family.rotary is None else family.rotary(self.config)
        self.hidden: Tensor | None = None

    def __len__(self) -> int:
        return self.layers + 1

    def carried(self) -> dict[str, Tensor]:
        """State from which the next group is computed."""
        return {} if self.hidden is None else {"hidden": self.hidden}

    def resume(self, carried: dict[str, Tensor]) -> None:
        """Go on from what was carried."""
        self.hidden = carried.get("hidden")

    def group(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """The tensors of a group, and the report of a layer; groups come in order.

        Raises:
            ValueError: The layer cannot have what is asked for.
        """
        if index == 0:
            return self._outside(), None
        return self._layer(index - 1)

    def finished(self, reports: list[Any]) -> Any:
        """The slim model's config, from the reports of all groups."""
        entries = config_entries(reports[1:])
        matrices = matrix_dtype(self.dtype)
        made = slim_config(self.family, self.source.config, entries, self.dtype, matrices, self.choice.rope)
        return untied(made) if self.source.unties() else made

    def _outside(self) -> dict[str, Tensor]:
        tensors = outside_layers(self.source, self.family, self.dtype)
        self.hidden = self.family.embed(self.config, tensors, self.family.embedding, self.ids)
        return tensors

    def _layer(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        prefix = self.family.layer_prefix(index)
        tensors = layer_tensors(self.source, self.family, index, self.dtype)
        inputs = self._run(index, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
        attention = prefix + self.family.attention
        own = {name.removeprefix(attention): one for name, one in tensors.items() if name.startswith(attention)}
        plain = self.family.plain(self.config, own)
        converted = convert_layer(
            self.family.weights(self.config, plain, index),
            inputs,
            self.family.rotation(self.config, len(self.ids)),
            self.choice,
            index,
            self.layers,
            plans=self.family.plans,
        )
        if converted.entry.plan != "kv":
            tensors = {name: one for name, one in tensors.items() if not name.startswith(attention)}
            tensors |= {attention + name: one for name, one in converted.attention(plain).items()}
        return tensors, converted.report()

    def _run(self, index: int, tensors: dict[str, Tensor]) -> Tensor:
        """Run the text through a layer; gives what its projections saw, ``[tokens, d]``."""
        with torch.device("meta"):
            layer = self.family.decoder_layer(self.config, index)
        layer.load_state_dict(tensors, assign=True)
        self.family.fill_buffers(layer, self.config)
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            seen.append(attention_inputs(args, kwargs))

        attention = layer.get_submodule(self.family.attention.rstrip("."))
        attention.register_forward_pre_hook(keep, with_kwargs=True)
        positions = torch.arange(len(self.ids))[None]
        assert self.hidden is not None
        with torch.no_grad():
            tables = None if self.rotary is None else self.rotary(self.hidden, positions)
            self.hidden = self.family.run_layer(layer.eval(), self.hidden[None], positions, tables)[0]
        return seen[0]


def outside_layers(source: Checkpoint, family: Family, dtype: torch.dtype) -> dict[str, Tensor]:
    """Embeddings, the last norm and the head, cast; a head that is the embedding is not stored twice."""
    names = sorted(name for name in source.names() if not name.startswith(family.layers))
    return {name: cast(name, source.tensor(name), dtype) for name in names if not source.repeats(name)}


def layer_tensors(source: Checkpoint, family: Family, index: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a layer, cast."""
    prefix = family.layer_prefix(index)
    names = sorted(name for name in source.names() if name.startswith(prefix))
    return {name: cast(name, source.tensor(name), dtype) for name in names}


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, of floating-point numbers in `dtype`: tensors of a file may share memory, and of a shard may not.

    Args:
        name: Of the tensor, for the error.
        tensor: As stored.
        dtype: Of the result.

    Raises:
        CheckpointError: Numbers are inf or nan, or would be in `dtype`.
    """
    if not tensor.is_floating_point():
        return tensor.clone()
    if bad := int(tensor.isfinite().logical_not().sum()):
        raise CheckpointError(f"{name} holds {bad} inf or nan; repair the weights, or download them again")
    made = tensor.to(dtype, copy=True)
    if not made.isfinite().all():
        largest = tensor.abs().max().item()
        raise CheckpointError(f'{name} holds {largest:.3g}, beyond the range of {dtype}; give `dtype="bfloat16"`')
    return made
