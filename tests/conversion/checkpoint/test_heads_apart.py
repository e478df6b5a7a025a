"""Heads that were trained apart from the embeddings, where the config still says that the two are tied."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.conversion.checkpoint.convert import Settings, convert_checkpoint
from hf_fastdecode.conversion.checkpoint.families.lookup import family_of
from hf_fastdecode.conversion.checkpoint.in_memory import to_slim
from hf_fastdecode.conversion.checkpoint.plan_choice import PlanChoice

from ...patches.encoder_decoder_models import MODELS, encoder_decoder, read_by
from ...patches.family_models import FAMILIES, family_model
from ...patches.slim_models import TEXT

DECODERS = [name for name in FAMILIES if name not in ("gpt2-scaled", "opt-350m")]  # untied by config; another width


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def trained_apart(name: str, **overrides: Any) -> PreTrainedModel:
    """A model whose config ties, with another head."""
    model = family_model(name, tie_word_embeddings=True, **overrides)
    head = model.get_output_embeddings().weight
    assert head is model.get_input_embeddings().weight
    model.get_output_embeddings().weight = nn.Parameter(head + 0.3 * head.std() * torch.randn(head.shape))
    assert model.config.tie_word_embeddings
    return model.eval()


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(TEXT[None, :40]).logits


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL_PATH).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", DECODERS)
def test_to_slim_keeps_the_head(name: str, tmp_path: Path) -> None:
    model = trained_apart(name)
    slim = to_slim(model, TEXT, plan="k")
    assert relative(logits(slim), logits(model)) < 1e-4
    assert not slim.config.tie_word_embeddings
    slim.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), logits(slim))


@pytest.mark.parametrize("name", DECODERS)
def test_a_converted_checkpoint_keeps_the_head(name: str, tmp_path: Path) -> None:
    vocabulary = len(AutoTokenizer.from_pretrained(MODEL_PATH))
    model = trained_apart(name, vocab_size=vocabulary)
    source = save(model, tmp_path / "source")
    choice = PlanChoice(plan="k")
    convert_checkpoint(Settings(str(source), tmp_path / "slim", choice=choice, dtype=torch.float32))
    slim = AutoModelForCausalLM.from_pretrained(tmp_path / "slim").eval()
    assert relative(logits(slim), logits(model)) < 1e-4
    assert not slim.config.tie_word_embeddings
    convert_checkpoint(Settings(str(tmp_path / "slim"), tmp_path / "full", format="full"))
    full = AutoModelForCausalLM.from_pretrained(tmp_path / "full").eval()
    assert relative(logits(full), logits(model)) < 1e-4
    assert not full.config.tie_word_embeddings


@pytest.mark.parametrize("name", ["phi3", "gpt2"])
def test_tied_heads_stay_tied_and_are_stored_once(name: str, tmp_path: Path) -> None:
    vocabulary = len(AutoTokenizer.from_pretrained(MODEL_PATH))
    model = family_model(name, tie_word_embeddings=True, vocab_size=vocabulary)
    slim = to_slim(model, TEXT, plan="k")
    assert slim.config.tie_word_embeddings
    assert slim.get_output_embeddings().weight is slim.get_input_embeddings().weight
    source = save(model, tmp_path / "source")
    convert_checkpoint(Settings(str(source), tmp_path / "slim", choice=PlanChoice(plan="k")))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "slim")
    assert loaded.config.tie_word_embeddings
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    sizes = [(tmp_path / one / "model.safetensors").stat().st_size for one in ("source", "slim")]
    assert sizes[1] < sizes[0] + 8 * vocabulary * 64 // 4


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
@pytest.mark.parametrize("where", ["memory", "checkpoint"])
def test_with_an_encoder(name: str, where: str, tmp_path: Path) -> None:
    """T5's config also says by what its logits are scaled, so that it stays as it is."""
    assert name in MODELS
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    model = encoder_decoder(name, vocab_size=len(tokenizer), tie_word_embeddings=True)
    head = model.get_output_embeddings().weight
    model.get_output_embeddings().weight = nn.Parameter(head + 0.3 * head.std() * torch.randn(head.shape))
    if where == "memory":
        slim = to_slim(deepcopy(model), TEXT, plan="k")
    else:
        source = save(model, tmp_path / "source")
        convert_checkpoint(Settings(str(source), tmp_path / "slim", choice=PlanChoice(plan="k"), dtype=torch.float32))
        slim = family_of(model.config).auto.from_pretrained(tmp_path / "slim").eval()
    read = {**read_by(model, rows=1), "decoder_input_ids": TEXT[None, :20]}
    with torch.no_grad():
        assert relative(slim(**read).logits, model(**read).logits) < 1e-4
    assert slim.config.tie_word_embeddings
