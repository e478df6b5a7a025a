"""A tiny checkpoint for the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_fastdecode.cli.models import load_model

from .checkpoint import save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def loaded(checkpoint: Path):
    """Its model and tokenizer."""
    return load_model(str(checkpoint), "float32", torch.device("cpu"))
