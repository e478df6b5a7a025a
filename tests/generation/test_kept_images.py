"""Kept caches with images: turns about the same ones, and which images a cache knows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..architectures.classes import tiny_model_of
from ..image_inputs import prompts_with_images
from ..module_calls import before_calls
from .image_calls import CALLS, CLASSES, SEVERAL, SMALL, TALL, TOWERS, WITH_STATES_TOO, run


@pytest.fixture(scope="module", params=CLASSES)
def model(request):
    return tiny_model_of(request.param)


def followed(inputs, *tokens):
    """The prompts with these tokens of text behind them, ``[rows, tokens]`` each."""
    ids, behind = inputs["input_ids"], torch.cat(tokens, 1)
    longer = {
        name: torch.cat([part, part.new_full(behind.shape, name == "attention_mask")], 1)
        for name, part in inputs.items()
        if part.shape == ids.shape
    }
    return inputs | longer | {"input_ids": torch.cat([ids, behind], 1)}


@pytest.mark.parametrize("name", WITH_STATES_TOO)
def test_turns_about_the_same_images(name):
    """A kept cache holds the images' tokens, and no later turn encodes them again; so does a returned one."""
    model, counted = tiny_model_of(name), []
    model.generation_config.suppress_tokens = [
        token for name, token in vars(model.config).items() if name.endswith(("_token_id", "_index")) and token
    ]
    inputs = prompts_with_images(model, (5, SMALL, 9), (3, TALL, 12))
    question, another = torch.randint(3, 90, (2, 2, 6), generator=torch.Generator().manual_seed(0))
    turn, lengths = followed(inputs, question), tuple(inputs["attention_mask"].sum(1).tolist())
    stock = {call: run(model, turn, call) for call in CALLS}
    tower = getattr(model.model, TOWERS.get(name, "visual"))
    with fd.enabled(model), before_calls(tower, lambda *_: counted.append(1)):
        kept = fd.prefill(model, inputs)
        assert len(counted) == 1
        for call in CALLS:
            assert torch.equal(run(model, turn | {CACHE: kept}, call), stock[call])
            assert fd.explain(model).last_call.known_tokens == lengths
        returned = run(model, turn | {CACHE: kept, "return_dict_in_generate": True}, "greedy")
        assert torch.equal(returned.sequences, stock["greedy"])
        said = returned.sequences[:, turn["input_ids"].shape[1] :]
        later = followed(turn, said, another)
        found = run(model, later | {CACHE: returned[CACHE]}, "samples")
        assert fd.explain(model).last_call.known_tokens == tuple(length + 6 + 7 for length in lengths)
        assert len(counted) == 1
    assert torch.equal(found, run(model, later, "samples"))


def test_max_rows_bounds_no_kept_prompts(model):
    with fd.enabled(model, max_rows=1):
        assert fd.prefill(model, prompts_with_images(model, *SEVERAL[:2])).rows == 2


def test_calls_of_other_threads_beside_prefill(model):
    """They have the options of the model, and are its last ones."""
    inputs = prompts_with_images(model, *SEVERAL[:2])
    tower, calls = getattr(model.model, TOWERS.get(type(model).__name__, "visual")), []

    def other():
        run(model, {"input_ids": inputs["input_ids"][:, -9:]}, "samples")
        return fd.explain(model).last_call

    with fd.enabled(model, max_rows=2, min_saved_tokens=1), ThreadPoolExecutor(1) as pool:
        with before_calls(tower, lambda *_: calls.append(pool.submit(other).result())):
            assert fd.prefill(model, inputs).rows == 2
        assert [call.rows_at_once for call in calls] == [2]
        assert fd.explain(model).last_call is calls[0]


def test_kept_images_are_those_of_the_call(model):
    """Prompts with other ones go on where these begin, and those with more behind the kept tokens behind these."""
    inputs = prompts_with_images(model, (9, SMALL, 9))
    others = [prompts_with_images(model, (9, (4, 4, 1), 9, 5)), prompts_with_images(model, (9, SMALL, 9, TALL, 5))]
    for other in others:
        other["input_ids"][:, : 9 + 6] = inputs["input_ids"][:, : 9 + 6]
    others[1]["input_ids"][:, :24] = inputs["input_ids"]
    stock, has_states = [run(model, other, "samples") for other in others], model.config.model_type == "qwen3_5"
    with fd.enabled(model):
        kept = fd.prefill(model, inputs)
        for other, expected, known in zip(others, stock, (0 if has_states else 10, 24), strict=True):
            assert torch.equal(run(model, other | {CACHE: kept}, "samples"), expected)
            assert fd.explain(model).last_call.known_tokens == (known,)
        if model.config.model_type != "qwen3_5":
            with pytest.raises(ValueError, match="pass position_ids, or the whole prompt"):
                model(torch.ones(1, 1, dtype=torch.long), **{CACHE: kept})


def test_prompts_are_kept_whatever_a_models_defaults_are(monkeypatch):
    """For `generate`, whose rows and passes they would change."""
    model = tiny_model_of("Qwen3VLForConditionalGeneration")
    inputs = prompts_with_images(model, (9, SMALL, 9))
    defaults = {"num_beams": 2, "num_return_sequences": 2, "use_cache": False, "output_hidden_states": True}
    for name, value in defaults.items():
        monkeypatch.setattr(model.generation_config, name, value)
    with fd.enabled(model):
        assert fd.prefill(model, inputs).rows == 1


def test_what_a_processor_returns_in_part(model):
    """Its types of tokens may stand beside text; of images all is needed, as tensors."""
    inputs = prompts_with_images(model, (9, SMALL, 9))
    types = {"mm_token_type_ids": (inputs["input_ids"] == model.config.image_token_id).long()}
    text = {name: value[:, :9] for name, value in (inputs | types).items() if name != "pixel_values"}
    text = {name: text[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    with fd.enabled(model):
        assert fd.prefill(model, text).get_seq_length() == 9
        with pytest.raises(ValueError, match="beside images input_ids must be a tensor, got list; call the processor"):
            fd.prefill(model, inputs | types | {"input_ids": inputs["input_ids"].tolist()})
        prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")} | types
        with pytest.raises(ValueError, match="got 'mm_token_type_ids' too; leave it out, or if the model takes"):
            fd.prefill(model, prompt)
        kept = fd.prefill(model, inputs | types)
        with pytest.raises(ValueError, match="'mm_token_type_ids' says that tokens are of images, and the call has"):
            run(model, prompt | {CACHE: kept}, "samples")


def test_kept_prompts_that_end_in_an_image(model):
    inputs = prompts_with_images(model, (9, SMALL))
    inputs = {name: part[:, :-1] if part.shape == (1, 15) else part for name, part in inputs.items()}
    turn = followed(inputs, torch.full((1, 5), 50))
    stock = [run(model, one, "samples") for one in (inputs, turn)]
    with fd.enabled(model):
        kept = fd.prefill(model, inputs)
        for one, expected, known in zip((inputs, turn), stock, (0, 14), strict=True):
            assert torch.equal(run(model, one | {CACHE: kept}, "samples"), expected)
            assert fd.explain(model).last_call.known_tokens == (known,)


def test_images_behind_kept_tokens_that_see_each_other():
    """Gemma 3's run in prompts that are computed whole, by transformers' masks."""
    model = tiny_model_of("Gemma3ForConditionalGeneration")
    inputs = prompts_with_images(model, (9, SMALL, 9))
    other = prompts_with_images(model, (9, (4, 4, 1), 9))
    other["input_ids"] = inputs["input_ids"]
    stock = run(model, other, "samples")
    with fd.enabled(model):
        kept = fd.prefill(model, inputs)
        for _ in range(2):
            assert torch.equal(run(model, other | {CACHE: kept}, "samples"), stock)
            assert fd.explain(model).last_call.known_tokens == (0,)


@pytest.mark.skipif(CACHE != "cache", reason="before transformers 5.24, tiny ones of its images are of another form")
def test_kept_images_have_the_positions_of_the_call():
    """HunYuan-VL's count the images of a whole batch, so that the second prompt's are others in a call of its own."""
    model = tiny_model_of("HunYuanVLForConditionalGeneration")
    inputs = prompts_with_images(model, (5, SMALL, 9), (3, SMALL, 11))
    alone = prompts_with_images(model, (3, SMALL, 11))
    alone["input_ids"] = inputs["input_ids"][1:]
    turns = [followed(one, torch.full((len(one["input_ids"]), 3), 50)) for one in (inputs, alone)]
    stock = [run(model, turn, "greedy") for turn in turns]
    with fd.enabled(model):
        kept = fd.prefill(model, inputs)
        for turn, expected, known in zip(turns, stock, ((22, 22), (3,)), strict=True):
            assert torch.equal(run(model, turn | {CACHE: kept}, "greedy"), expected)
            assert fd.explain(model).last_call.known_tokens == known


def test_prompts_that_attend_both_ways_are_not_kept():
    model = tiny_model_of("PaliGemmaForConditionalGeneration")
    inputs = prompts_with_images(model, (5, SMALL, 9))
    with fd.enabled(model, min_saved_tokens=1):
        with pytest.raises(ValueError, match="text behind them is not continued"):
            fd.prefill(model, inputs)
        run(model, inputs | {"return_dict_in_generate": True}, "samples")
        assert "text behind them is not continued" in fd.explain(model).last_call.reason
