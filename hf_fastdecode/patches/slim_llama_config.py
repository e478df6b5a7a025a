"""The config of a Llama model with slim attention."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from .slim_layers import SlimLayer, read_layers


@strict
class SlimLlamaConfig(LlamaConfig):
    """A Llama config, and what each layer caches.

    Tensor parallelism splits the MLPs only: the matrices from keys to values mix all heads, so every rank needs all.

    Attributes:
        slim_layers: A dictionary of `SlimLayer`'s fields per layer; None for keys and values everywhere.
        slim_matrix_dtype: Of the matrices that give the values, e.g. ``float16``; casting the model leaves it.
    """

    model_type = "slim_llama"
    base_model_tp_plan = {  # noqa: RUF012, as in transformers
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    slim_layers: list[dict[str, Any]] | None = None
    slim_matrix_dtype: str = "float16"

    def __post_init__(self, **kwargs: Any) -> None:
        """Check, and register the model class, which the Auto classes ask for next.

        Raises:
            ValueError: Plans that are none, or plans without values for a model that is not multi-head.
        """
        super().__post_init__(**kwargs)
        if self.slim_matrix_dtype not in ("float16", "float32"):
            raise ValueError(f"slim_matrix_dtype must be float16 or float32, got {self.slim_matrix_dtype!r}")
        slim = any(layer.plan != "kv" for layer in self.layer_plans)
        if slim and self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                "a cache of keys alone needs num_key_value_heads == num_attention_heads, got "
                f"{self.num_key_value_heads} != {self.num_attention_heads}; plan 'kv' for every layer"
            )
        import_module(".slim_llama", __package__)

    @property
    def layer_plans(self) -> list[SlimLayer]:
        """Cache layout of each layer."""
        return read_layers(self.slim_layers, self.num_hidden_layers)
