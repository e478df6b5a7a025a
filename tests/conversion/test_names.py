"""Tensors of checkpoints: by other names than the model's, unknown ones, and heads that differ from the embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

from hf_fastdecode.conversion.convert import Settings, convert_checkpoint
from hf_fastdecode.conversion.families import family_of
from hf_fastdecode.conversion.layer_converter import PlanChoice
from hf_fastdecode.conversion.to_slim import to_slim

from ..cli.command_line import refusal, run
from ..patches.encoder_decoder_models import encoder_decoder, read_by
from ..patches.family_models import FAMILIES, family_model
from ..patches.multimodal_models import MULTIMODAL, multimodal_model
from ..patches.slim_models import TEXT, relative
from .checkpoints import VOCABULARY, save_multi_head, saved

pytestmark = pytest.mark.exhaustive

ENCODERS = ["t5", "bart", "whisper"]
DECODERS = [name for name in FAMILIES if "-" not in name and name != "codegen"]
HEADS = [*DECODERS, "codegen", "opt-350m"]
"""Other variants of a family differ in attention alone; OPT-350M projects what its head reads."""
UNUSED = {
    "lm_head.bias": torch.ones(3),
    "model.norm.bias": torch.full((3,), float("nan")),
    "extra.scale": torch.ones(3).to(torch.float8_e4m3fn),
    "extra.zeros": torch.ones(3).to(torch.complex64),
}


def made(name: str, **options: Any) -> PreTrainedModel:
    """A model whose vocabulary is the embedded tokenizer's."""
    options = {"vocab_size": VOCABULARY, **options}
    return encoder_decoder(name, **options) if name in ENCODERS else family_model(name, **options)


def converted(source: Path, folder: Path, *forms: str) -> None:
    """Convert to ``slim``, in fp32 with keys alone, and this to ``full``, folders of `folder`."""
    convert_checkpoint(Settings(str(source), folder / "slim", choice=PlanChoice(plan="k"), dtype=torch.float32))
    if "full" in forms:
        convert_checkpoint(Settings(str(folder / "slim"), folder / "full", format="full"))


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
    """Their names lack its prefix."""
    model = made(name, tie_word_embeddings=True)
    if name == "bart":  # a buffer beside the base model
        model.final_logits_bias.zero_()
    source = saved(model.base_model, tmp_path / "source")
    auto = family_of(model.config).auto
    assert torch.equal(logits(auto.from_pretrained(source).eval()), logits(model)), "transformers loads it"
    converted(source, tmp_path, "full")
    for one in ("slim", "full"):
        found = logits(auto.from_pretrained(tmp_path / one).eval())
        assert relative(found, logits(model)) < 1e-4


def test_checkpoints_of_a_multimodal_base_model(tmp_path: Path) -> None:
    model = multimodal_model("llava", {"vocab_size": VOCABULARY + 2, "tie_word_embeddings": True})
    model.config.tie_word_embeddings = True
    model.tie_weights()
    source = saved(model.base_model, tmp_path / "source")
    converted(source, tmp_path)
    found = logits(family_of(model.config).auto.from_pretrained(tmp_path / "slim").eval())
    assert relative(found, logits(model)) < 1e-4


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
    """They may have any dtype, and hold anything."""
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


TYING = [name for name in MULTIMODAL if name != "qwen2_audio"]  # whose class ties nothing


def trained_apart(name: str, **overrides: Any) -> PreTrainedModel:
    """A model whose config ties, with another head."""
    return with_another_head(family_model(name, **{"tie_word_embeddings": True, **overrides}))


def with_another_head(model: PreTrainedModel) -> PreTrainedModel:
    """Give a tied model another head."""
    head = model.get_output_embeddings().weight
    assert head is model.get_input_embeddings().weight or model.config.is_encoder_decoder
    model.get_output_embeddings().weight = nn.Parameter(head + 0.3 * head.std() * torch.randn(head.shape))
    assert model.config.tie_word_embeddings
    return model.eval()


@pytest.mark.parametrize("name", HEADS)
def test_to_slim_keeps_the_head(name: str, tmp_path: Path) -> None:
    model = trained_apart(name)
    slim = to_slim(model, TEXT, plan="k")
    assert relative(logits(slim), logits(model)) < 1e-4
    assert not slim.config.tie_word_embeddings
    slim.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), logits(slim))


@pytest.mark.parametrize("name", HEADS)
def test_a_converted_checkpoint_keeps_the_head(name: str, tmp_path: Path) -> None:
    model = trained_apart(name, vocab_size=VOCABULARY)
    converted(saved(model, tmp_path / "source"), tmp_path, "full")
    for form in ("slim", "full"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / form).eval()
        assert relative(logits(found), logits(model)) < 1e-4
        assert not found.config.tie_word_embeddings


@pytest.mark.parametrize("name", ["phi3", "gpt2"])
def test_tied_heads_stay_tied_and_are_stored_once(name: str, tmp_path: Path) -> None:
    model = family_model(name, tie_word_embeddings=True, vocab_size=VOCABULARY)
    slim = to_slim(model, TEXT, plan="k")
    assert slim.config.tie_word_embeddings
    assert slim.get_output_embeddings().weight is slim.get_input_embeddings().weight
    converted(saved(model, tmp_path / "source"), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "slim")
    assert loaded.config.tie_word_embeddings
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    sizes = [(tmp_path / one / "model.safetensors").stat().st_size for one in ("source", "slim")]
    assert sizes[1] < sizes[0] + 8 * VOCABULARY * 64 // 4


@pytest.mark.parametrize("language", [False, True])
@pytest.mark.parametrize("name", TYING)
def test_multimodal_models(name: str, language: bool, tmp_path: Path) -> None:
    """The whole model's config ties; its language model's may say so too."""
    model = multimodal_model(name, {"vocab_size": VOCABULARY + 2, "tie_word_embeddings": language})
    model.config.tie_word_embeddings = True
    model.tie_weights()
    converted(saved(with_another_head(model), tmp_path / "source"), tmp_path, "full")
    loaded = [AutoModelForMultimodalLM.from_pretrained(tmp_path / one).eval() for one in ("slim", "full")]
    for made in (to_slim(model, TEXT, plan="k"), *loaded):
        assert relative(logits(made), logits(model)) < 1e-4
        assert torch.equal(made.lm_head.weight, model.lm_head.weight)
        assert not made.config.tie_word_embeddings
        assert not made.config.text_config.tie_word_embeddings


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_with_an_encoder(name: str, tmp_path: Path) -> None:
    """Configs of T5 and BART stay, as they also tie the embeddings of encoder and decoder."""
    model = encoder_decoder(name, vocab_size=VOCABULARY, tie_word_embeddings=True)
    converted(saved(with_another_head(model), tmp_path / "source"), tmp_path, "full")
    auto = family_of(model.config).auto
    in_memory = to_slim(model, TEXT, plan="k")
    in_memory.save_pretrained(tmp_path / "saved")
    loaded = [auto.from_pretrained(tmp_path / one).eval() for one in ("slim", "full", "saved")]
    for made in (in_memory, *loaded):
        assert relative(logits(made), logits(model)) < 1e-4
        assert torch.equal(made.get_output_embeddings().weight, model.get_output_embeddings().weight)
        assert made.config.tie_word_embeddings == (name != "whisper")
        if name == "whisper":  # as when embeddings are resized
            made.tie_weights()
            assert torch.equal(made.get_output_embeddings().weight, model.get_output_embeddings().weight)
