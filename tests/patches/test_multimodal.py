"""Slim multimodal models, which have a slim language model, against the models they were made of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM, PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode.conversion.convert import Settings, convert_checkpoint
from hf_fastdecode.conversion.families import MULTIMODAL as SUPPORTED
from hf_fastdecode.conversion.fit.cached_numbers import DIGITS
from hf_fastdecode.conversion.layer_converter import PlanChoice
from hf_fastdecode.conversion.source import Checkpoint
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.kernels.device import triton_is_installed

from ..cases import exhaustive_but
from ..cli.command_line import run
from ..conversion.checkpoints import VOCABULARY, loaded, saved
from ..fresh_processes import run_fresh
from ..test_layout import ROOT
from .multimodal_models import MULTIMODAL, inputs, multimodal_model
from .slim_models import TEXT, relative

EPS = torch.finfo(torch.float32).eps
MIXED = (("kv", 0), ("k+r", 5))
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32},
    **{"short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
}


def tokens(model: PreTrainedModel, given: dict[str, Tensor] | None = None, **options: Any) -> Tensor:
    settings = {"max_new_tokens": 8, "do_sample": False, "no_repeat_ngram_size": 2, **options}
    out: Tensor = model.generate(**(inputs(model) if given is None else given), **settings)
    return out


def made(model_type: str, folder: Path) -> PreTrainedModel:
    """A model that the embedded tokenizer fits, and its checkpoint in several shards."""
    model = multimodal_model(model_type, {"vocab_size": VOCABULARY + 2})
    saved(model, folder, max_shard_size="200KB")
    return model


def load(folder: Path, auto: Any = AutoModelForMultimodalLM) -> PreTrainedModel:
    return loaded(folder, auto)


def test_every_architecture_is_tested_and_listed() -> None:
    assert list(MULTIMODAL) == list(SUPPORTED)
    page = (ROOT / "docs" / "slim-architectures.md").read_text(encoding="utf-8")
    table = page.partition("| multimodal | such as |")[2].partition("\n\n")[0]
    first = " ".join(line.split("|")[1] for line in table.splitlines()[2:])
    assert re.findall(r"`(\w+)`", first) == list(SUPPORTED)


@pytest.mark.parametrize("plan", ["k", MIXED], ids=["k", "mixed"])
@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_tokens(model_type: str, plan: Any) -> None:
    model = multimodal_model(model_type)
    slim = to_slim(model, TEXT, plan=plan)
    assert type(slim) is type(model)
    assert slim.config.text_config.model_type == f"slim_{model.config.text_config.model_type}"
    expected = tokens(model)
    assert torch.equal(tokens(slim), expected)
    assert torch.equal(tokens(slim, cache_implementation="static"), expected)
    other = inputs(model, seed=1) | {"input_ids": inputs(model)["input_ids"]}
    assert not torch.equal(tokens(model, other), expected), "what is seen or heard matters"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("model_type", exhaustive_but(["llava", "qwen2_audio"], MULTIMODAL))
def test_checkpoint_there_and_back(model_type: str, tmp_path: Path) -> None:
    source, slim_folder, full_folder = (tmp_path / one for one in ("source", "slim", "full"))
    model = made(model_type, source)
    report = convert_checkpoint(
        Settings(str(source), slim_folder, choice=PlanChoice(MIXED), shard_bytes=50_000, verify=True)
    )
    slim = load(slim_folder)
    assert type(slim) is type(model)
    expected = tokens(model)
    assert torch.equal(tokens(slim), expected)
    slim.save_pretrained(tmp_path / "again")
    assert torch.equal(tokens(load(tmp_path / "again")), expected)

    convert_checkpoint(Settings(str(slim_folder), full_folder, format="full", verify=True))
    full = load(full_folder)
    assert full.config.to_diff_dict() == load(source).config.to_diff_dict()
    before, after = model.state_dict(), full.state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    prefix = f"{SUPPORTED[model_type]}layers.1.self_attn.v_proj."
    assert f"{prefix}weight" in changed
    assert all(name.startswith(prefix) for name in changed)
    for name in changed:
        bound = report["layers"][1]["recovered_error"] + EPS if name.endswith("weight") else 1e-4
        assert relative(after[name], before[name]) < bound


@pytest.mark.parametrize("model_type", ["llava", "smolvlm", "qwen2_audio"])
def test_options_are_of_the_language_model(model_type: str, tmp_path: Path) -> None:
    """RoPE of cached keys and the sparsity threshold stand in the slim `text_config`, where saving keeps them."""
    model = multimodal_model(model_type)
    slim = to_slim(model, TEXT, plan="k", rope="unrotate", sparsity_threshold=1e-30)
    assert torch.equal(tokens(slim), tokens(model))
    slim.save_pretrained(tmp_path)
    text = load(tmp_path).config.text_config
    assert (text.slim_rope, text.slim_sparsity_threshold) == ("unrotate", 1e-30)
    report = json.loads(run("inspect", tmp_path, "--context", 10, "--json").stdout)
    keys = model.config.text_config.hidden_size + DIGITS
    assert [one["bytes_per_token"] for one in report["slim_layers"]] == [4 * keys] * 2
    assert report["caches"][0]["sizes"][1]["bytes"] == 10 * 2 * 4 * keys


@pytest.mark.usefixtures("undrawn")
def test_names_of_files_are_not_those_of_models(tmp_path: Path) -> None:
    """Files of LLaVA have the names of older releases, also those that transformers writes now."""
    model = made("llava", tmp_path / "source")
    assert "language_model.model.embed_tokens.weight" in Checkpoint(tmp_path / "source").locations
    convert_checkpoint(Settings(str(tmp_path / "source"), tmp_path / "slim", choice=PlanChoice(rank=5)))
    assert torch.equal(tokens(load(tmp_path / "slim", AutoModelForImageTextToText)), tokens(model))


def test_command_line(tmp_path: Path) -> None:
    made("llava", tmp_path / "source")
    done = run("convert-checkpoint", tmp_path / "source", tmp_path / "slim", "--plan", "k", "--verify")
    assert done.exit_code == 0, done.output
    assert "50.0% saved" in " ".join(done.stdout.split())
    config = tmp_path / "slim" / "config.json"
    planned = run("convert-checkpoint", tmp_path / "source", "--dry-run", "--plan", config, "--json")
    assert [one["plan"] for one in json.loads(planned.stdout)["layers"]] == ["k", "k"]
    again = run("convert-checkpoint", tmp_path / "slim", tmp_path / "slimmer")
    assert (again.exit_code, "slim already" in again.stderr) == (2, True)
    full = run("convert-checkpoint", tmp_path / "source", tmp_path / "full", "--format", "full")
    assert (full.exit_code, "full already" in full.stderr) == (2, True)


@pytest.mark.parametrize(
    ("language", "reason"),
    [
        ({"num_key_value_heads": 2}, "got 2 != 4"),
        ({"model_type": "mistral"}, "no slim form of mistral models"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "RoPE of type 'dynamic'"),
        ({"model_type": "phi3", "pad_token_id": 0, "rope_parameters": LONGROPE}, "keep keys of both frequencies"),
    ],
    ids=["gqa", "mistral", "rope", "longrope"],
)
def test_refused_language_models(language: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        to_slim(multimodal_model("llava", language), TEXT)


def test_refused_without_the_import(tmp_path: Path) -> None:
    """transformers refuses any unknown language model so, before it draws a weight at random."""
    to_slim(multimodal_model("llava"), TEXT, plan="k").save_pretrained(tmp_path)
    code = f"from transformers import AutoModelForImageTextToText as Auto; Auto.from_pretrained({str(tmp_path)!r})"
    done = run_fresh(code, importable=False)
    assert done.returncode == 1
    refusals = ("Unrecognized model type for subconfig: slim_llama", "KeyError: 'slim_llama'")  # before 5.20
    assert any(refusal in done.stderr for refusal in refusals)


@pytest.mark.parametrize("rope", ["raw", "unrotate"])
def test_options_of_the_language_model(rope: str, tmp_path: Path) -> None:
    """They reach its layers, are saved, and may be changed and measured there."""
    model, ids = multimodal_model("llava"), TEXT[:64].clamp(max=90)
    sparse = to_slim(model, TEXT, plan="k", rope=rope, sparsity_threshold=0.02)
    assert relative(sparse(**inputs(model)).logits, model(**inputs(model)).logits) > 1e-3  # else this shows nothing
    sparse.save_pretrained(tmp_path)
    slim = load(tmp_path)
    assert torch.equal(slim(**inputs(model)).logits, sparse(**inputs(model)).logits)
    slim.config.text_config.slim_sparsity_threshold = 0.0
    assert torch.equal(tokens(slim), tokens(model))
    found = fd.measure_sparsity(slim, 0.02, ids)
    assert found.logits_error == pytest.approx(relative(sparse(ids[None]).logits, slim(ids[None]).logits), rel=1e-4)
    assert [layer.name for layer in found.layers] == [f"model.language_model.layers.{at}.self_attn" for at in (0, 1)]
    assert slim.config.text_config.slim_sparsity_threshold == 0.0
    with pytest.raises(ValueError, match="this LlavaForConditionalGeneration has none"):
        fd.measure_sparsity(model, 0.02, ids)


def test_shared_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text alone shares its prompt; a call with an image runs stock, and says so."""
    model = to_slim(multimodal_model("llava"), TEXT, plan=MIXED)
    text = {"input_ids": TEXT[None, :90].clamp(max=90), "attention_mask": torch.ones(1, 90, dtype=torch.long)}
    options = {"do_sample": True, "num_return_sequences": 4, "no_repeat_ngram_size": 0}
    found = []
    for sharing in (False, True):
        torch.manual_seed(0)
        with fd.enabled(model) if sharing else torch.no_grad():
            found.append(tokens(model, text, **options))
            report = fd.explain(model)
    assert torch.equal(*found)
    assert report.last_call.path == "shared"
    if not torch.cuda.is_available() and triton_is_installed():
        monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
        torch.manual_seed(0)
        with fd.enabled(model, mode="graph", backend="triton"):
            captured = tokens(model, text, **options, max_new_tokens=8)
            assert torch.equal(captured, found[0][:, : captured.shape[1]])
            assert fd.explain(model).last_call.mode == "graph"
        monkeypatch.undo()
    expected = tokens(model)
    with fd.enabled(model):
        assert torch.equal(tokens(model), expected)
        assert "stock (the argument" in str(fd.explain(model).last_call.lines())
