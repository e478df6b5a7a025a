"""Configs of slim models: those of ordinary models, with the cache layout of each layer."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.codegen.configuration_codegen import CodeGenConfig
from transformers.models.cohere.configuration_cohere import CohereConfig
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.olmo.configuration_olmo import OlmoConfig
from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
from transformers.models.opt.configuration_opt import OPTConfig
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config

from .slim_layers import SlimLayer, read_layers


class SlimConfig(PreTrainedConfig):
    """Base class of slim models' configs; it precedes the ordinary config among base classes.

    Tensor parallelism splits the MLPs only: the matrices from keys to values mix all heads, so every rank needs all.

    Attributes:
        slim_layers: A dictionary of `SlimLayer`'s fields per layer; None for keys and values everywhere.
        slim_matrix_dtype: Of the matrices that give the values, e.g. ``float16``; casting the model leaves it.
    """

    slim_layers: list[dict[str, Any]] | None = None
    slim_matrix_dtype: str = "float16"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.base_model_tp_plan is not None:
            plan = cls.base_model_tp_plan
            cls.base_model_tp_plan = {name: split for name, split in plan.items() if ".mlp." in name}

    def __post_init__(self, **kwargs: Any) -> None:
        """Check, and register the model class, which the Auto classes ask for next.

        Raises:
            ValueError: Plans that are none, or plans without values for a model that is not multi-head.
        """
        super().__post_init__(**kwargs)
        if self.slim_matrix_dtype not in ("float16", "float32"):
            raise ValueError(f"slim_matrix_dtype must be float16 or float32, got {self.slim_matrix_dtype!r}")
        slim = any(layer.plan != "kv" for layer in self.layer_plans)
        kv_heads = getattr(self, "num_key_value_heads", self.num_attention_heads)
        if slim and kv_heads != self.num_attention_heads:
            raise ValueError(
                "a cache of keys alone needs num_key_value_heads == num_attention_heads, got "
                f"{kv_heads} != {self.num_attention_heads}; plan 'kv' for every layer"
            )
        import_module(f".architectures.{self.model_type}", __package__)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As transformers', with a modelling file beside the config, for loading with ``trust_remote_code=True``."""
        from .modeling_file import write_modeling_file  # it needs the registry of models, which reads from configs

        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.auto_map = write_modeling_file(self, folder)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing, where transformers would mark a class that it loaded by ``auto_map``.

        Of a marked class `save_pretrained` would copy the source file, which does not work outside its package.
        """

    @property
    def layer_plans(self) -> list[SlimLayer]:
        """Cache layout of each layer."""
        return read_layers(self.slim_layers, self.num_hidden_layers)


@strict
class SlimLlamaConfig(SlimConfig, LlamaConfig):
    """A Llama config with the cache layout of each layer."""

    model_type = "slim_llama"


@strict
class SlimPhi3Config(SlimConfig, Phi3Config):
    """A Phi-3 config with the cache layout of each layer."""

    model_type = "slim_phi3"


@strict
class SlimOlmoConfig(SlimConfig, OlmoConfig):
    """An OLMo config with the cache layout of each layer."""

    model_type = "slim_olmo"


@strict
class SlimOlmo2Config(SlimConfig, Olmo2Config):
    """An OLMo 2 config with the cache layout of each layer."""

    model_type = "slim_olmo2"


@strict
class SlimGPTNeoXConfig(SlimConfig, GPTNeoXConfig):
    """A GPT-NeoX config with the cache layout of each layer."""

    model_type = "slim_gpt_neox"


@strict
class SlimGPT2Config(SlimConfig, GPT2Config):
    """A GPT-2 config with the cache layout of each layer."""

    model_type = "slim_gpt2"


@strict
class SlimOPTConfig(SlimConfig, OPTConfig):
    """An OPT config with the cache layout of each layer."""

    model_type = "slim_opt"


@strict
class SlimQwen2Config(SlimConfig, Qwen2Config):
    """A Qwen2 config with the cache layout of each layer."""

    model_type = "slim_qwen2"


@strict
class SlimGemmaConfig(SlimConfig, GemmaConfig):
    """A Gemma config with the cache layout of each layer."""

    model_type = "slim_gemma"


@strict
class SlimCohereConfig(SlimConfig, CohereConfig):
    """A Cohere config with the cache layout of each layer."""

    model_type = "slim_cohere"


@strict
class SlimCodeGenConfig(SlimConfig, CodeGenConfig):
    """A CodeGen config with the cache layout of each layer."""

    model_type = "slim_codegen"


for config in (
    SlimLlamaConfig,
    SlimPhi3Config,
    SlimOlmoConfig,
    SlimOlmo2Config,
    SlimGPTNeoXConfig,
    SlimGPT2Config,
    SlimOPTConfig,
    SlimQwen2Config,
    SlimGemmaConfig,
    SlimCohereConfig,
    SlimCodeGenConfig,
):
    AutoConfig.register(config.model_type, config, exist_ok=True)  # this package may be imported afresh
