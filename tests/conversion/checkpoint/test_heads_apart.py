"""Heads that were trained apart from the embeddings, where the config still says that the two are tied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer, PreTrainedModel

from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.conversion.checkpoint.convert import Settings, convert_checkpoint
from hf_fastdecode.conversion.families import family_of
from hf_fastdecode.conversion.layers.plan_choice import PlanChoice
from hf_fastdecode.conversion.to_slim import to_slim

from ...patches.encoder_decoder_models import encoder_decoder, read_by
from ...patches.family_models import FAMILIES, family_model
from ...patches.multimodal_models import MULTIMODAL, multimodal_model
from ...patches.slim_models import TEXT
from ...tiny_models import tiny_model

pytestmark = pytest.mark.exhaustive

DECODERS = ["llama", *FAMILIES]
TYING = [name for name in MULTIMODAL if name != "qwen2_audio"]  # whose class ties nothing


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def trained_apart(name: str, **overrides: Any) -> PreTrainedModel:
    """A model whose config ties, with another head."""
    options = {"tie_word_embeddings": True, **overrides}
    return with_another_head(tiny_model("llama-mha", **options) if name == "llama" else family_model(name, **options))


def with_another_head(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, tied so far."""
    head = model.get_output_embeddings().weight
    assert head is model.get_input_embeddings().weight or model.config.is_encoder_decoder
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


@pytest.mark.parametrize("language", [False, True])
@pytest.mark.parametrize("name", TYING)
def test_multimodal_models(name: str, language: bool, tmp_path: Path) -> None:
    """The whole model's config ties; its language model's may say so too."""
    vocabulary = len(AutoTokenizer.from_pretrained(MODEL_PATH)) + 2
    model = multimodal_model(name, {"vocab_size": vocabulary, "tie_word_embeddings": language})
    model.config.tie_word_embeddings = True
    model.tie_weights()
    source = save(with_another_head(model), tmp_path / "source")
    settings = Settings(str(source), tmp_path / "slim", choice=PlanChoice(plan="k"), dtype=torch.float32)
    convert_checkpoint(settings)
    convert_checkpoint(Settings(str(tmp_path / "slim"), tmp_path / "full", format="full"))
    loaded = [AutoModelForMultimodalLM.from_pretrained(tmp_path / one).eval() for one in ("slim", "full")]
    for made in (to_slim(model, TEXT, plan="k"), *loaded):
        assert relative(logits(made), logits(model)) < 1e-4
        assert torch.equal(made.lm_head.weight, model.lm_head.weight)
        assert not made.config.tie_word_embeddings
        assert not made.config.text_config.tie_word_embeddings


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_with_an_encoder(name: str, tmp_path: Path) -> None:
    """Configs of T5 and BART stay, as they also tie the embeddings of encoder and decoder."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    model = encoder_decoder(name, vocab_size=len(tokenizer), tie_word_embeddings=True)
    source = save(with_another_head(model), tmp_path / "source")
    auto = family_of(model.config).auto
    convert_checkpoint(Settings(str(source), tmp_path / "slim", choice=PlanChoice(plan="k"), dtype=torch.float32))
    convert_checkpoint(Settings(str(tmp_path / "slim"), tmp_path / "full", format="full"))
    in_memory = to_slim(model, TEXT, plan="k")
    in_memory.save_pretrained(tmp_path / "saved")
    loaded = [auto.from_pretrained(tmp_path / one).eval() for one in ("slim", "full", "saved")]
    read = {**read_by(model, rows=1), "decoder_input_ids": TEXT[None, :20]}
    for made in (in_memory, *loaded):
        with torch.no_grad():
            assert relative(made(**read).logits, model(**read).logits) < 1e-4
        assert torch.equal(made.get_output_embeddings().weight, model.get_output_embeddings().weight)
        assert made.config.tie_word_embeddings == (name != "whisper")
        if name == "whisper":  # as when embeddings are resized
            made.tie_weights()
            assert torch.equal(made.get_output_embeddings().weight, model.get_output_embeddings().weight)
