"""Tensors by other names than the model's: its base model's are found, and unknown ones left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedModel

from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.conversion.checkpoint.convert import Settings, convert_checkpoint
from hf_fastdecode.conversion.families import family_of
from hf_fastdecode.conversion.layers.plan_choice import PlanChoice

from ...cli.command_line import refusal, run
from ...patches.encoder_decoder_models import encoder_decoder, read_by
from ...patches.family_models import FAMILIES, family_model
from ...patches.multimodal_models import multimodal_model
from ...patches.slim_models import TEXT
from ...tiny_models import tiny_model
from .checkpoints import save_multi_head

pytestmark = pytest.mark.exhaustive

ENCODERS = ["t5", "bart", "whisper"]
DECODERS = ["llama", *(name for name in FAMILIES if "-" not in name and name != "codegen")]
UNUSED = {
    "lm_head.bias": torch.ones(3),
    "model.norm.bias": torch.full((3,), float("nan")),
    "extra.scale": torch.ones(3).to(torch.float8_e4m3fn),
    "extra.zeros": torch.ones(3).to(torch.complex64),
}


def made(name: str, **options: Any) -> PreTrainedModel:
    """A model whose vocabulary is the embedded tokenizer's."""
    options = {"vocab_size": len(AutoTokenizer.from_pretrained(MODEL_PATH)), **options}
    if name in ENCODERS:
        return encoder_decoder(name, **options)
    return tiny_model("llama-mha", **options) if name == "llama" else family_model(name, **options)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL_PATH).save_pretrained(folder)
    return folder


def with_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The checkpoint with further tensors."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})
    return folder


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    if model.config.is_encoder_decoder:
        return model(**{**read_by(model, rows=1), "decoder_input_ids": TEXT[None, :20]}).logits
    return model(TEXT[None, :40]).logits


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_checkpoints_of_the_base_model(name: str, tmp_path: Path) -> None:
    """Whose names lack its prefix."""
    model = made(name, tie_word_embeddings=True)
    if name == "bart":  # a buffer beside the base model
        model.final_logits_bias.zero_()
    source = saved(model.base_model, tmp_path / "source")
    auto = family_of(model.config).auto
    assert torch.equal(logits(auto.from_pretrained(source).eval()), logits(model)), "transformers loads it"
    convert_checkpoint(Settings(str(source), tmp_path / "slim", choice=PlanChoice(plan="k"), dtype=torch.float32))
    convert_checkpoint(Settings(str(tmp_path / "slim"), tmp_path / "full", format="full"))
    for one in ("slim", "full"):
        found = logits(auto.from_pretrained(tmp_path / one).eval())
        assert (found - logits(model)).norm() < 1e-4 * logits(model).norm()


def test_checkpoints_of_a_multimodal_base_model(tmp_path: Path) -> None:
    vocabulary = len(AutoTokenizer.from_pretrained(MODEL_PATH)) + 2
    model = multimodal_model("llava", {"vocab_size": vocabulary, "tie_word_embeddings": True})
    model.config.tie_word_embeddings = True
    model.tie_weights()
    source = saved(model.base_model, tmp_path / "source")
    convert_checkpoint(Settings(str(source), tmp_path / "slim", choice=PlanChoice(plan="k"), dtype=torch.float32))
    found = logits(family_of(model.config).auto.from_pretrained(tmp_path / "slim").eval())
    assert (found - logits(model)).norm() < 1e-4 * logits(model).norm()


@pytest.mark.parametrize("name", ["llama", "qwen2", "whisper"])
def test_a_base_model_without_a_head(name: str, tmp_path: Path) -> None:
    """transformers makes one of random numbers."""
    source = saved(made(name, tie_word_embeddings=False).base_model, tmp_path / "source")
    line = refusal("convert-checkpoint", source, tmp_path / "slim")
    head = "proj_out" if name == "whisper" else "lm_head"
    assert (
        f"{source} lacks {head}.weight, which its config wants; it is of the base model alone, so save the whole"
        in line
    )
    assert not (tmp_path / "slim").exists()


@pytest.mark.parametrize("form", ["slim", "full"])
def test_unused_tensors_outside_of_layers_are_left_out(form: str, tmp_path: Path) -> None:
    """Of any dtype, and whatever they hold."""
    source = saved(made("llama"), tmp_path / "source")
    if form == "full":
        convert_checkpoint(Settings(str(source), tmp_path / "ordinary"))
        source = tmp_path / "ordinary"
    convert_checkpoint(Settings(str(source), tmp_path / "without", format=form))
    done = run("convert-checkpoint", with_tensors(source, UNUSED), tmp_path / "with", "--format", form)
    assert done.exit_code == 0, done.output
    told = [line for line in done.stderr.splitlines() if "left out" in line]
    assert told == [
        "hf-fastdecode: left out extra.scale, extra.zeros, lm_head.bias and 1 more, which transformers does not load "
        "either: the model has no such tensors"
    ]
    files = [tmp_path / one / "model.safetensors" for one in ("with", "without")]
    assert files[0].read_bytes() == files[1].read_bytes()
    report = json.loads((tmp_path / "with" / "slim_report.json").read_text())
    assert report["left_out"] == sorted(UNUSED)
    assert "left_out" not in json.loads((tmp_path / "without" / "slim_report.json").read_text())


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_unused_tensors_beside_an_encoder_are_left_out(name: str, tmp_path: Path) -> None:
    source = with_tensors(saved(made(name), tmp_path / "source"), UNUSED)
    done = run("convert-checkpoint", source, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "hf-fastdecode: left out extra.scale, " in done.stderr


@pytest.mark.parametrize("form", ["slim", "full"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_unknown_tensors_in_layers_are_refused(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = saved(made("llama"), tmp_path / "source")
    if form == "full":
        convert_checkpoint(Settings(str(source), tmp_path / "ordinary"))
        source = tmp_path / "ordinary"
    name = "model.layers.1.mlp.up_proj.weight_scale"
    with_tensors(source, {name: torch.ones(3).to(dtype)})
    line = refusal("convert-checkpoint", source, tmp_path / "out", "--format", form)
    assert "layer 1 has a tensor mlp.up_proj.weight_scale, which layers of " in line
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.converting").exists()


def test_what_a_class_ignores_is_not_told(tmp_path: Path) -> None:
    """Such as a buffer of older releases."""
    source = save_multi_head(tmp_path / "source")
    (file,) = {one for one in source.glob("*.safetensors") if "model.norm.weight" in load_file(one)}
    frequencies = {"model.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**load_file(file), **frequencies}, file, {"format": "pt"})
    index = source / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"]["model.rotary_emb.inv_freq"] = file.name
    index.write_text(json.dumps(places))
    done = run("convert-checkpoint", source, tmp_path / "slim")
    assert done.exit_code == 0, done.output
    assert "left out" not in done.stderr
    assert "model.rotary_emb.inv_freq" not in load_file(tmp_path / "slim" / "model.safetensors")
