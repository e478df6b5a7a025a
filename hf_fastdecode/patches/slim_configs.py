"""Configs of slim decoders: a line for each family, whose classes are in the file of `architectures` of that name.

Configs are registered with transformers' registry, before any modelling code is imported. Checkpoints on disk name
this module and these classes.
"""

from __future__ import annotations

from .config_base import SELF_PLANS, slim_config

SlimLlamaConfig = slim_config("llama", __name__)
SlimPhi3Config = slim_config("phi3", __name__)
SlimOlmoConfig = slim_config("olmo", __name__)
SlimOlmo2Config = slim_config("olmo2", __name__)
SlimGPTNeoXConfig = slim_config("gpt_neox", __name__)
SlimGPT2Config = slim_config("gpt2", __name__, plans=SELF_PLANS, rotary=False)
SlimOPTConfig = slim_config("opt", __name__, plans=SELF_PLANS, rotary=False)
SlimQwen2Config = slim_config("qwen2", __name__)
SlimGemmaConfig = slim_config("gemma", __name__)
SlimCohereConfig = slim_config("cohere", __name__)
SlimCodeGenConfig = slim_config("codegen", __name__)
SlimStableLmConfig = slim_config("stablelm", __name__)
