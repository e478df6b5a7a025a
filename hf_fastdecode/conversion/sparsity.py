"""`measure_sparsity`: how many attention weights a threshold skips, and at which error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_fastdecode.generation.foreign_code import unwrapped
from hf_fastdecode.patches.config_base import check_threshold
from hf_fastdecode.patches.layers.attention_layer import SlimAttention
from hf_fastdecode.patches.layers.decoder_attention import SlimDecoderAttention
from hf_fastdecode.patches.layers.slim_attention import counted

from ..patches.layers.family import attention_inputs, language_config
from .calibration import calibration_text, model_inputs, on_device
from .families import family_of_slim, is_slim
from .fit.layer_plan import relative_error


@dataclass(frozen=True)
class LayerSparsity:
    """Effect of a threshold on one attention, whose inputs are those without a threshold.

    Of its unmasked attention weights, in all heads, the share `skipped` is below the threshold; `output_error` is the
    relative error of its output in the Frobenius norm.
    """

    name: str
    weights: int
    skipped: float
    output_error: float


@dataclass(frozen=True)
class SparsityReport:
    """Effect of a threshold on a slim model, on a text of so many tokens; its `str` is a table.

    Of the weights of all slim layers the share `skipped` is below the threshold. Compared with no threshold, logits
    have a relative error in the Frobenius norm, and the most likely token is the same in a share of positions.
    """

    threshold: float
    tokens: int
    skipped: float
    logits_error: float
    same_tokens: float
    layers: tuple[LayerSparsity, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"layers": [asdict(layer) for layer in self.layers]}

    def __str__(self) -> str:
        width = max(len("attention"), *(len(layer.name) for layer in self.layers))
        lines = [f"{'attention':{width}}  skipped  error of its output"]
        lines += [f"{one.name:{width}}  {one.skipped:7.1%}  {one.output_error:.2e}" for one in self.layers]
        lines.append(
            f"Threshold {self.threshold:g}: {self.skipped:.1%} of the weights skipped on {self.tokens:,} tokens; "
            f"logits are off by {self.logits_error:.2e}, and {self.same_tokens:.1%} of the most likely tokens agree."
        )
        return "\n".join(lines)


@torch.no_grad()
def measure_sparsity(
    model: PreTrainedModel,
    threshold: float,
    calibration: Tensor | None = None,
    *,
    features: Tensor | None = None,
    tokenizer: Any = None,
) -> SparsityReport:
    """Measure how much ``sparsity_threshold`` skips in a slim model, and the error that it adds.

    Slim attention, section 3: tokens whose attention weight is below the threshold add nothing to the values, and
    weights are not renormalised. Layers that keep keys and values have no threshold. The model runs the text in one
    pass, and its threshold is restored.

    Args:
        model: A slim model, on any device. Of multimodal models the language model is measured, on text.
        threshold: At least 0 and below 1.
        calibration, features, tokenizer: As in `to_slim`.

    Raises:
        ValueError: The model has no slim layers or no head, the threshold is out of its bounds, or there is no usable
            text, of ids that the model has.
        TypeError: `model` neither is nor wraps a transformers model.
    """
    check_threshold(threshold)
    model = unwrapped(model)
    kinds = (SlimAttention, SlimDecoderAttention)
    attentions = {name: one for name, one in model.named_modules() if isinstance(one, kinds)}
    if not is_slim(model.config) or not attentions:
        raise ValueError(
            f"a sparsity threshold is for slim layers, and this {type(model).__name__} has none; pass a model that "
            "to_slim or convert-checkpoint made"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"measure_sparsity compares logits, and this {type(model).__name__} has no head; pass a model with its "
            "head, as AutoModelForCausalLM loads it"
        )
    config = language_config(model.config)
    ids = calibration_text(config, calibration, tokenizer)
    _, family = family_of_slim(model.config)
    inputs = on_device(model, model_inputs(family, model.config, ids, features))

    found: list[LayerSparsity] = []
    training = model.training
    try:
        model.eval()
        with _threshold(config, 0.0), ExitStack() as hooks:
            for name, attention in attentions.items():
                hook = _measure_into(found, config, name, threshold)
                hooks.enter_context(attention.register_forward_hook(hook, with_kwargs=True))
            dense = model(**inputs, use_cache=False).logits.double()
        with _threshold(config, threshold):
            sparse = model(**inputs, use_cache=False).logits.double()
    finally:
        model.train(training)
    weights = sum(layer.weights for layer in found)
    return SparsityReport(
        threshold=threshold,
        tokens=len(ids),
        skipped=sum(layer.skipped * layer.weights for layer in found) / weights,
        logits_error=relative_error(sparse, dense),
        same_tokens=(sparse.argmax(-1) == dense.argmax(-1)).double().mean().item(),
        layers=tuple(found),
    )


def _measure_into(found: list[LayerSparsity], config: Any, name: str, threshold: float) -> Any:
    """A hook that runs an attention again with the threshold."""

    def measure(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        with _threshold(config, threshold), counted() as counts:
            sparse = module.forward(*args, **kwargs)[0]
        queries = len(attention_inputs(args, kwargs))
        encoded = kwargs.get("key_value_states")
        if encoded is None:  # causal
            weights, hidden = (module.heads * queries * (queries + more) // 2 for more in (1, -1))
        else:
            weights, hidden = module.heads * queries * encoded.shape[1], 0
        below = int(sum(count.item() for count in counts)) - hidden if counts else 0
        error = relative_error(sparse.double(), output[0].double())
        found.append(LayerSparsity(name, weights, below / weights, error))

    return measure


@contextmanager
def _threshold(config: Any, threshold: float) -> Iterator[None]:
    before = config.slim_sparsity_threshold
    config.slim_sparsity_threshold = threshold
    try:
        yield
    finally:
        config.slim_sparsity_threshold = before
