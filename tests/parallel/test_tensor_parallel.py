"""Calls of a model that two processes compute together (``tp_plan="auto"``): they agree, or say where they differ."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.generation.streamers import BaseStreamer

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.layout import ModelLayout
from hf_fastdecode.cache.shared import SharedContextCache
from hf_fastdecode.cache.storage import TokenStorage
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation import structure, support
from hf_fastdecode.generation.decoding import stopping
from hf_fastdecode.generation.prompts import start
from hf_fastdecode.generation.steps import cuda_graph, graph_capture, modes, runners
from hf_fastdecode.generation.steps.cuda_graph import CapturedStep
from hf_fastdecode.generation.steps.projections import has_projections
from hf_fastdecode.generation.steps.runners import CapturedSteps
from hf_fastdecode.parallel.groups import splitting_group
from hf_fastdecode.parallel.merge import merge_over, merged, partial_buffer

from .two_ranks import Models, Seen, run_on_two

SCENARIOS: dict[str, Callable[[Models], Any]] = {}
PROMPT = torch.arange(3, 90).remainder(61)[None] + 3
PROMPTS = PROMPT.expand(4, -1)
ENDS = list(range(5, 30))
"""End tokens that random models draw soon."""
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 8, "max_new_tokens": 60, "eos_token_id": ENDS}
GREEDY = {"do_sample": False, "max_new_tokens": 8}


def scenario(function: Callable[[Models], Any]) -> Callable[[Models], Any]:
    SCENARIOS[function.__name__] = function
    return function


def draw(model: PreTrainedModel, seed: int, ids: torch.Tensor = PROMPT, **arguments: Any) -> list[list[int]]:
    torch.manual_seed(seed)
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **arguments}).tolist()


def reason(model: PreTrainedModel) -> str:
    call = fd.explain(model).last_call
    return f"{call.path}: {call.reason}"


@contextmanager
def raising(rank: int, models: Models, owner: object, name: str, error: Exception) -> Iterator[None]:
    """Make a function raise once on one rank."""
    original, errors = getattr(owner, name), [error] if models.rank == rank else []

    def once(*arguments: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return original(*arguments, **named)

    with mock.patch.object(owner, name, once):
        yield


@scenario
def other_seeds(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model, fd.enabled(models.alone["llama"]) as alone:
        tokens, call = draw(model, models.rank, **SAMPLING), fd.explain(model).last_call
        assert "computed by 2 processes, of which rank 0 draws tokens" in str(fd.explain(model))
        return tokens, draw(alone, 0, **SAMPLING), call.path, call.compactions


@scenario
def other_lengths(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, PROMPTS, **GREEDY | {"max_new_tokens": 8 + models.rank})


@scenario
def other_prompts(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, (PROMPTS + models.rank).contiguous(), **GREEDY)


@scenario
def other_options(models: Models) -> Any:
    with fd.enabled(models.split["llama"], min_shared_tokens=32 + models.rank) as model:
        return draw(model, 0, PROMPTS, **GREEDY)


@scenario
def other_end_tokens(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, PROMPTS, **GREEDY, eos_token_id=[5, 6 + models.rank])


@scenario
def other_cache(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        long, short = fd.prefill(model, PROMPT), fd.prefill(model, PROMPT[:, :80])
        return draw(model, 0, PROMPTS, **GREEDY, **{CACHE: (long, short)[models.rank]})


@scenario
def other_prefill(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        return fd.prefill(model, PROMPT[:, : 80 + models.rank]).rows


@scenario
def one_rank_refuses(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        model.model.layers[0].train(models.rank == 1)
        model.model.layers[0].self_attn.attention_dropout = 0.1 * models.rank
        try:
            tokens = draw(model, 0, PROMPTS, **GREEDY)
        finally:
            model.model.layers[0].eval()
            model.model.layers[0].self_attn.attention_dropout = 0.0
        return len(tokens), reason(model)


@scenario
def one_rank_raises(models: Models) -> Any:
    with raising(1, models, start, "check_prompts", KeyError("no prompt")), fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, PROMPTS, **GREEDY)


@scenario
def one_rank_refuses_and_one_raises(models: Models) -> Any:
    error = (Unsupported("it cannot share"), KeyError("no prompt"))[models.rank]
    with raising(models.rank, models, start, "check_prompts", error), fd.enabled(models.split["llama"]) as model:
        return draw(model, 0, PROMPTS, **GREEDY)


@scenario
def after_errors(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model, fd.enabled(models.alone["llama"]) as alone:
        return draw(model, 0, PROMPTS, **GREEDY), draw(alone, 0, PROMPTS, **GREEDY), reason(model)


@scenario
def time_limits(models: Models) -> Any:
    found = []
    with fd.enabled(models.split["llama"]) as model:
        for late in (0, 1):
            clock = mock.Mock(time=lambda late=late: time.time() + 1e6 * (models.rank == late))
            with mock.patch.object(stopping, "time", clock):
                found.append(len(draw(model, 0, PROMPTS, **GREEDY, max_time=1000.0)[0]) - PROMPT.shape[1])
    return found


class _Steps(StoppingCriteria):
    def __init__(self, steps: int):
        self.calls = itertools.count(1)
        self.steps = steps

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), next(self.calls) >= self.steps)


class _Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.numel())

    def end(self) -> None:
        self.pieces.append(0)


@scenario
def criteria_of_rank_0(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        criteria = StoppingCriteriaList([_Steps(3 + 2 * models.rank)])
        return len(draw(model, 0, PROMPTS, **GREEDY, stopping_criteria=criteria)[0]) - PROMPT.shape[1]


@scenario
def streams_on_rank_0(models: Models) -> Any:
    recorder = _Recorder()
    with fd.enabled(models.split["llama"], min_saved_tokens=0, reuse_prefix=True) as model:
        tokens = draw(model, 0, PROMPT, **GREEDY, streamer=None if models.rank else recorder)
        return len(tokens[0]) - PROMPT.shape[1], recorder.pieces, reason(model)


@scenario
def waves(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model, fd.enabled(models.alone["llama"]) as alone:
        with raising(1, models, SharedContextCache, "reserve", torch.OutOfMemoryError("no memory")):
            tokens = draw(model, models.rank, PROMPTS, **GREEDY)
        return tokens, draw(alone, 0, PROMPTS, **GREEDY), fd.explain(model).last_call.waves


@contextmanager
def capturing() -> Iterator[None]:
    """Let captured modes run where kernels are interpreted, and pay for few steps."""
    with (
        mock.patch.object(modes, "capture_reason", return_value=None),
        mock.patch.object(runners, "_STEPS_OF_A_CAPTURE", 0),
    ):
        yield


CAPTURED = SAMPLING | {"num_return_sequences": 4, "max_new_tokens": 12}


@scenario
def compacting_without_memory(models: Models) -> Any:
    """Memory for the suffixes of active rows is short on one rank, for eager steps and captured ones."""
    found = []
    ends = GREEDY | {"eos_token_id": ENDS, "max_new_tokens": 12}
    ids = torch.cat([PROMPT.expand(4, -1), torch.arange(3, 7)[:, None]], 1)
    for options in ({}, {"mode": "graph", "backend": "triton"}):
        with (
            capturing(),
            raising(1, models, TokenStorage, "select_rows", torch.OutOfMemoryError("no memory")),
            fd.enabled(models.split["small"], **options) as model,
        ):
            tokens, call = draw(model, 0, ids, **ends), fd.explain(model).last_call
        with fd.enabled(models.alone["small"]) as alone:
            found.append((tokens == draw(alone, 0, ids, **ends), call.mode, call.waves))
    return found


@scenario
def forgotten_failures(models: Models) -> Any:
    """One rank has forgotten that a capture for long completions failed: none captures again."""
    with fd.enabled(models.split["small"]) as model:
        state = vars(model)["_hf_fastdecode"]
        steps = object.__new__(CapturedSteps)
        steps._oversized, steps._structure = False, state.structure.of(model)
        steps._step = mock.Mock(suits=lambda cache: False)
        steps.cache = mock.Mock(suffix_length=0)
        steps.cache.state.max_suffix = 4096
        found = []
        for failure in (None, "no memory" if models.rank else None):
            steps._captures = mock.Mock(own_nodes_failure=failure)
            found.append(steps._should_recapture())
    return found


@scenario
def captures_in_use_on_one_rank(models: Models) -> Any:
    with (
        capturing(),
        mock.patch.object(modes, "_STEPS_THAT_PAY_A_CAPTURE", 0),
        fd.enabled(models.split["small"], backend="triton") as model,
    ):
        lock = vars(model)["_hf_fastdecode"].captures.lock
        if models.rank:
            lock.acquire()
        tokens, call = draw(model, 0, PROMPTS, **GREEDY), fd.explain(model).last_call
        free = not lock.locked()
        if models.rank:
            lock.release()
        return len(tokens), call.mode, call.mode_reason, free


@scenario
def captured_steps(models: Models) -> Any:
    with capturing(), fd.enabled(models.split["small"], mode="graph", backend="triton") as model:
        tokens, call = draw(model, models.rank, **CAPTURED), fd.explain(model).last_call
        again, known = draw(model, models.rank, **CAPTURED), fd.explain(model).last_call
    with fd.enabled(models.alone["small"]) as alone:
        expected = draw(alone, 0, **CAPTURED)
    return tokens == again == expected, call.mode, call.compactions, call.captures, known.captures


@scenario
def captured_on_one_rank(models: Models) -> Any:
    """The first capture succeeds on both, the second, of fewer rows, on one: steps of more rows go on."""
    made, original = itertools.count(), CapturedStep.__init__

    def make(*arguments: Any, **named: Any) -> None:
        original(*arguments, **named)
        if next(made) and models.rank:
            raise RuntimeError("not permitted when capturing")

    with (
        capturing(),
        mock.patch.object(CapturedStep, "__init__", make),
        fd.enabled(models.split["small"], mode="graph", backend="triton") as model,
    ):
        tokens, call = draw(model, models.rank, **CAPTURED), fd.explain(model).last_call
    with fd.enabled(models.alone["small"]) as alone:
        return tokens == draw(alone, 0, **CAPTURED), call.mode, next(made)


@scenario
def captured_on_no_rank(models: Models) -> Any:
    """A failure of one rank's first capture makes all run eagerly, if the mode is not forced."""
    original = CapturedStep.__init__

    def make(*arguments: Any, **named: Any) -> None:
        original(*arguments, **named)
        if models.rank:
            raise RuntimeError("not permitted when capturing")

    with (
        capturing(),
        mock.patch.object(modes, "_STEPS_THAT_PAY_A_CAPTURE", 0),
        mock.patch.object(CapturedStep, "__init__", make),
        fd.enabled(models.split["small"], backend="triton") as model,
    ):
        return draw(model, models.rank, **CAPTURED), fd.explain(model).last_call.mode


@scenario
def captured_without_memory(models: Models) -> Any:
    """Memory for the first capture's tables is short on one rank, which both know before they run a pass."""
    passes, original = itertools.count(), CapturedStep.capture

    def counted(step: CapturedStep) -> None:
        next(passes)
        original(step)

    with capturing(), fd.enabled(models.split["small"], mode="graph", backend="triton") as model:
        no_memory = torch.OutOfMemoryError("no memory")
        with (
            raising(1, models, cuda_graph, "TablesByShape", no_memory),
            mock.patch.object(CapturedStep, "capture", counted),
        ):
            tokens, call = draw(model, 0, PROMPTS, **GREEDY), fd.explain(model).last_call
    with fd.enabled(models.alone["small"]) as alone:
        return (
            tokens == draw(alone, 0, PROMPTS, **GREEDY),
            call.mode,
            call.waves,
            next(passes) == call.captures,
        )


@scenario
def failing_pass_of_a_capture(models: Models) -> Any:
    """A pass that fails ends the call in its process, which does not go on eagerly."""

    def fail(step: CapturedStep) -> None:
        with graph_capture.running_pass(mock.Mock(count=2)):
            raise torch.OutOfMemoryError("no memory")

    with (
        capturing(),
        mock.patch.object(modes, "_STEPS_THAT_PAY_A_CAPTURE", 0),
        mock.patch.object(CapturedStep, "capture", fail),
        fd.enabled(models.split["small"], backend="triton") as model,
    ):
        return draw(model, models.rank, **CAPTURED)


@scenario
def kept_caches(models: Models) -> Any:
    found = []
    for name in ("llama", "gpt_neox", "olmo2"):
        alone = models.alone[name]
        text = torch.cat([PROMPT, PROMPT[:, :5]], 1).repeat(4, 1)
        with fd.enabled(models.split[name]) as model:
            cache = fd.prefill(model, PROMPT)
            tokens = draw(model, 0, text, **GREEDY, **{CACHE: cache})
            heads = {layer.storage.node_example[0].shape[0] for layer in cache.attention_layers}
            stores = [store for _, store in ModelLayout.of(model)]
            found.append((tokens, draw(alone, 0, text, **GREEDY), reason(model), sorted(heads)))
            found[-1] += (sorted({(store.query_heads, store.kv_heads) for store in stores}),)
    return found


@scenario
def other_stores_of_prefixes(models: Models) -> Any:
    with fd.enabled(models.split["llama"], reuse_prefix=True) as model:
        first = draw(model, 0, PROMPTS, **GREEDY)
        if models.rank:
            vars(model)["_hf_fastdecode"].prefix_store.clear()
        again = draw(model, 0, PROMPTS, **GREEDY)
        known = fd.explain(model).last_call.known_tokens
        third = draw(model, 0, PROMPTS, **GREEDY)
        return first == again == third, known, fd.explain(model).last_call.known_tokens


@scenario
def merging_without_memory(models: Models) -> Any:
    """Memory for the merged nodes of a returned cache is short on one rank: the nodes stay apart on both."""
    found = []
    wanted = GREEDY | {"return_dict_in_generate": True}
    with fd.enabled(models.split["llama"], min_saved_tokens=0) as model:
        for rank in (None, 1):
            first = model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), **wanted)
            longer = torch.cat([first.sequences, PROMPTS[:, :80]], 1)
            error = torch.OutOfMemoryError("no memory")
            with raising(2 if rank is None else rank, models, TokenStorage, "copied", error):
                again = model.generate(
                    longer, attention_mask=torch.ones_like(longer), **wanted, **{CACHE: first[CACHE]}
                )
            found.append((again.sequences.tolist(), len(again[CACHE].forest.nodes)))
    return found[0][0] == found[1][0], found[0][1], found[1][1]


@scenario
def trained(models: Models) -> Any:
    with fd.enabled(models.split["trained"], reuse_prefix=True) as model:
        cache = fd.prefill(model, PROMPT)
        before = draw(model, 0, PROMPTS, **GREEDY)
        optimizer = torch.optim.SGD([one for one in model.parameters() if isinstance(one, DTensor)], lr=50.0)
        model(PROMPT, labels=PROMPT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = draw(model, 0, PROMPTS, **GREEDY)
        try:
            draw(model, 0, PROMPTS, **GREEDY, **{CACHE: cache})
            refused = ""
        except ValueError as error:
            refused = str(error)
    return before != after, after == draw(model, 0, PROMPTS, **GREEDY), refused


@scenario
def projections(models: Models) -> Any:
    return has_projections(models.split["llama"]), has_projections(models.alone["llama"])


@scenario
def other_draws_of_beams(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        return draw(model, models.rank, num_beams=3, num_return_sequences=3, do_sample=True, max_new_tokens=8)


@scenario
def other_draws_of_stock(models: Models) -> Any:
    with fd.enabled(models.split["llama"]) as model:
        return draw(model, models.rank, do_sample=True, max_new_tokens=8)


@scenario
def same_draws(models: Models) -> Any:
    found = []
    with fd.enabled(models.split["llama"]) as model:
        for seed, arguments in (
            (3, {"num_beams": 3, "num_return_sequences": 3, "do_sample": True}),
            (3, {"do_sample": True}),
            (models.rank, {"num_beams": 3, "num_return_sequences": 3, "do_sample": False}),
            (models.rank, {"do_sample": False}),
        ):
            tokens = draw(model, seed, max_new_tokens=8, **arguments)
            found.append((tokens, draw(models.alone["llama"], seed, max_new_tokens=8, **arguments), reason(model)))
    return found


@scenario
def merged_partials(models: Models) -> Any:
    """The bits of a merge on each rank, and what the collective carried."""
    shape = (5, 4, 16)
    buffers = [partial_buffer(shape) for _ in range(2)]
    for rank, buffer in enumerate(buffers):
        buffer.flat.copy_(torch.randn(len(buffer.flat), generator=torch.Generator().manual_seed(rank)))
    with CommDebugMode() as communicated:
        found = merge_over(torch.distributed.group.WORLD, buffers[models.rank])
    expected = merged(torch.stack([buffer.flat for buffer in buffers]), shape)
    same = torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)
    return same, found.out.numpy().tobytes().hex(), communicated.get_total_counts()


@scenario
def data_parallel(models: Models) -> Any:
    """Processes with a model each, and prompts of their own."""
    ids = PROMPTS[:, models.rank :].contiguous()
    with fd.enabled(models.alone["llama"], min_shared_tokens=32 + models.rank) as model:
        return len(draw(model, models.rank, ids, **GREEDY)[0]), reason(model)


@scenario
def fully_sharded(models: Models) -> Any:
    """Processes that hold parts of the weights, and gather them before use: prompts of their own too."""
    model = copy.deepcopy(models.alone["llama"])
    ids = PROMPTS[:, models.rank :].contiguous()
    expected = draw(model, 0, ids, **GREEDY)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with fd.enabled(model):
        return draw(model, 0, ids, **GREEDY, synced_gpus=True) == expected, reason(model)


@scenario
def several_groups(models: Models) -> Any:
    """Weights split over two groups of two processes each (the members of one are pretended)."""
    groups = [mock.Mock(size=lambda: 2, members=one) for one in ([0, 1], [models.rank, 2 + models.rank])]
    with (
        mock.patch.object(DeviceMesh, "get_group", lambda mesh, dimension: groups[dimension]),
        mock.patch.object(torch.distributed, "get_process_group_ranks", lambda group: group.members),
        mock.patch.object(DeviceMesh, "size", return_value=2),
        mock.patch.object(DTensor, "placements", (Shard(0), Shard(0))),
        pytest.raises(Unsupported) as raised,
    ):
        splitting_group(models.split["llama"].parameters())
    error = Unsupported("its parameters are split over several groups of processes, of 2 and 2")
    with (
        mock.patch.object(structure, "splitting_group", side_effect=error),
        mock.patch.object(support, "splitting_group", side_effect=error),
        fd.enabled(models.split["llama"]) as model,
    ):
        return str(raised.value) == str(error), len(draw(model, 0, PROMPTS, **GREEDY)), reason(model)


@scenario
def attention_on_every_rank(models: Models) -> Any:
    """A plan that splits the MLPs alone, for models of fewer KV heads than ranks."""
    folder = models.alone["llama"].config.name_or_path
    plan = {
        "model.layers.*.self_attn.o_proj": "rowwise_split_input",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }
    if "replicate" in ALL_PARALLEL_STYLES:  # where the plan is added to the model's own, before it replaces that
        plan |= {f"model.layers.*.self_attn.{name}": "replicate" for name in ("q_proj", "k_proj", "v_proj")}
    config = DistributedConfig(tp_size=2, tp_plan=plan)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()
    with fd.enabled(model), fd.enabled(models.alone["llama"]) as alone:
        cache = fd.prefill(model, PROMPT)
        tokens = draw(model, models.rank, **SAMPLING, **{CACHE: cache})
        stores = {(store.query_heads, store.kv_heads) for _, store in ModelLayout.of(model)}
        return tokens, draw(alone, 0, **SAMPLING), reason(model).partition(":")[0], sorted(stores)


@scenario
def pipeline(models: Models) -> Any:
    folder = models.alone["llama"].config.name_or_path
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(pp_size=2)).eval()
    with fd.enabled(model):
        return draw(model, 0, PROMPTS, **GREEDY), draw(models.alone["llama"], 0, PROMPTS, **GREEDY), reason(model)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, Seen]]:
    sizes = {"vocab_size": 98, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "max_position_embeddings": 512}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    folders: dict[str, Path] = {}
    types = {"llama": "llama", "gpt_neox": "gpt_neox", "olmo2": "olmo2", "trained": "llama", "small": "llama"}
    for name, model_type in types.items():
        torch.manual_seed(0)
        own = {} if name == "gpt_neox" else {"num_key_value_heads": 4}
        if name == "small":  # interpreted kernels take time by layer and head
            own = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = AutoConfig.for_model(model_type, **sizes | own)
        folders[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
    return run_on_two("test_tensor_parallel", folders, tmp_path_factory.mktemp("seen"))


def values(seen: dict[str, tuple[Seen, Seen]], name: str) -> tuple[Any, Any]:
    assert [one.error for one in seen[name]] == ["", ""]
    return seen[name][0].value, seen[name][1].value


def same_value(seen: dict[str, tuple[Seen, Seen]], name: str) -> Any:
    first, second = values(seen, name)
    assert first == second
    return first


def test_rank_0_draws_for_all(seen):
    tokens, alone, path, compactions = same_value(seen, "other_seeds")
    assert tokens == alone
    assert (path, compactions > 1) == ("shared", True)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("other_lengths", "max_new_tokens is 8 on rank 0 and 9 on rank 1"),
        ("other_prompts", "inputs is int64 [4, 87] with content"),
        ("other_options", "enable(..., min_shared_tokens=) is 32 on rank 0 and 33 on rank 1"),
        ("other_end_tokens", "eos_token_id is [5, 6] on rank 0 and [5, 7] on rank 1"),
        ("other_cache", "is SharedContextCache(Forest("),
        ("other_prefill", "the prompts' tokens is int64 [80] with content"),
    ],
)
def test_the_field_that_differs_is_named_on_all_ranks(seen, name, field):
    first, second = seen[name]
    assert first == second
    assert first.error.startswith("ValueError: ")
    assert field in first.error
    assert first.error.endswith("give all of them the same call")


def test_what_one_rank_refuses_all_run_stock(seen):
    first, second = values(seen, "one_rank_refuses")
    assert first[0] == second[0] == 4
    assert second[1].startswith("stock: the model is in training mode with ")
    assert first[1] == second[1].replace("stock: ", "stock: on rank 1, ")


def test_an_error_of_one_rank_ends_the_call_on_all(seen):
    first, second = seen["one_rank_raises"]
    assert second.error == "KeyError: 'no prompt'"
    assert first.error == (
        "PeerFailedError: rank 1, with which this process computes the model, failed: KeyError: 'no prompt'"
    )
    assert seen["one_rank_refuses_and_one_raises"] == (first, second)
    tokens, alone, path = same_value(seen, "after_errors")
    assert tokens == alone
    assert path.startswith("shared: ")


def test_time_limits_and_criteria_are_those_of_rank_0(seen):
    assert same_value(seen, "time_limits") == [1, 8]
    assert same_value(seen, "criteria_of_rank_0") == 3


def test_one_rank_may_stream(seen):
    first, second = values(seen, "streams_on_rank_0")
    assert first[0] == second[0] == 8
    assert first[1] == [87, *[1] * 8, 0]
    assert first[2] == second[2] != ""
    assert first[2].startswith("shared")


def test_all_ranks_split_into_waves_where_one_lacks_memory(seen):
    tokens, alone, waves = same_value(seen, "waves")
    assert tokens == alone
    assert waves == 2


def test_all_ranks_split_into_waves_where_one_cannot_compact(seen):
    pytest.importorskip("triton")
    assert same_value(seen, "compacting_without_memory") == [[True, "eager", 2], [True, "graph", 2]]


def test_ranks_capture_again_together(seen):
    assert same_value(seen, "forgotten_failures") == [True, False]


def test_ranks_hold_their_captures_together(seen):
    pytest.importorskip("triton")
    first, second = values(seen, "captures_in_use_on_one_rank")
    assert first == [4, "eager", "another process of the model cannot use its captured steps now", True]
    assert second == [4, "eager", "another thread is using this model's captured steps", False]


def test_ranks_capture_together_or_not_at_all(seen):
    pytest.importorskip("triton")
    right, mode, compactions, captures, captures_again = same_value(seen, "captured_steps")
    assert right
    assert (mode, captures, captures_again) == ("graph", compactions + 1, 0)
    assert compactions >= 1
    assert same_value(seen, "captured_on_one_rank") == [True, "graph", 2]
    assert same_value(seen, "captured_on_no_rank")[1] == "eager"
    assert same_value(seen, "captured_without_memory") == [True, "graph", 2, True]
    for one in seen["failing_pass_of_a_capture"]:
        assert one.error.startswith("PassFailedError: a forward pass failed before its capture")
        assert "(OutOfMemoryError: no memory)" in one.error


def test_kept_caches_hold_the_heads_of_a_rank(seen):
    found = dict(zip(("llama", "gpt_neox", "olmo2"), same_value(seen, "kept_caches"), strict=True))
    assert {name: (heads, stores) for name, (_, _, _, heads, stores) in found.items()} == {
        "llama": ([2], [[4, 2]]),
        "gpt_neox": ([4], [[4, 4]]),  # one projection of queries, keys and values
        "olmo2": ([4], [[8, 4]]),  # keys are gathered before their norm
    }
    for tokens, alone, path, _, _ in found.values():
        assert tokens == alone
        assert path.startswith("shared: ")


def test_ranks_that_keep_other_prompts_plan_alike(seen):
    same, known, then = same_value(seen, "other_stores_of_prefixes")
    assert same
    assert known is None
    assert then == [87]


def test_ranks_merge_returned_nodes_together(seen):
    same, merged_nodes, nodes = same_value(seen, "merging_without_memory")
    assert same
    assert merged_nodes < nodes


def test_training_of_split_weights_is_noticed(seen):
    changed, right, refused = same_value(seen, "trained")
    assert changed
    assert right
    assert "the cache was made with other weights" in refused


def test_projections_with_a_forward_of_their_own_are_not_fused(seen):
    assert same_value(seen, "projections") == [False, True]


def test_a_merge_is_one_collective_and_the_same_on_all_ranks(seen):
    same, _, collectives = same_value(seen, "merged_partials")
    assert same
    assert collectives == 1


def test_prompts_of_processes_that_compute_alone_may_differ(seen):
    first, second = values(seen, "data_parallel")
    assert (first[0], second[0]) == (87 + 8, 86 + 8)
    assert first[1].startswith("shared: ")
    assert second[1].startswith("shared: ")
    sharded = "stock: its parameters are sharded over processes, which must run the same forward passes"
    assert same_value(seen, "fully_sharded") == [True, sharded]


def test_models_of_several_groups_run_stock(seen):
    reason = "stock: its parameters are split over several groups of processes, of 2 and 2"
    assert same_value(seen, "several_groups") == [True, 4, reason]


def test_attention_may_be_computed_on_every_rank(seen):
    tokens, alone, path, stores = same_value(seen, "attention_on_every_rank")
    assert tokens == alone
    assert (path, stores) == ("shared", [[8, 4]])


def test_pipelines_run_stock(seen):
    tokens, alone, path = same_value(seen, "pipeline")
    assert tokens == alone
    assert path == "stock: its layers are divided between processes (pipeline parallelism)"


@pytest.mark.parametrize("name", ["other_draws_of_beams", "other_draws_of_stock"])
def test_loops_that_draw_on_each_rank_need_one_seed(seen, name):
    first, second = seen[name]
    assert first == second
    assert first.error.startswith("ValueError: the random generators (cpu) of the 2 processes")
    assert "transformers.set_seed(0)" in first.error


def test_other_loops_draw_what_one_process_draws(seen):
    found = same_value(seen, "same_draws")
    assert [path.partition(":")[0] for _, _, path in found] == ["shared", "stock", "shared", "stock"]
    for tokens, alone, _ in found:
        assert tokens == alone
