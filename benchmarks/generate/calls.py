"""The calls that are measured: a model, prompts for a case, and functions that generate so many tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_fastdecode.cache.accounting import KVSizes
from hf_fastdecode.cache.layout import ModelLayout
from hf_fastdecode.generation.decoding.stopping import RowLengthCriteria
from hf_fastdecode.measurement import SAMPLING
from hf_fastdecode.measurement.calls import collect
from hf_fastdecode.measurement.rows import NotAvailableError
from hf_fastdecode.measurement.shapes import SHAPES, random_model
from hf_fastdecode.model_loading import load_weights
from hf_fastdecode.patches.config_base import SlimLayer

from ..slim.cases import RANK_DIVISOR
from .cases import GenerateCase
from .inputs.shapes import INPUT_SHAPES, given_of
from .ways import GenerateWay


def load(shape: str, device: torch.device, dtype: torch.dtype, slim: str | None = None) -> PreTrainedModel:
    """The model of a shape: random weights, ``embedded`` for the one that the package carries, or a checkpoint.

    Every sample of it runs to the end, so that steps are comparable. With `slim`, the plan of every layer, it is a
    slim model with random weights. Raises InputError without such a checkpoint, NotAvailableError for a shape
    without a slim form.
    """
    if slim is not None:
        fields = SHAPES.get(shape, {})
        if not fields or fields["num_key_value_heads"] != fields["num_attention_heads"]:
            raise NotAvailableError(
                "slim ways need a named shape with as many KV heads as query heads, since each head's values are made "
                f"of all keys, got {shape}; choose 7b-mha, 13b-mha or tiny-mha"
            )
        rank = fields["hidden_size"] // RANK_DIVISOR if slim == "k+r" else 0
        return random_model(shape, device, dtype, SlimLayer(slim, rank))
    if shape in SHAPES:
        return random_model(shape, device, dtype)
    if shape in INPUT_SHAPES:
        return INPUT_SHAPES[shape].model(device, dtype)
    model = load_weights(shape, dtype, device)
    end = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(pad_token_id=end[0] if isinstance(end, list) else end or 0)
    return model


class LatestModel:
    """Loads models on a device, and keeps the latest until another is asked for."""

    def __init__(self, device: torch.device):
        self.device = device
        self.held: tuple[tuple[str, str, str | None], PreTrainedModel] | None = None

    def of(self, case: GenerateCase, way: GenerateWay) -> PreTrainedModel:
        """The model of a case and a way, see `load`."""
        key = case.shape, case.dtype, way.slim
        if self.held is None or self.held[0] != key:
            self.held = None
            collect()
            self.held = key, load(case.shape, self.device, getattr(torch, case.dtype), way.slim)
        return self.held[1]


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of a token's keys and values in all layers; of a slim model those of the ordinary one.

    With an encoder, of a token that the decoder reads or draws.
    """
    layout = ModelLayout.from_config(model.config)
    if layout.states or layout.cross:
        return model.dtype.itemsize * sum(store.numbers for store in layout.per_token.values())
    config = copy.copy(model.config)
    config.slim_layers = None
    return KVSizes.from_config(config).bytes_per_token(model.dtype.itemsize)


def floor_kv_bytes(model: PreTrainedModel, case: GenerateCase) -> int:
    """Bytes of keys and values of the prompts' tokens once, of an encoder's tokens once, and of every sample's."""
    layout, per_token = ModelLayout.from_config(model.config), kv_bytes_per_token(model)
    if not layout.cross:
        return (case.prompt_tokens + sum(case.lengths())) * per_token
    encoded = case.context * model.dtype.itemsize * sum(store.numbers for store in layout.cross.values())
    return encoded + (given_of(case.shape).prompt_length(case) + sum(case.lengths())) * per_token


def caller(
    model: PreTrainedModel, case: GenerateCase, way: GenerateWay, *, stopping: StoppingCriteria | None = None
) -> Callable[..., Any]:
    """A function that generates so many tokens for a case's samples, with a way's arguments and a further criterion.

    Raises NotAvailableError where the way does not take this case.
    """
    if way.beams and (case.finish or case.tree is not None):
        raise NotAvailableError("beams are of one prompt, and run to the end")
    if way.single and case.samples > 1:
        raise NotAvailableError(f"it takes one sample, got {case.samples}")
    given = given_of(case.shape)
    inputs = given.arguments(model, case)
    extra: dict[str, Any] = {}
    criteria: list[StoppingCriteria] = [stopping] if stopping is not None else []
    if case.finish:
        extra["pad_token_id"] = 0
        criteria.append(
            RowLengthCriteria(given.prompt_length(case), torch.tensor(case.lengths(), device=model.device))
        )
    if criteria:
        extra["stopping_criteria"] = StoppingCriteriaList(criteria)

    def call(new_tokens: int, return_dict: bool = False) -> Any:
        drawing = given.drawing(way.call_arguments(case.samples // case.prompts), new_tokens)
        arguments = {"return_dict_in_generate": return_dict, **drawing, **extra}
        output = model.generate(**inputs, **arguments)
        return output.sequences if arguments["return_dict_in_generate"] and not return_dict else output

    return call


def batch_caller(model: PreTrainedModel, case: GenerateCase) -> Callable[..., Any]:
    """The same by continuous batching; NotAvailableError where transformers has none, or rows finish apart."""
    if not hasattr(model, "generate_batch") or case.finish or case.shape in INPUT_SHAPES:
        raise NotAvailableError("generate_batch does not take this case")
    ids: Tensor = given_of(case.shape).arguments(model, case)["input_ids"]
    prompts = ids.repeat_interleave(case.samples // case.prompts, 0).tolist()

    def call(new_tokens: int) -> Any:
        config = GenerationConfig(max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0, **SAMPLING)
        found = model.generate_batch(prompts, generation_config=config)
        drawn = [len(output.generated_tokens) for output in found.values()]
        if drawn != [new_tokens] * case.samples:
            raise RuntimeError(f"generate_batch drew {sorted(set(drawn))} tokens for {len(drawn)} samples")
        return found

    return call
