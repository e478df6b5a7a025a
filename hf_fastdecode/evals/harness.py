"""``hf-fastdecode`` as a model of lm-evaluation-harness. Imports lm_eval, which is an optional extra."""

from __future__ import annotations

import re
from typing import Any, Final

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from hf_fastdecode.api import enable
from hf_fastdecode.assets import embedded_folder
from hf_fastdecode.errors import InputError
from hf_fastdecode.generation.options import Mode, Options, Sampler

from ..dtypes import FLOATS, parse_dtype
from ..model_loading import auto_class, check_peft, load_tokenizer
from ..model_names import EMBEDDED, base_of, load_config

MODEL_NAME: Final = "hf-fastdecode"
"""Under which lm-eval knows it."""


@register_model(MODEL_NAME)
class FastDecodeLM(HFLM):
    """lm-eval's `HFLM` with its model enabled: repeats share their prompt, and problems the examples in front of them.

    `pretrained` and further arguments are those of `HFLM`, or ``embedded``; `mode`, `sampler` and `reuse_prefix` those
    of `hf_fastdecode.enable`, and a value that it refuses is an InputError. `reuse_prefix` is by default on: a task's
    examples are computed once, and not once for each batch.
    """

    def __init__(
        self,
        pretrained: Any = EMBEDDED,
        *,
        mode: Mode = "auto",
        sampler: Sampler = "auto",
        reuse_prefix: bool | int = True,
        **arguments: Any,
    ):
        try:
            Options(mode=mode, sampler=sampler, reuse_prefix=reuse_prefix)
        except ValueError as error:
            raise InputError(f"--model_args: {error}") from error
        size = arguments.get("batch_size")
        if size is not None and not re.fullmatch(r"auto(:\d+)?|0*[1-9]\d*", str(size)):
            raise InputError(f"--batch_size must be a whole number of at least 1, auto or auto:N, got {str(size)!r}")
        if isinstance(pretrained, str):
            pretrained, arguments = _of_checkpoint(pretrained, arguments)
        super().__init__(pretrained, **arguments)
        enable(self.model, mode=mode, sampler=sampler, reuse_prefix=reuse_prefix)

    def _get_backend(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Choose the model class as lm-eval does, or the text class of a multimodal model."""
        if getattr(self, "AUTO_MODEL_CLASS", None) is None and (auto := _multimodal_class(config)) is not None:
            self.AUTO_MODEL_CLASS = auto
            kwargs["backend"] = "causal"
        super()._get_backend(config, *args, **kwargs)


def _multimodal_class(config: Any) -> Any:
    try:
        auto = auto_class(config)
    except ValueError:  # custom code
        return None
    return None if config.is_encoder_decoder or auto is AutoModelForCausalLM else auto


def _of_checkpoint(name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """`pretrained` and further arguments of `HFLM` for a model's name: an adapter goes with its base."""
    if arguments.get("dtype") is not None:
        arguments["dtype"] = parse_dtype(str(arguments["dtype"]), known=(*FLOATS, "float64"))
    if name == EMBEDDED:
        return str(embedded_folder()), arguments
    if any(arguments.get(one) for one in ("gguf_file", "subfolder", "trust_remote_code")) or "revision" in arguments:
        return name, arguments
    load_config(name)
    if (base := base_of(name)) is None:
        return name, arguments
    check_peft(name, base)
    return base, {"peft": name, "tokenizer": load_tokenizer(name), **arguments}
