"""Configs of slim models: those of ordinary models, with the cache layout of each layer."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
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

from .config_base import SlimConfig
from .slim_layers import SELF_PLANS


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
    plans = SELF_PLANS
    rotary = False


@strict
class SlimOPTConfig(SlimConfig, OPTConfig):
    """An OPT config with the cache layout of each layer."""

    model_type = "slim_opt"
    plans = SELF_PLANS
    rotary = False


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
