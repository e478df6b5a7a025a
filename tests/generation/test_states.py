"""Models whose layers have a state per row: it is computed once per distinct prompt, and forked to its rows."""

from __future__ import annotations

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE, TRANSFORMERS
from hf_fastdecode.cache.layout import STATES_IN_CACHES
from hf_fastdecode.generation.steps.runners import EagerSteps

from ..architectures.classes import tiny_model_of
from ..tiny_models import ragged_prompts, seeded
from .calls import tokens_embedded

CONTINUED = [
    "Qwen3NextForCausalLM",  # gated delta nets beside gated attention
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",  # whose positions have planes
    "OlmoHybridForCausalLM",
    "NemotronHForCausalLM",  # layers of Mamba-2, of attention, and without a cache
    "GraniteMoeHybridForCausalLM",
    "BambaForCausalLM",
    "FalconH1ForCausalLM",  # state and attention in one layer
    "Zamba2ForCausalLM",  # both kinds of layers with states
    "Lfm2ForCausalLM",  # short convolutions
    "Lfm2MoeForCausalLM",
]
ANEW = ["JambaForCausalLM", "ZambaForCausalLM"]  # Mamba-1
ALONE = ["MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM"]  # no attention
CLASSES = [*CONTINUED, *ANEW, *([] if CACHE == "past_key_values" else ALONE)]

PROMPTS = ragged_prompts(31, 45, 38, shared=20)
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 12}
BEAMS = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def model():
    return tiny_model_of("Qwen3NextForCausalLM")


@pytest.fixture(scope="module", params=CLASSES)
def each(request):
    return tiny_model_of(request.param)


def run(model, arguments, prompts=PROMPTS, **more):
    return seeded(lambda: model.generate(**prompts, **arguments, **more))


def ending_early(model, arguments=SAMPLING):
    """The arguments, with the end tokens that let rows end after different numbers of steps."""
    new = run(model, arguments)[:, PROMPTS["input_ids"].shape[1] :]
    return arguments | {"eos_token_id": [*new[:4, 2].tolist(), int(new[5, 5])]}


def test_tokens_are_stocks(each):
    arguments = ending_early(each)
    stock, beams = run(each, arguments), run(each, BEAMS)
    with fd.enabled(each, min_saved_tokens=1):
        with tokens_embedded(each) as counted:
            assert torch.equal(run(each, arguments), stock)
        report = fd.explain(each).last_call
        assert (report.path, report.mode, report.prefilled_tokens) == ("shared", "eager", 31 + 45 + 38)
        assert counted[0] == PROMPTS["input_ids"].numel()  # with padding, as stock has it
        assert report.compactions >= 1
        assert report.kept_states == 3
        assert torch.equal(run(each, BEAMS), beams)
        assert fd.explain(each).last_call.path == "shared"


def test_a_kept_cache_is_continued_from_its_state(each):
    """Where the scan of a class begins anew, whole prompts are computed again."""
    stock = run(each, SAMPLING)
    known = (20, 20, 20) if each.config.model_type in CONTINUES else (0, 0, 0)
    with fd.enabled(each):
        kept = fd.prefill(each, PROMPTS["input_ids"][1:2, :20])
        for _ in range(2):
            assert torch.equal(run(each, SAMPLING, **{CACHE: kept}), stock)
            assert fd.explain(each).last_call.known_tokens == known


CONTINUES = {name for name, continues in STATES_IN_CACHES.items() if continues}


def test_a_returned_cache_is_continued_where_completions_end(model):
    first = run(model, SAMPLING)
    longer = torch.cat([first, first[:, :5]], 1)
    mask = torch.cat([PROMPTS["attention_mask"].repeat_interleave(3, 0), torch.ones(9, 17, dtype=torch.long)], 1)
    prompts, greedy = {"input_ids": longer, "attention_mask": mask}, {"do_sample": False, "max_new_tokens": 6}
    stock = run(model, greedy, prompts)
    with fd.enabled(model):
        returned = run(model, SAMPLING, return_dict_in_generate=True)
        assert torch.equal(returned.sequences, first)
        # The last token was drawn, and not computed.
        ends = [length + 11 for length in (31, 45, 38) for _ in range(3)]
        assert torch.equal(run(model, greedy, prompts, **{CACHE: returned[CACHE]}), stock)
        assert fd.explain(model).last_call.known_tokens == tuple(ends)
        # A prompt that turns off before an end shares up to the end before that: its own, of the first call.
        prompts["input_ids"] = longer.clone()
        prompts["input_ids"][:, -10] = 7
        with fd.enabled(model), torch.no_grad():
            run(model, greedy, prompts, **{CACHE: returned[CACHE]})
        assert fd.explain(model).last_call.known_tokens == (31,) * 3 + (45,) * 3 + (38,) * 3
