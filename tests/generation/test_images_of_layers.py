"""Images that a decoder's own layers attend to (Mllama): stock's tokens, with their keys and values stored once."""

from __future__ import annotations

import pytest
import torch

import hf_fastdecode as fd

from ..module_calls import before_calls
from ..tiny_models import seeded
from .uncaptured import on_the_cpu

SAMPLES = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 6}
IMAGE = 118


@pytest.fixture(scope="module")
def mllama():
    from transformers import MllamaConfig, MllamaForConditionalGeneration
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    text = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 64, **heads}
    text |= {"cross_attention_layers": [1], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "num_attention_heads": 4}
    vision |= {"intermediate_size": 32, "intermediate_layers_indices": [0, 1], "vision_output_dim": 96}
    vision |= {"image_size": 28, "patch_size": 14, "max_num_tiles": 2}
    vision["supported_aspect_ratios"] = [[1, 1], [1, 2], [2, 1]]
    config = MllamaConfig(
        vision_config=MllamaVisionConfig(**vision), text_config=MllamaTextConfig(**text), image_token_index=IMAGE
    )
    model = MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            else:  # the gates of layers that attend to images too, which begin at 0
                parameter.uniform_(0.5, 1.0)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def prompts(*padding, images=1):
    """Prompts whose images have one tile and two by turns, each behind its padding."""
    draw, rows, width = torch.Generator().manual_seed(1), len(padding), 20
    ids, shown = torch.randint(3, 110, (rows, width), generator=draw), torch.ones(rows, width, dtype=torch.long)
    sees = torch.zeros(rows, width, images, 2, dtype=torch.long)
    for row, hidden in enumerate(padding):
        ids[row, :hidden], shown[row, :hidden], ids[row, hidden + 2] = 0, 0, IMAGE
        sees[row, hidden + 2 :, :, : 1 + row % 2] = 1
    tiles = torch.arange(rows)[:, None].expand(-1, images) % 2
    return {
        "input_ids": ids,
        "attention_mask": shown,
        "pixel_values": torch.randn(rows, images, 2, 3, 28, 28, generator=draw),
        "aspect_ratio_ids": tiles + 1,
        "aspect_ratio_mask": torch.stack((torch.ones_like(tiles), tiles), -1),
        "cross_attention_mask": sees,
    }


@pytest.mark.parametrize("options", [{}, {"max_rows": 2}])
@pytest.mark.parametrize(
    "given", [prompts(0), prompts(0, 3, 1), prompts(0, 0, images=2)], ids=["one", "ragged", "two-images"]
)
def test_samples(mllama, given, options):
    stock = seeded(lambda: mllama.generate(**given, **SAMPLES))
    other = seeded(lambda: mllama.generate(**given | {"pixel_values": -given["pixel_values"]}, **SAMPLES))
    assert not torch.equal(stock, other)
    encoded = []
    with (
        fd.enabled(mllama, min_saved_tokens=1, **options),
        before_calls(mllama.model.vision_model, lambda args, kwargs: encoded.append(len(kwargs["pixel_values"]))),
    ):
        assert torch.equal(seeded(lambda: mllama.generate(**given, **SAMPLES)), stock)
        report = fd.explain(mllama).last_call
    assert (report.path, report.inputs) == ("shared", len(given["input_ids"]))
    assert sum(encoded) == len(given["input_ids"])


def text_alone():
    given = prompts(0, 3)
    return {"input_ids": given["input_ids"].clamp_max(109), "attention_mask": given["attention_mask"]}


def test_text_alone_after_images(mllama):
    stock = seeded(lambda: mllama.generate(**text_alone(), **SAMPLES))
    with fd.enabled(mllama, min_saved_tokens=1):
        mllama.generate(**prompts(0), **SAMPLES)
        assert torch.equal(seeded(lambda: mllama.generate(**text_alone(), **SAMPLES)), stock)
        assert fd.explain(mllama).last_call.path == "shared"


def test_prefill_takes_none(mllama):
    with fd.enabled(mllama), pytest.raises(ValueError, match="attend to images, which no kept cache holds"):
        fd.prefill(mllama, prompts(0))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (
            {"num_beams": 3, "do_sample": False, "top_k": None},
            "which the loop of generation mode 'beam_search' passes",
        ),
        ({"return_dict_in_generate": True}, "which no kept cache holds"),
    ],
)
def test_what_runs_stock(mllama, extra, reason):
    given, call = prompts(0, 2), SAMPLES | extra

    def run():
        found = seeded(lambda: mllama.generate(**given, **call))
        return found if isinstance(found, torch.Tensor) else found.sequences

    stock = run()
    with fd.enabled(mllama):
        assert torch.equal(run(), stock)
        assert reason in fd.explain(mllama).last_call.reason


def test_a_prompt_that_ends_without_an_image(mllama):
    """What its tokens see of one differs from what tokens behind it do."""
    given = prompts(0, 2)
    given["cross_attention_mask"][1] = 0
    stock = seeded(lambda: mllama.generate(**given, **SAMPLES))
    with fd.enabled(mllama):
        assert torch.equal(seeded(lambda: mllama.generate(**given, **SAMPLES)), stock)
        assert "masked whole" in fd.explain(mllama).last_call.reason


@on_the_cpu
@pytest.mark.parametrize("given", [prompts(0, 3), text_alone()], ids=["images", "text"])
def test_captured_steps(mllama, given, uncaptured):
    pytest.importorskip("triton")
    call = SAMPLES | {"num_return_sequences": 2, "max_new_tokens": 4}
    stock = seeded(lambda: mllama.generate(**given, **call))
    with fd.enabled(mllama, mode="graph", backend="triton"):
        assert torch.equal(seeded(lambda: mllama.generate(**given, **call)), stock)
        report = fd.explain(mllama).last_call
    assert (report.path, report.mode) == ("shared", "graph"), report.mode_reason
