"""``hf-fastdecode`` as a model of lm-evaluation-harness. Imports lm_eval, which is an optional extra."""

from __future__ import annotations

from typing import Any, Final

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from hf_fastdecode.api import enable
from hf_fastdecode.assets import embedded_folder
from hf_fastdecode.errors import InputError
from hf_fastdecode.generation.options import Mode, Options, Sampler

from ..model_names import EMBEDDED

MODEL_NAME: Final = "hf-fastdecode"
"""Under which lm-eval knows it."""


@register_model(MODEL_NAME)
class FastDecodeLM(HFLM):
    """lm-eval's `HFLM` with its model enabled: repeats share their prompt, and problems the examples in front of them.

    `pretrained` and further arguments are those of `HFLM`, or ``embedded``; `mode`, `sampler` and `reuse_prefix` those
    of `hf_fastdecode.enable`, and a value that it refuses is an InputError. `reuse_prefix` is by default on for
    batches of 1, whose calls have nothing else to share.
    """

    def __init__(
        self,
        pretrained: Any = EMBEDDED,
        *,
        mode: Mode = "auto",
        sampler: Sampler = "auto",
        reuse_prefix: bool | int | None = None,
        **arguments: Any,
    ):
        try:
            Options(mode=mode, sampler=sampler, reuse_prefix=reuse_prefix or False)
        except ValueError as error:
            raise InputError(f"--model_args: {error}") from error
        super().__init__(str(embedded_folder()) if pretrained == EMBEDDED else pretrained, **arguments)
        reuse = self.batch_size == 1 if reuse_prefix is None else reuse_prefix
        enable(self.model, mode=mode, sampler=sampler, reuse_prefix=reuse)
