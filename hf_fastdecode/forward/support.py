"""Which decoders compute shared tokens once in passes without a cache."""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from .._compat import global_backward_hooks
from ..attention.overrides import own_code_of
from ..errors import Unsupported
from ..generation.forward_pass import labels_of_pass
from ..generation.snapshot import ModelWalk
from ..generation.structure import Structure
from ..generation.support import check_model, check_state, rope_limit
from ..hook_roles import defining_module, name_of, role_of
from .rows import Batch

_WHY: Final = "which would see distinct tokens packed into one row"

_POSITIONS_OF_IDS: Final = "create_position_ids_from_input_ids"
"""Method of embeddings, such as RoBERTa's, that count ids other than that of padding, from that on."""


def check_decoder(decoder: PreTrainedModel, structure: Structure) -> None:
    """Raise `Unsupported` if the decoder, as it is now, cannot run a packed row of distinct tokens."""
    name, layout = type(decoder).__name__, structure.layout
    check_model(decoder, layout)
    own = own_code_of(type(decoder))
    if layout.own or (own is not None and (own.computes_layers or own.reads_masks)):
        raise Unsupported(f"the attention of {name} runs by code of its own, which reads a cache")
    if layout.states or layout.cross:
        raise Unsupported("its layers have states, or an encoder's keys and values")
    check_state(structure.walk, keeps_cache=False)


_KNOW_DISTANCES_ALONE: Final = frozenset(
    {
        *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm"),
        *("glm4", "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium", "llama", "mistral", "mixtral", "nemotron"),
        *("olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3"),
        *("qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    }
)
"""Model types with rotary embeddings, whose code reads positions for nothing else, and has no weights per channel
after the rotation."""


def knows_distances_alone(decoder: PreTrainedModel) -> bool:
    """Whether positions of a row may all be moved by one offset."""
    of_transformers = type(decoder).__module__.startswith("transformers.models.")
    known = of_transformers and decoder.config.model_type in _KNOW_DISTANCES_ALONE
    return known and rope_limit(decoder.config) is None


_COMPOSABLE_CHECKPOINT: Final = "torch.distributed._composable.checkpoint_activation"


def check_backward_hooks(walk: ModelWalk) -> None:
    """Raise `Unsupported` if hooks would see gradients of a packed row, or compute it again outside of its pass."""
    for hook in global_backward_hooks():
        if role_of(hook) is None:
            raise Unsupported(f"all modules have a backward hook, {name_of(hook)}, {_WHY}", "remove it for the pass")
    for module in walk.modules:
        if any(defining_module(hook) == _COMPOSABLE_CHECKPOINT for hook in module._forward_pre_hooks.values()):
            raise Unsupported(f"{type(module).__name__} is checkpointed by {_COMPOSABLE_CHECKPOINT}")
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            if role_of(hook) is None:
                raise Unsupported(
                    f"{type(module).__name__} has a backward hook, {name_of(hook)}, {_WHY}", "remove it for the pass"
                )


def check_settings(decoder: PreTrainedModel, structure: Structure, given: dict[str, Any]) -> None:
    """Raise `Unsupported` if a pass asks for what a packed row does not compute."""
    for output in ("output_attentions", "output_router_logits"):
        asked = given.get(output)
        if asked or (asked is None and getattr(decoder.config, output, False)):
            raise Unsupported(f"{output}=True counts, or shows, each row's tokens", f"pass {output}=False")
    if given.get("position_ids") is None and any(hasattr(kind, _POSITIONS_OF_IDS) for kind in structure.walk.classes):
        raise Unsupported("its positions follow from ids, those of padding left out", "pass position_ids")
    if not isinstance(F.scaled_dot_product_attention, BuiltinFunctionType):  # as by PyTorch's context parallelism
        raise Unsupported("torch.nn.functional.scaled_dot_product_attention is replaced, and would not be called")


def check_labels(batch: Batch) -> None:
    """Raise `Unsupported` if the model's labels count a token that stock predicts from padding, of which we have 0."""
    labels = labels_of_pass()
    if labels is None or labels.shape != batch.inputs.shape[:2]:
        return
    behind = [(number, row.column) for number, row in enumerate(batch.rows) if row.column and len(row.keys)]
    if behind and bool((labels[tuple(torch.tensor(behind).T)] >= 0).any()):
        raise Unsupported(
            "labels count the first token behind left padding, which stock predicts from padding",
            "mask that label (-100), or pad on the right",
        )


def check_length(decoder: PreTrainedModel, longest: int) -> None:
    """Raise `Unsupported` if the position embedding of a row of this length is not that of shorter ones."""
    limit = rope_limit(decoder.config.get_text_config(decoder=True))
    if limit is not None and longest > limit:
        raise Unsupported(f"its position embedding changes beyond {limit} tokens, and a row has {longest}")
