"""Tensor-parallel plans for models whose context is divided between the same processes (Helix parallelism).

Tensor parallelism stores a part of the KV heads in each process, at least one; with fewer KV heads than processes, it
stores some of them several times. Here each process computes the queries, keys and values of all heads, and stores its
part of the context's tokens instead; the other layers, which are most of the weights, are split as ever.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

_WHOLE, _OF_WHOLE_INPUT = "replicate", "rowwise_split_input"


def sequence_parallel_plan(config: PreTrainedConfig) -> dict[str, str]:
    """A plan of transformers' tensor parallelism that leaves attention heads whole.

    ::

        plan = hf_fastdecode.sequence_parallel_plan(AutoConfig.from_pretrained(name))
        distributed = DistributedConfig(tp_size=2, tp_plan=plan)
        model = AutoModelForCausalLM.from_pretrained(name, distributed_config=distributed)
        hf_fastdecode.enable(model, sequence_parallel="auto")

    Projections to queries, keys and values are computed by every process, and the projection of attention's output is
    split by its inputs. All other layers are split as by ``tp_plan="auto"``.

    Args:
        config: That of the model.

    Returns:
        Styles of all modules and parameters that the plan names, by their names with ``*`` for a layer's number.

    Raises:
        TypeError: It is no config.
        ValueError: transformers has no plan for this architecture.
    """
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            f"sequence_parallel_plan takes a model's config, got {type(config).__name__}; give it "
            "AutoConfig.from_pretrained(name), or model.config"
        )
    with torch.device("meta"):
        model = _class_of(config)
    usual: dict[str, str] = model.tp_plan or {}
    attention = {_generic(name) for name, module in model.named_modules() if _attends(module)}
    plan = {}
    for name, style in usual.items():
        if not any(name == one or name.startswith(f"{one}.") for one in attention):
            plan[name] = style
        elif style in ("rowwise", _OF_WHOLE_INPUT):
            plan[name] = _OF_WHOLE_INPUT
        elif _WHOLE in ALL_PARALLEL_STYLES:  # else a plan replaces the model's own: what it does not name is whole
            plan[name] = _WHOLE
    if not plan:
        raise ValueError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}; load it in every process, and "
            "divide its context alone: enable(model, sequence_parallel='auto')"
        )
    return plan


def _class_of(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of this config on the current device, of the class that its checkpoint names."""
    named: Any = getattr(transformers, (config.architectures or [""])[0], None)
    if named is not None and issubclass(named, PreTrainedModel):
        return named._from_config(config)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _attends(module: nn.Module) -> bool:
    """Whether a module has the projections of one layer's attention."""
    return "layer_idx" in vars(module) and any(hasattr(module, name) for name in ("is_causal", "num_key_value_groups"))


def _generic(name: str) -> str:
    """A module's name with ``*`` for numbers, as plans have it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
