"""Weight matrices that a decode step reads, counted on a model without memory for its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

from ..checkpoint.families.multimodal import MULTIMODAL


def empty_model(config: Any) -> PreTrainedModel:
    """A model of a config on the meta device, in eval mode.

    Raises:
        Exception: Whatever the model's own code raises.
    """
    auto = AutoModelForMultimodalLM if config.model_type in MULTIMODAL else AutoModelForCausalLM
    if config.is_encoder_decoder:
        speech = type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
        auto = AutoModelForSpeechSeq2Seq if speech else AutoModelForSeq2SeqLM
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=False).eval()


def decoder_matrices(model: PreTrainedModel) -> int:
    """Numbers in the matrices of the decoder's layers and of the output head.

    Biases and norms are left out, as in section 7 of Slim attention, and tables of embeddings, of which a step reads a
    row, unless they are the head's matrix too. All experts of a mixture are counted.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    tables = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)}
    matrices = {id(one): one.numel() for one in decoder.parameters() if one.dim() >= 2 and id(one) not in tables}
    return sum((matrices | {id(head.weight): head.weight.numel()}).values())
