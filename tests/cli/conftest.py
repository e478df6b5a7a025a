"""Checkpoints for the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.cli.models import load_model

from ..conversion.checkpoints import save_multi_head
from ..tiny_models import tiny_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model with the embedded tokenizer; its sampling defaults must not be used."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 1024}
    model = tiny_model(vocab_size=len(tokenizer), **sizes, **ends)
    model.generation_config.update(**ends, do_sample=True, temperature=0.1, top_k=1, repetition_penalty=1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def loaded(checkpoint: Path):
    """Its model and tokenizer."""
    return load_model(str(checkpoint), "float32", torch.device("cpu"))


@pytest.fixture
def embedded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in the place of the embedded model."""
    monkeypatch.setattr("hf_fastdecode.assets.MODEL_PATH", checkpoint)
    monkeypatch.setattr("hf_fastdecode.model_names.MODEL_PATH", checkpoint)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has a slim form."""
    return save_multi_head(tmp_path_factory.mktemp("multi-head"))
