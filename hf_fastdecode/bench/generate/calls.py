"""The calls that are measured: a model, prompts for a case, and functions that generate so many tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_fastdecode as fd

from ...cache.accounting import KVSizes
from ...cache.layout.model import ModelLayout
from ...generation.decoding.stopping import RowLengthCriteria
from ...measurement.calls import collect
from ...measurement.runner import NotAvailableError
from ...measurement.shapes import SHAPES, random_model
from ...patches.slim_layers import SlimLayer
from ..slim.cases import RANK_DIVISOR
from .cases import SAMPLING, GenerateCase
from .ways import GenerateWay

_FIRST_ID = 3  # of random prompts; the ids below are special in many vocabularies


def load(shape: str, device: torch.device, dtype: torch.dtype, slim: str | None = None) -> PreTrainedModel:
    """The model of a shape: random weights, ``embedded`` for the one that the package carries, or a checkpoint.

    Every sample of it runs to the end, so that steps are comparable. With `slim`, the plan of every layer, it is a
    slim model with random weights. Raises OSError without such a checkpoint, NotAvailableError for a shape without a
    slim form.
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
    if shape == "embedded":
        model = fd.load_embedded(dtype=dtype, device=device)[0]
    else:
        folder = Path(shape).expanduser()
        model = AutoModelForCausalLM.from_pretrained(folder if folder.is_dir() else shape, dtype=dtype)
        model = model.to(device).eval()
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
    """Bytes of a token's keys and values in all layers; of a slim model those of the ordinary one."""
    layout = ModelLayout.from_config(model.config)
    if layout.states:
        return model.dtype.itemsize * sum(store.numbers for store in layout.per_token.values())
    config = copy.copy(model.config)
    config.slim_layers = None
    return KVSizes.from_config(config).bytes_per_token(model.dtype.itemsize)


def prompt(model: PreTrainedModel, case: GenerateCase) -> Tensor:
    """Random ids ``[1, context]``; of a tree ``[problems, context]``, no two of which go on alike after what all
    share."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(_FIRST_ID, model.config.vocab_size, (1, case.context), generator=generator)
    if case.tree is not None:
        shared, problems = case.tree.shared, case.tree.problems
        own = torch.randint(_FIRST_ID, model.config.vocab_size, (problems, case.tree.own), generator=generator)
        own[:, 0] = _FIRST_ID + torch.arange(problems)
        ids = torch.cat([ids[:, :shared].expand(problems, -1), own], 1)
    return ids.to(model.device)


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
    ids = prompt(model, case)
    extra: dict[str, Any] = {}
    criteria: list[StoppingCriteria] = [stopping] if stopping is not None else []
    if case.finish:
        extra["pad_token_id"] = 0
        criteria.append(RowLengthCriteria(case.context, torch.tensor(case.lengths(), device=model.device)))
    if criteria:
        extra["stopping_criteria"] = StoppingCriteriaList(criteria)

    def call(new_tokens: int, return_dict: bool = False) -> Any:
        arguments = {"return_dict_in_generate": return_dict, **way.call_arguments(case.samples // len(ids)), **extra}
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            **arguments,
        )
        return output.sequences if arguments["return_dict_in_generate"] and not return_dict else output

    return call


def batch_caller(model: PreTrainedModel, case: GenerateCase) -> Callable[..., Any]:
    """The same by continuous batching; NotAvailableError where transformers has none, or rows finish apart."""
    if not hasattr(model, "generate_batch") or case.finish:
        raise NotAvailableError("generate_batch does not take this case")
    ids = prompt(model, case)
    prompts = ids.repeat_interleave(case.samples // len(ids), 0).tolist()

    def call(new_tokens: int) -> Any:
        config = GenerationConfig(max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0, **SAMPLING)
        found = model.generate_batch(prompts, generation_config=config)
        drawn = [len(output.generated_tokens) for output in found.values()]
        if drawn != [new_tokens] * case.samples:
            raise RuntimeError(f"generate_batch drew {sorted(set(drawn))} tokens for {len(drawn)} samples")
        return found

    return call
