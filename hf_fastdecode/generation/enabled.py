"""Installs and removes the method overrides of `enable` and `disable`.

Only methods of the instance are overridden (`generate_hooks`); classes, modules and transformers are unchanged.
"""

from __future__ import annotations

import logging
from functools import cache

from transformers import PreTrainedModel

from .. import _compat
from ..cache.layout import ModelLayout
from ..errors import reason_of
from .generate_hooks import METHODS
from .instance_patch import STATE_ATTRIBUTE
from .model_state import STATE_LOCK, ModelState, state_of
from .options import Options
from .report import Report
from .support import check_model

logger = logging.getLogger("hf_fastdecode")


def install(model: PreTrainedModel, options: Options) -> None:
    """Override the model's methods, or replace the options of an enabled model."""
    if (newer := _compat.untested_transformers()) is not None:
        _warn_of(newer)
    with STATE_LOCK:
        model_state: ModelState | None = vars(model).get(STATE_ATTRIBUTE)
        if model_state is None:
            model_state = ModelState(model, options, METHODS)
            model_state.methods.install(model, model_state)
        else:
            model_state.options, model_state.disable_pending = options, False
            model_state.captures.retry()
            if not options.reuse_prefix:
                model_state.reused.clear()


@cache  # once per process
def _warn_of(newer: str) -> None:
    logger.warning(
        "transformers %s is newer than %d.%d, the newest release that this version of hf_fastdecode was tested with: "
        "calls that fail with it before their first token run stock transformers; look for a newer hf_fastdecode",
        newer,
        *_compat.NEWEST_TESTED,
    )


def uninstall(model: PreTrainedModel) -> None:
    """Undo `install`, at once or when the last `generate` call in progress ends."""
    with STATE_LOCK:
        if (model_state := state_of(model)) is None:
            return
        if model_state.is_generating():
            model_state.disable_pending = True
        else:
            model_state.uninstall(model)


def report_on(model: PreTrainedModel) -> Report:
    """Build the report that `hf_fastdecode.explain` returns."""
    model_state, layout = state_of(model), ModelLayout.of(model)
    return Report(
        model=type(model).__name__,
        enabled=model_state is not None,
        layer_count=len(layout.layers) or None,
        model_reason=reason_of(check_model, model, layout),
        last_call=model_state.last_call if model_state else None,
    )
