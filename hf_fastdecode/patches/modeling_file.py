"""The modelling file of slim checkpoints: they load with ``trust_remote_code=True`` in programs without this import.

transformers' Auto classes find the file by ``auto_map`` in config.json. It imports this package, and where that is not
installed, transformers says so before it runs the file. After ``import hf_fastdecode`` the registered
classes serve, and the file is not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

_NAME = "modeling_slim"

# Checkpoints on disk and on the Hub keep these module paths, so they must stay importable.
_TEXT = '''"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""

from hf_fastdecode.patches.architectures.{model_type} import {AutoModelForCausalLM}, {AutoModel}
from hf_fastdecode.patches.slim_configs import {AutoConfig}
'''


def write_modeling_file(config: Any, folder: Path) -> dict[str, str]:
    """Write ``modeling_slim.py``.

    Args:
        config: Of a slim model.
        folder: Of the checkpoint.

    Returns:
        ``auto_map`` of the config.
    """
    kind = type(config)
    classes = {
        "AutoConfig": kind,
        "AutoModel": MODEL_MAPPING[kind],
        "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING[kind],
    }
    names = {auto: found.__name__ for auto, found in classes.items()}
    text = _TEXT.format(model_type=config.model_type, **names)
    (folder / f"{_NAME}.py").write_text(text, encoding="utf-8")
    return {auto: f"{_NAME}.{name}" for auto, name in names.items()}
