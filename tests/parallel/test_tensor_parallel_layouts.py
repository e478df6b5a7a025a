"""What each of two processes stores of a model and its caches, by how the model was loaded."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.layout import ModelLayout
from hf_fastdecode.cache.storage import TokenStorage
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation import structure, support
from hf_fastdecode.generation.steps.graph_capture import has_projections
from hf_fastdecode.parallel.ranks import splitting_groups
from hf_fastdecode.parallel.sequence import merge_over, merged, partial_buffer

from .processes import Models, scenario
from .scenarios import GREEDY, PROMPT, PROMPTS, SAMPLING, draw, raising, reason, same_value, sees, sights, values

KEPT = {
    "llama": ([2], [[4, 2]]),
    "gpt_neox": ([4], [[4, 4]]),  # one projection of queries, keys and values
    "olmo2": ([4], [[8, 4]]),  # keys are gathered before their norm
}
"""By model, the KV heads that a rank stores, and its query and KV heads."""


@sees({name: [True, "shared", *heads] for name, heads in KEPT.items()})
def kept_caches(models: Models) -> Any:
    found = {}
    for name in KEPT:
        text = torch.cat([PROMPT, PROMPT[:, :5]], 1).repeat(4, 1)
        with fd.enabled(models.split[name]) as model:
            cache = fd.prefill(model, PROMPT)
            same = draw(model, 0, text, **GREEDY, **{CACHE: cache}) == draw(models.alone[name], 0, text, **GREEDY)
            heads = {layer.storage.node_example[0].shape[0] for layer in cache.attention_layers}
            stores = {(store.query_heads, store.kv_heads) for _, store in ModelLayout.of(model)}
            found[name] = same, reason(model)[:6], sorted(heads), sorted(stores)
    return found


@sees([True, True])
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
    return found[0][0] == found[1][0], found[0][1] < found[1][1]


@sees([True, True, True])
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
    noticed = "the cache was made with other weights" in refused
    return before != after, after == draw(model, 0, PROMPTS, **GREEDY), noticed


@sees([False, True])
def projections(models: Models) -> Any:
    """Those with a forward of their own, which communicates, are not fused."""
    return has_projections(models.split["llama"]), has_projections(models.alone["llama"])


@scenario
def merged_partials(models: Models) -> Any:
    """Whether a merge is right, its bits on each rank, and the number of collectives."""
    shape = (5, 4, 16)
    buffers = [partial_buffer(shape) for _ in range(2)]
    for rank, buffer in enumerate(buffers):
        buffer.flat.copy_(torch.randn(len(buffer.flat), generator=torch.Generator().manual_seed(rank)))
    with CommDebugMode() as communicated:
        found = merge_over(torch.distributed.group.WORLD, buffers[models.rank])
    expected = merged(torch.stack([buffer.flat for buffer in buffers]), shape)
    right = all(torch.allclose(*parts, rtol=0, atol=1e-6) for parts in zip(found, expected, strict=True))
    return right, found.out.numpy().tobytes().hex(), communicated.get_total_counts()


@scenario
def data_parallel(models: Models) -> Any:
    """Processes with a model each, and prompts of their own."""
    ids = PROMPTS[:, models.rank :].contiguous()
    with fd.enabled(models.alone["llama"], min_shared_tokens=32 + models.rank) as model:
        return len(draw(model, models.rank, ids, **GREEDY)[0]), reason(model)


@sees([True, 4, "stock: its parameters are split over several groups of processes, of 2 and 2"])
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
        splitting_groups(models.split["llama"].parameters())
    error = Unsupported("its parameters are split over several groups of processes, of 2 and 2")
    with (
        mock.patch.object(structure, "splitting_groups", side_effect=error),
        mock.patch.object(support, "splitting_groups", side_effect=error),
        fd.enabled(models.split["llama"]) as model,
    ):
        return str(raised.value) == str(error), len(draw(model, 0, PROMPTS, **GREEDY)), reason(model)


@sees([True, "shared", [[8, 4]]])
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
        return tokens == draw(alone, 0, **SAMPLING), reason(model).partition(":")[0], sorted(stores)


@sees([True, "stock: its layers are divided between processes (pipeline parallelism)"])
def pipeline(models: Models) -> Any:
    folder = models.alone["llama"].config.name_or_path
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(pp_size=2)).eval()
    with fd.enabled(model):
        same = draw(model, 0, PROMPTS, **GREEDY) == draw(models.alone["llama"], 0, PROMPTS, **GREEDY)
        return same, reason(model)


def test_a_merge_is_one_collective_and_the_same_on_all_ranks(seen):
    right, _, collectives = same_value(seen, "merged_partials")
    assert right
    assert collectives == 1


def test_prompts_of_processes_that_compute_alone_may_differ(seen):
    first, second = values(seen, "data_parallel")
    assert (first[0], second[0]) == (87 + 8, 86 + 8)
    assert first[1].startswith("shared: ")
    assert second[1].startswith("shared: ")


test_what_processes_see = sights(__name__)
