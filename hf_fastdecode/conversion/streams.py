"""The groups of tensors of a converted checkpoint, in both directions, with no more than one group in memory.

The first group is all that is outside the layers; then follows one per decoder layer, of encoder-decoders one per
attention of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..patches.layers.family import Family, attention_inputs, language_config
from .calibration import record
from .families import full_config, slim_config, untied
from .fit.attention import AttentionInputs
from .layer_converter import LayerConverter, PlanChoice, below, config_entries, recover_values
from .source import Checkpoint, CheckpointError


class TensorStream:
    """Base class of both directions: the names of groups and attentions, and tensors outside them in `dtype`."""

    def __init__(self, source: Checkpoint, family: Family, dtype: torch.dtype) -> None:
        self.source, self.family, self.dtype = source, family, dtype
        self.config = language_config(source.config)
        self.attentions = family.attentions(self.config)
        self.prefixes = self.attentions
        if not family.has_encoder:
            self.prefixes = [f"{family.layers}{index}." for index in range(len(self.attentions))]

    def __len__(self) -> int:
        return len(self.prefixes) + 1

    def skip(self, groups: int) -> None:
        """Begin after so many groups, which are on disk."""

    def group(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """The tensors of a group, made in order, and its layer's report; ValueError if it cannot be what is asked."""
        return (self._outside(), None) if index == 0 else self._layer(index - 1)

    def finished(self, reports: list[Any]) -> Any:
        """The resulting model's config, from the reports of all groups."""
        made = self._config(reports[1:])
        return untied(made) if self.source.unties() else made

    def _outside(self) -> dict[str, Tensor]:
        """Embeddings, norms and the head, cast; those that repeat another tensor are not stored twice."""
        layers = tuple(self.prefixes)
        names = sorted(name for name in self.source.locations if not name.startswith(layers))
        return self._read(name for name in names if not self.source.repeats(name))

    def _names(self, index: int) -> list[str]:
        return sorted(name for name in self.source.locations if name.startswith(self.prefixes[index]))

    def _read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: _cast(name, self.source.tensor(name), self.dtype) for name in names}

    def _layer(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        raise NotImplementedError

    def _config(self, reports: list[Any]) -> Any:
        raise NotImplementedError


class SlimStream(TensorStream):
    """The groups of a slim checkpoint, made of an ordinary one; `inputs` are those of a calibration pass."""

    def __init__(
        self, source: Checkpoint, family: Family, choice: PlanChoice, dtype: torch.dtype, inputs: dict[str, Tensor]
    ) -> None:
        super().__init__(source, family, dtype)
        self.inputs, self.rope = inputs, choice.rope
        self.converter = LayerConverter(family, self.config, choice, self._attention)
        self._beside: dict[str, Tensor] = {}

    def _layer(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        converted = self.converter.convert(index)
        beside, self._beside = self._beside, {}
        stored = {self.attentions[index] + name: one for name, one in converted.tensors.items()}
        return beside | stored, converted.report()

    def _config(self, reports: list[Any]) -> Any:
        return slim_config(self.family, self.source.config, config_entries(reports), self.dtype, self.rope)

    def _attention(self, index: int) -> tuple[dict[str, Tensor], AttentionInputs]:
        """An attention's tensors and calibration inputs; the group's other tensors are kept beside."""
        tensors, prefix = self._read(self._names(index)), self.attentions[index]
        recorded = self._calibrate(index, tensors)
        self._beside = {name: one for name, one in tensors.items() if not name.startswith(prefix)}
        return below(prefix, tensors), recorded

    def _calibrate(self, index: int, tensors: dict[str, Tensor]) -> AttentionInputs:
        raise NotImplementedError


class EncoderDecoderStream(SlimStream):
    """Loads the ordinary model for one calibration pass, as all layers need the encoder's output.

    The model runs in the dtype of the result. A resumed conversion repeats the pass.
    """

    _recorded: list[AttentionInputs] | None = None

    def _calibrate(self, index: int, tensors: dict[str, Tensor]) -> AttentionInputs:
        if self._recorded is None:
            source = self.source
            model = self.family.auto.from_pretrained(source.folder, config=source.config, dtype=self.dtype)
            self._recorded = record(model, self.family, self.inputs)
        return self._recorded[index]


class DecoderOnlyStream(SlimStream):
    """Runs the calibration text through the layers as they are converted, each built from its weights.

    Layers run in the dtype of the result, as in `to_slim`: otherwise rounding that the model does anyway counts as an
    error of a cache of inputs.
    """

    hidden: Tensor | None = None

    def skip(self, groups: int) -> None:
        """Run the text through the layers that are on disk."""
        for index in range(groups):
            self._outside() if index == 0 else self._attention(index - 1)

    def _outside(self) -> dict[str, Tensor]:
        tensors = super()._outside()
        self.hidden = self.family.embed(self.config, tensors, self.family.embedding, self.inputs["input_ids"][0])
        return tensors

    def _calibrate(self, index: int, tensors: dict[str, Tensor]) -> AttentionInputs:
        family, config = self.family, deepcopy(self.config)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            layer = family.decoder_layer(config, index)
        layer.load_state_dict(below(self.prefixes[index], tensors), assign=True)
        family.fill_buffers(layer, config)
        recorded: list[Tensor] = []

        def keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            recorded.append(attention_inputs(args, kwargs))

        layer.get_submodule(family.paths[0]).register_forward_pre_hook(keep, with_kwargs=True)
        assert self.hidden is not None
        positions = torch.arange(len(self.hidden))[None]
        with torch.no_grad():
            tables = None if family.rotary is None else family.rotary(config)(self.hidden, positions)
            self.hidden = family.run_layer(layer.eval(), self.hidden[None], positions, tables)[0]
        return AttentionInputs(recorded[0])


class FullStream(TensorStream):
    """The groups of an ordinary checkpoint, of a slim one; `model_type` as `family_of_slim` gives it."""

    def __init__(self, source: Checkpoint, model_type: str, family: Family, dtype: torch.dtype) -> None:
        super().__init__(source, family, dtype)
        self.model_type = model_type
        self.known: list[dict[str, Any]] = (source.report() or {"layers": []})["layers"]
        if len(self.known) != len(self.attentions):  # no report, or not of this checkpoint
            self.known = [{}] * len(self.attentions)

    def _layer(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        names, prefix = self._names(index), self.attentions[index]
        stored = {name.removeprefix(prefix): self.source.tensor(name) for name in names if name.startswith(prefix)}
        tensors = self._read(name for name in names if not name.startswith(f"{prefix}slim."))
        plain = below(prefix, tensors)
        layer = self.config.layer_plans[index]
        error: float | None = 0.0
        if layer.plan in ("k", "k+r"):
            error = self.known[index].get("recovered_error")
            key, value, output = map(self.family.projection, "kvo")
            weight, bias = recover_values(stored[f"{key}.weight"], stored.get(f"{key}.bias"), stored)
            plain[f"{value}.weight"] = weight.to(self.dtype)
            if (
                f"{key}.bias" in stored or f"{output}.bias" in stored
            ):  # in Whisper, values have a bias and keys have none
                plain[f"{value}.bias"] = bias.to(self.dtype)
        if layer.plan != "kv":
            plain = self.family.ordinary(self.config, plain)
        tensors = {name: one for name, one in tensors.items() if not name.startswith(prefix)}
        tensors |= {prefix + name: one for name, one in plain.items()}
        return dict(sorted(tensors.items())), {**layer.to_dict(), "recovered_error": error}

    def _config(self, reports: list[Any]) -> Any:
        return full_config(self.family, self.source.config, self.model_type, self.dtype)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, of floating-point tensors in `dtype`: tensors of a file may share memory, and of a shard may not.

    Raises CheckpointError where elements are inf or nan, or would be in `dtype`.
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
