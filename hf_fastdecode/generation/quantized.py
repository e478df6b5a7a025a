"""Quantized layers whose results for a token depend on the other tokens of a pass, so that shared ones would differ.

Others, with quantized weights of whatever package, compute each token by itself, and share.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import Unsupported
from .snapshot import ModelWalk

_OF_BITSANDBYTES = "bitsandbytes.nn.modules"


def check_quantized(walk: ModelWalk) -> None:
    """Raise `Unsupported` if layers round a token's activations by those of other tokens.

    LLM.int8 (Dettmers et al., 2022, section 3.2) multiplies a feature in 16 bits for all tokens of a pass if it is an
    outlier of any. Activations that are scaled per tensor have one scale for all tokens of a pass. Packed prompts, and
    batches without finished rows, are other tokens than stock's.
    """
    kinds = [kind for kind in walk.classes if kind.__module__ == _OF_BITSANDBYTES and kind.__name__ == "Linear8bitLt"]
    if kinds and any(type(module) in kinds and _finds_outliers(module) for module in walk.modules):
        raise Unsupported(
            "its 8-bit layers (bitsandbytes) find outlier features over all tokens of a pass",
            "load it with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)",
        )
    if any(_scales_all_tokens(weight) for weight in walk.parameters if type(weight) is not nn.Parameter):
        raise Unsupported(
            "its activations are quantized with one scale for all tokens of a pass (PerTensor)",
            "quantize it with granularity=PerRow()",
        )


def _finds_outliers(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "state", None), "threshold", 0.0))


def _scales_all_tokens(weight: Tensor) -> bool:
    """Whether a weight of torchao quantizes the activations that it multiplies so, without a scale that is known."""
    given = getattr(weight, "act_quant_kwargs", None)
    per_tensor = type(getattr(given, "granularity", None)).__name__ == "PerTensor"
    return per_tensor and getattr(weight, "act_quant_scale", None) is None
