"""Slim T5, BART and Whisper on disk: converted there and back, from old and odd checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.conversion.calibration import calibration_ids, model_inputs
from hf_fastdecode.conversion.convert import Settings, convert_checkpoint
from hf_fastdecode.conversion.families import family_of
from hf_fastdecode.conversion.layer_converter import PlanChoice
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.patches.layers.family import longest_text

from ..cli.command_line import refusal, run
from ..conversion.checkpoints import VOCABULARY, loaded
from .encoder_decoder_models import encoder_decoder, read_by
from .slim_models import TEXT, relative

EPS = torch.finfo(torch.float32).eps
MIXED = (("x", 0), ("k+r", 5), ("k", 0), ("kv", 0))


def with_tokenizer(name: str, folder: Path) -> PreTrainedModel:
    """A model that the embedded tokenizer fits, which is saved in a folder without the model."""
    AutoTokenizer.from_pretrained(MODEL_PATH).save_pretrained(folder)
    return encoder_decoder(name, vocab_size=VOCABULARY)


def load(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return loaded(folder, family_of(model.config).auto)


def tokens(model: PreTrainedModel) -> Any:
    return model.generate(**read_by(model), max_new_tokens=12, do_sample=False, no_repeat_ngram_size=2)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("name", "plan"), [("t5", MIXED), ("t5-wide", "e"), ("bart", MIXED), ("whisper", "e")])
def test_there_and_back(name: str, plan: Any, tmp_path: Path) -> None:
    source, slim_folder, full_folder = (tmp_path / one for one in ("source", "slim", "full"))
    model = with_tokenizer(name, source)
    model.save_pretrained(source, max_shard_size="200KB")
    settings = Settings(str(source), slim_folder, choice=PlanChoice(plan), shard_bytes=50_000, verify=True)
    report = convert_checkpoint(settings)
    slim = load(model, slim_folder)
    assert type(slim) is family_of(model.config).slim_model
    assert (
        type(AutoModel.from_pretrained(slim_folder)).__name__
        == f"Slim{type(AutoModel.from_pretrained(source)).__name__}"
    )
    assert torch.equal(tokens(slim), tokens(model))
    assert report["saved"] == pytest.approx(1 - report["cache_bytes"] / report["ordinary_cache_bytes"])

    ids = calibration_ids(AutoTokenizer.from_pretrained(source), limit=longest_text(model.config))
    in_memory = to_slim(model, ids, plan=plan)
    assert [one["plan"] for one in in_memory.config.slim_layers] == [one["plan"] for one in slim.config.slim_layers]
    for key, one in in_memory.state_dict().items():  # offsets are means of what layers saw on the text
        assert relative(slim.state_dict()[key], one) < (1e-4 if key.endswith(("key_offset", "constant")) else 1e-6)

    convert_checkpoint(Settings(str(slim_folder), full_folder, format="full", verify=True))
    full = load(model, full_folder)
    assert type(full) is type(model)
    assert {**full.config.to_dict(), "_name_or_path": ""} == {**model.config.to_dict(), "_name_or_path": ""}
    expected, found = model.state_dict(), full.state_dict()
    assert found.keys() == expected.keys()
    changed = {key for key in expected if not torch.equal(found[key], expected[key])}
    made = tuple(
        prefix + family_of(model.config).projection("v")
        for prefix, one in zip(family_of(model.config).attentions(model.config), slim.config.slim_layers)
        if one["plan"] in ("k", "k+r")
    )
    assert len(made) == 2
    assert all(key.startswith(made) for key in changed)
    errors = [layer["recovered_error"] for layer in report["layers"]]
    for key in changed:
        bound = max(errors) + EPS if key.endswith("weight") else 1e-4
        assert relative(found[key], expected[key]) < bound


@pytest.mark.usefixtures("undrawn")
def test_layers_in_8_bits_stay_so_on_disk(tmp_path: Path) -> None:
    model = with_tokenizer("t5", tmp_path / "source")
    model.save_pretrained(tmp_path / "source")
    choice = PlanChoice("x", tolerance=1e9, cache_dtype="int8")
    convert_checkpoint(Settings(str(tmp_path / "source"), tmp_path / "slim", choice=choice, verify=True))
    plans = load(model, tmp_path / "slim").config.layer_plans
    assert [(layer.plan, layer.cache_dtype) for layer in plans] == [("x", "int8"), ("e", None)] * (len(plans) // 2)


def test_the_table_says_which_attention_is_not_in_8_bits(tmp_path: Path) -> None:
    with_tokenizer("t5", tmp_path).save_pretrained(tmp_path)
    command = ["convert-checkpoint", tmp_path, "--dry-run", "--cache-dtype", "int8", "--plan", "k", "--tolerance", "1"]
    table = " ".join(run(*command).stdout.split())
    report = json.loads(run(*command, "--json").stdout)
    for index, layer in enumerate(report["layers"]):  # the plan that was asked for, not the best of all
        tried = next(one for one in layer["measured"]["candidates"] if (one["plan"], one["dtype"]) == ("k", "int8"))
        ratio = tried["output_error"] / layer["measured"]["ordinary_int8"]["output_error"]
        place = f"{index // 2} {('self', 'cross')[index % 2]}"
        assert f"Layer {place}: not in int8, which has at best {ratio:.2f}x the error of int8" in table
    in_int8 = sum(layer["measured"]["ordinary_int8"]["bytes_per_token"] for layer in report["layers"]) * 512
    assert f"in int8, scales included, take {in_int8 / 1024:.0f} KiB. Layer" in table


def test_heads_of_their_own(tmp_path: Path) -> None:
    """Flan-T5 has a head that is not the embedding, though its config ties them."""
    model = with_tokenizer("t5-wide", tmp_path / "source")
    model.config.save_pretrained(tmp_path / "source")
    state = {**model.state_dict(), "lm_head.weight": torch.randn_like(model.lm_head.weight)}
    state["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(2)  # no longer read
    torch.save(state, tmp_path / "source" / "pytorch_model.bin")
    stock = family_of(model.config).auto.from_pretrained(tmp_path / "source")
    assert not torch.equal(stock.lm_head.weight, stock.shared.weight)
    convert_checkpoint(Settings(str(tmp_path / "source"), tmp_path / "slim", choice=PlanChoice("e")))
    convert_checkpoint(Settings(str(tmp_path / "slim"), tmp_path / "full", format="full"))
    slim, full = (load(model, tmp_path / one) for one in ("slim", "full"))
    for one in (slim, full, to_slim(stock, TEXT, plan="e")):
        assert torch.equal(one.lm_head.weight, stock.lm_head.weight)
        assert one.shared.weight is one.encoder.embed_tokens.weight is one.decoder.embed_tokens.weight
        assert torch.equal(tokens(one), tokens(stock))


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_other_layers_is_as_none(tmp_path: Path) -> None:
    model = with_tokenizer("t5", tmp_path / "source")
    model.save_pretrained(tmp_path / "source")
    convert_checkpoint(Settings(str(tmp_path / "source"), tmp_path / "slim", choice=PlanChoice("k")))
    file = tmp_path / "slim" / "slim_report.json"
    report = json.loads(file.read_text())
    file.write_text(json.dumps({**report, "layers": report["layers"][:1]}))
    back = convert_checkpoint(Settings(str(tmp_path / "slim"), tmp_path / "full", format="full"))
    assert [layer["recovered_error"] for layer in back["layers"]] == [None] * len(report["layers"])


@pytest.mark.usefixtures("undrawn")
def test_older_checkpoints(tmp_path: Path) -> None:
    """BART's encoder and decoder alone, as pretrained: no bias of the logits, and names without the model's prefix."""
    model = with_tokenizer("bart", tmp_path / "source")
    model.final_logits_bias.zero_()
    model.config.save_pretrained(tmp_path / "source")
    state = model.model.state_dict()
    torch.save({**state, "encoder.version": torch.ones(1)}, tmp_path / "source" / "pytorch_model.bin")
    convert_checkpoint(Settings(str(tmp_path / "source"), tmp_path / "slim", choice=PlanChoice(rank=5)))
    assert torch.equal(tokens(load(model, tmp_path / "slim")), tokens(model))


def test_features_from_a_file(tmp_path: Path) -> None:
    model = with_tokenizer("whisper", tmp_path / "source")
    model.save_pretrained(tmp_path / "source")
    features = torch.randn(1, 8, 48, generator=torch.Generator().manual_seed(3))
    save_file({"input_features": features}, tmp_path / "sound.safetensors")
    save_file({"features": features}, tmp_path / "other.safetensors")
    command = ["convert-checkpoint", tmp_path / "source", "--dry-run", "--plan", "k"]
    table = " ".join(run(*command).stdout.split())
    for words in ("0 self", "1 cross", "tokens of the decoder and 24 of the encoder", "read features (synthetic)."):
        assert words in table
    reports = [
        json.loads(run(*command, "--json", *more).stdout)
        for more in ((), ("--calibration", tmp_path / "sound.safetensors"))
    ]
    assert [one["calibration_features"] for one in reports] == ["synthetic", str(tmp_path / "sound.safetensors")]
    assert reports[0]["layers"][1]["output_error"] != reports[1]["layers"][1]["output_error"]
    digests = [one["calibration_features_sha256"] for one in reports]  # by which --resume tells files apart
    assert (digests[0], len(digests[1])) == ("", 64)
    refused = run(*command, "--calibration", tmp_path / "other.safetensors")
    assert refused.exit_code == 2
    assert "holds no tensor input_features" in refused.stderr


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_features_that_are_not_finite(tmp_path: Path, value: float) -> None:
    model = with_tokenizer("whisper", tmp_path / "source")
    model.save_pretrained(tmp_path / "source")
    features, file = torch.zeros(1, 8, 48), tmp_path / "sound.safetensors"
    features[0, 3, :2] = value
    save_file({"input_features": features}, file)
    refused = run("convert-checkpoint", tmp_path / "source", "--dry-run", "--calibration", file)
    assert refused.exit_code == 2
    assert refused.stderr == "hf-fastdecode: calibration features hold 2 inf or nan; extract them again\n"
    with pytest.raises(ValueError, match=r"calibration features hold 2 inf or nan; extract them again"):
        to_slim(model, TEXT, features=features)


@pytest.mark.usefixtures("undrawn")
def test_features_with_their_text(tmp_path: Path) -> None:
    """Whisper's decoder reads what is said, as `to_slim` has it."""
    source, sound, said = tmp_path / "source", tmp_path / "sound.safetensors", tmp_path / "said.txt"
    model = with_tokenizer("whisper", source)
    model.bfloat16().save_pretrained(source)
    features = torch.randn(1, 8, 48, generator=torch.Generator().manual_seed(3))
    save_file({"input_features": features}, sound)
    said.write_text("The train to the coast leaves at seven in the morning. " * 3)
    command = ("convert-checkpoint", source, "--dry-run", "--json", "--calibration", sound)
    built_in, own = (json.loads(run(*command, *more).stdout) for more in ((), ("--transcript", said)))
    assert [one["calibration"] for one in (built_in, own)] == ["built-in", str(said)]
    ids = AutoTokenizer.from_pretrained(source)(said.read_text(), return_tensors="pt").input_ids[0]
    assert own["calibration_tokens"] == len(ids) < built_in["calibration_tokens"]
    assert own["calibration_sha256"] != built_in["calibration_sha256"]
    convert_checkpoint(Settings(str(source), tmp_path / "slim", calibration=sound, transcript=said))
    expected = to_slim(model, ids, features=features).state_dict()
    found = family_of(model.config).auto.from_pretrained(tmp_path / "slim", dtype=torch.bfloat16).state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []

    said.write_text("Too short.")
    assert "a calibration text needs 32 tokens, got" in refusal(*command, "--transcript", said)
    assert "cannot read the calibration text" in refusal(*command, "--transcript", tmp_path / "none.txt")


def test_a_transcript_is_of_features(tmp_path: Path) -> None:
    with_tokenizer("t5", tmp_path / "t5").save_pretrained(tmp_path / "t5")
    with_tokenizer("whisper", tmp_path / "whisper").save_pretrained(tmp_path / "whisper")
    said, sound = tmp_path / "said.txt", tmp_path / "sound.safetensors"
    said.write_text("text")
    save_file({"input_features": torch.zeros(1, 8, 48)}, sound)
    for name, *more in (("t5",), ("t5", "--calibration", sound), ("whisper",), ("whisper", "--calibration", said)):
        message = refusal("convert-checkpoint", tmp_path / name, "--dry-run", "--transcript", said, *more)
        assert f"{name} has no calibration features, whose transcript" in message
        assert "give a text as --calibration" in message


def test_a_text_that_begins_as_decoders_do_is_not_begun_twice() -> None:
    """Whisper's tokenizer puts the decoder's first token, 3 here, in front."""
    model = encoder_decoder("whisper")
    for ids, read in (([3, 8, 9], [3, 8, 9]), ([8, 9, 3], [3, 8, 9])):
        inputs = model_inputs(family_of(model.config), model.config, torch.tensor(ids), None)
        assert inputs["decoder_input_ids"].tolist() == [read]
