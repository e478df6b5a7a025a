"""Contexts divided between two GPUs: eager and captured steps, prefill, and errors in half precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.kernels.forest_decode.limits import MAX_QUERIES

from .loops import clear_model, loops_on_gpu, lost_by, require_captured_loops
from .processes import Models, Seen, run_scenarios, scenario
from .scenarios import same_value, split_model

LONG = 1500
"""Tokens of a prompt whose prefill two GPUs divide."""

FED = 300
"""Tokens of a prompt that passes and steps append: several blocks of a suffix on each GPU."""


def make_model(models: Models, kv_heads: int = 2) -> PreTrainedModel:
    return clear_model(num_key_value_heads=kv_heads).to(f"cuda:{models.rank}")


def prompts(models: Models, length: int, rows: int) -> dict[str, Tensor]:
    """Rows that share all but their last token, padded on the left of the first."""
    ids = torch.arange(length, device=f"cuda:{models.rank}").remainder(61).repeat(rows, 1) + 30
    ids[:, -1] += torch.arange(rows, device=ids.device)
    mask = torch.ones_like(ids)
    mask[0, :7], ids[0, :7] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@scenario
def sequence_greedy(models: Models) -> Any:
    model, found = make_model(models), {}
    for length in (1, 40, LONG):
        given = prompts(models, length, 8) if length > 7 else {"input_ids": torch.full((8, 1), 9, device=model.device)}
        given |= {"do_sample": False, "max_new_tokens": 24}
        for mode in ("eager", "graph"):
            with fd.enabled(model, mode=mode, sequence_parallel="auto"):
                first, tokens = model.generate(**given), model.generate(**given)
                call = fd.explain(model).last_call
            seen = [call.path, call.mode, call.captures, call.parallel.tokens]
            found[f"{length} {mode}"] = [torch.equal(first, tokens), lost_by(model, tokens, given), *seen]
    return found


@scenario
def sequence_long_answers(models: Models) -> Any:
    """Suffixes of several blocks on each GPU, in eager and captured steps; long ones are attended to as own nodes."""
    model, found = make_model(models), []
    given = prompts(models, 40, 4) | {"do_sample": False, "max_new_tokens": 400}
    for mode in ("eager", "graph"):
        with fd.enabled(model, mode=mode, sequence_parallel="auto"):
            tokens, call = model.generate(**given), fd.explain(model).last_call
        found.append((lost_by(model, tokens, given), call.mode, call.parallel.tokens))
    return found


@scenario
def sequence_seeds(models: Models) -> Any:
    """Rank 0's draws count; rows end, and are compacted, in captured steps."""
    model, found = make_model(models), []
    given = {
        "input_ids": prompts(models, 900, 2)["input_ids"][1:],
        "do_sample": True,
        "top_k": 0,
        "temperature": 100.0,
    }
    given |= {"num_return_sequences": 64, "max_new_tokens": 300, "eos_token_id": list(range(0, 512, 16))}
    for sampler in ("hf", "fast"):
        with fd.enabled(model, mode="graph", sampler=sampler, sequence_parallel="auto"):
            torch.manual_seed(models.rank)
            tokens = model.generate(**given)
            call = fd.explain(model).last_call
            found.append((tokens.tolist(), call.mode, call.sampler, call.compactions > 0))
    return found


@scenario
def sequence_slim(models: Models) -> Any:
    model = make_model(models, kv_heads=8)
    text = torch.randint(3, 512, (1024,), generator=torch.Generator().manual_seed(5))
    slim, found = to_slim(model, text), []
    given = prompts(models, LONG, 4) | {"do_sample": False, "max_new_tokens": 16}
    stock = slim.generate(**given)
    for mode in ("eager", "graph"):
        with fd.enabled(slim, mode=mode, sequence_parallel="auto"):
            found.append((torch.equal(slim.generate(**given), stock), fd.explain(slim).last_call.mode))
    return found


@scenario
def sequence_errors(models: Models) -> Any:
    """Errors of logits after a prefill, passes and steps, ours and PyTorch's, against fp64."""
    model, found = make_model(models), []
    model.lm_head.weight.data.normal_(std=0.05)
    tokens = prompts(models, LONG, 1)["input_ids"]
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        oracle, stock = exact(tokens).logits[:, -FED:], model(tokens).logits[:, -FED:]
    for backend in ("auto", "triton"):
        with fd.enabled(model, sequence_parallel="auto", backend=backend), torch.no_grad():
            cache, logits = fd.prefill(model, tokens[:, :-FED]), []
            first = [MAX_QUERIES] * (FED // MAX_QUERIES - 1) if backend == "triton" else [FED // 2]
            for count in (*first, 7, 1, 1, FED):
                fed = tokens[:, LONG - FED + cache.suffix_length :][:, :count]
                at_once = MAX_QUERIES if backend == "triton" else FED
                logits += [model(part, **{CACHE: cache}).logits for part in fed.split(at_once, 1)]
        logits = torch.cat(logits, 1)
        found.append(((logits.double() - oracle).norm().item(), (stock.double() - oracle).norm().item()))
        found[-1] += (logits.float().cpu().numpy().tobytes().hex()[:2000],)
    return found


@scenario
def sequence_and_weights(models: Models) -> Any:
    """Weights of all but the attention heads are split between the same GPUs, with communications in one graph."""
    alone = make_model(models, kv_heads=1)
    given = prompts(models, LONG, 8) | {"do_sample": False, "max_new_tokens": 24}
    stock, model, found = alone.generate(**given), split_model(alone), []
    for mode in ("eager", "graph"):
        with fd.enabled(model, mode=mode, sequence_parallel="auto"):
            same = [torch.equal(model.generate(**given), stock) for _ in range(2)]
            found.append([same, fd.explain(model).last_call.mode, fd.explain(model).last_call.parallel.kind])
    return found


@scenario
def sequence_beams(models: Models) -> Any:
    model = make_model(models)
    given = prompts(models, 300, 2) | {"num_beams": 3, "do_sample": False, "max_new_tokens": 12}
    stock = model.generate(**given)
    with fd.enabled(model, sequence_parallel="auto"):
        return torch.equal(model.generate(**given), stock), fd.explain(model).last_call.path


@scenario
def sequence_loops(models: Models) -> Any:
    """Loops of transformers' own and of the user's replay captured passes, which communicate."""
    model = make_model(models)
    return loops_on_gpu(model, copy.deepcopy(model), sequence_parallel="auto")


@scenario
def sequence_loops_and_weights(models: Models) -> Any:
    alone = make_model(models, kv_heads=1)
    return loops_on_gpu(split_model(alone), alone, sequence_parallel="auto")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, ...]]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    out = tmp_path_factory.mktemp("seen")
    return run_scenarios(["test_sequence_parallel_on_gpu"], {}, out, backend="nccl")


@pytest.mark.gpu
def test_eager_and_captured_steps_draw_the_best_tokens(seen):
    """In half precision they are within the errors of logits that are twice PyTorch's."""
    found = same_value(seen, "sequence_greedy")
    for name, (same, (lost, error), path, mode, captures, tokens) in found.items():
        assert same, name
        assert lost <= 4 * error, name
        assert (path, mode, captures) == ("shared", name.split()[1], 0), name
        assert tokens > 0


@pytest.mark.gpu
def test_long_answers(seen):
    found = same_value(seen, "sequence_long_answers")
    assert [mode for _, mode, _ in found] == ["eager", "graph"]
    for (lost, error), _, tokens in found:
        assert lost <= 4 * error
        assert tokens > 4 * 399


@pytest.mark.gpu
def test_rank_0_draws_for_all(seen):
    found = same_value(seen, "sequence_seeds")
    assert [one[1:] for one in found] == [["graph", "hf", True], ["graph", "fast", True]]


@pytest.mark.gpu
def test_slim_layers(seen):
    assert same_value(seen, "sequence_slim") == [[True, "eager"], [True, "graph"]]


@pytest.mark.gpu
def test_errors_are_at_most_twice_those_of_pytorch(seen):
    """And logits are the same to the bit on both GPUs."""
    for ours, pytorch, _ in same_value(seen, "sequence_errors"):
        assert 0 < ours <= 2 * pytorch


@pytest.mark.gpu
def test_weights_split_between_the_same_gpus(seen):
    assert same_value(seen, "sequence_and_weights") == [
        [[True, True], mode, "sequence"] for mode in ("eager", "graph")
    ]


@pytest.mark.gpu
def test_beams(seen):
    assert same_value(seen, "sequence_beams") == [True, "shared"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sequence_loops", "sequence_loops_and_weights"])
def test_other_loops_replay_captured_passes(seen, name):
    require_captured_loops(same_value(seen, name))
