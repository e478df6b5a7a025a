"""The modelling file of slim checkpoints: they load with ``trust_remote_code=True`` in programs without this import.

transformers' Auto classes find the file by ``auto_map`` in config.json. It imports this package, and where that is not
installed, transformers says so before it runs the file. After ``import hf_fastdecode`` the registered
classes serve, and the file is not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_MAPPING,
)

_NAME = "modeling_slim"
_TITLE = '"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""'
_MODELS = {
    "AutoModel": MODEL_MAPPING,
    "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING,
    "AutoModelForSeq2SeqLM": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "AutoModelForSpeechSeq2Seq": MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
}


def write_modeling_file(config: Any, folder: Path) -> dict[str, str]:
    """Write ``modeling_slim.py``, which imports the classes from where they are.

    Checkpoints on disk and on the Hub keep these module paths, so they must stay importable.

    Args:
        config: Of a slim model.
        folder: Of the checkpoint.

    Returns:
        ``auto_map`` of the config.
    """
    kind = type(config)
    classes = {"AutoConfig": kind} | {auto: known[kind] for auto, known in _MODELS.items() if kind in known}
    imports = sorted({f"from {one.__module__} import {one.__name__}" for one in classes.values()})
    (folder / f"{_NAME}.py").write_text("\n".join([_TITLE, "", *imports, ""]), encoding="utf-8")
    return {auto: f"{_NAME}.{one.__name__}" for auto, one in classes.items()}
