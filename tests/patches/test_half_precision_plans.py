"""Conversion measures layers as the model runs, in its dtype: the same from a checkpoint and in memory."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pytest
import torch
from matplotlib import pyplot
from transformers import AutoConfig, AutoTokenizer

from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.conversion.calibration import calibration_ids
from hf_fastdecode.conversion.convert import Settings, convert_checkpoint
from hf_fastdecode.conversion.families import family_of
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.patches.layers.family import language_config, longest_text

from ..cases import exhaustive_but
from ..cli.command_line import run
from .encoder_decoder_models import MODELS, encoder_decoder
from .family_models import FAMILIES, family_model
from .multimodal_models import MULTIMODAL, multimodal_model
from .slim_models import tiny_variant

MAKERS = (
    {"llama": lambda vocab_size: tiny_variant("plain", vocab_size=vocab_size)}
    | {name: lambda vocab_size, name=name: family_model(name, vocab_size=vocab_size) for name in FAMILIES}
    | {name: lambda vocab_size, name=name: encoder_decoder(name, vocab_size=vocab_size) for name in MODELS}
    | {name: lambda vocab_size, name=name: multimodal_model(name, {"vocab_size": vocab_size}) for name in MULTIMODAL}
)
"""Makers of a model with a vocabulary of this size, by name."""

IN_ALL_DTYPES = ("llama", "gpt2", "t5", "t5-wide", "t5-narrow", "whisper", "llava")
"""One of each way to store: keys, inputs or the encoder's output; products that T5 keeps in fp32; part of a model."""

FIRST = [*((name, torch.bfloat16) for name in IN_ALL_DTYPES), ("llama", torch.float32), ("t5", torch.float16)]
MORE = [(name, dtype) for name in IN_ALL_DTYPES for dtype in (torch.float32, torch.float16)]
CONVERSIONS = exhaustive_but(FIRST, dict.fromkeys([*FIRST, *MORE, *((name, torch.bfloat16) for name in MAKERS)]))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("name", "dtype"), CONVERSIONS, ids=str)
def test_a_checkpoint_gets_the_plan_and_tensors_of_the_loaded_model(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Inputs are cached in the dtype that the model has them in, without an error."""
    source, target = tmp_path / "source", tmp_path / "slim"
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    tokenizer.save_pretrained(source)
    MAKERS[name](len(tokenizer)).to(dtype).save_pretrained(source)
    report = convert_checkpoint(Settings(str(source), target))

    of_inputs = [
        one["output_error"]
        for layer in report["layers"]
        for one in layer["measured"]["candidates"]
        if one["plan"] in ("x", "e")
    ]
    assert all(error == 0 for error in of_inputs)
    auto = family_of(AutoConfig.from_pretrained(source)).auto
    model, slim = (auto.from_pretrained(folder, dtype=dtype) for folder in (source, target))
    config = language_config(model.config)
    ids = calibration_ids(AutoTokenizer.from_pretrained(source), limit=longest_text(config))
    in_memory = to_slim(model, ids)
    assert language_config(slim.config).slim_layers == language_config(in_memory.config).slim_layers
    expected, found = in_memory.state_dict(), slim.state_dict()
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_exact_caches_are_called_so_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logarithmic axis has no place for an error of 0."""
    source, target = tmp_path / "source", tmp_path / "slim"
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    tokenizer.save_pretrained(source)
    family_model("gpt2", vocab_size=len(tokenizer)).bfloat16().save_pretrained(source)
    matplotlib.use("Agg")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    report = convert_checkpoint(Settings(str(source), target))
    assert [layer["output_error"] for layer in report["layers"]] == [0, 0]
    errors = pyplot.gcf().axes[1]
    chosen = next(line for line in errors.lines if line.get_label() == "chosen")
    assert all(error > errors.get_ylim()[0] for error in chosen.get_ydata())
    assert [text.get_text() for text in errors.texts] == ["x, exact"] * 2
    monkeypatch.undo()
    pyplot.close("all")
    rows = [line.split() for line in run("convert-checkpoint", source, "--dry-run").stdout.splitlines()]
    assert [row[-6:-2:2] for row in rows if "inputs" in row] == [["exact", "exact"]] * 2
