"""``python -m tests.clients.forward_peers``: `python -m benchmarks forward` with three more ways, by other programs.

- ``flex``: each prompt and its completions as one packed row, by PyTorch's FlexAttention.
- ``trl-trie``: packing and attention of TRL's asynchronous GRPO trainer, which gathers the keys of each path; with
  PyTorch's FlashAttention 2 in place of FlashAttention 3, which TRL loads from the Hub.
- ``prefix-grouper``: PrefixGrouper, which verl calls, with PyTorch's attention; no row is padded here.

Rows are packed before the time is taken, by what the case says they share; ours finds that out within a pass.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from benchmarks.__main__ import main
from benchmarks.forward.cases import FORWARD_WAYS
from benchmarks.forward.measure import PEERS, Hidden, Rows
from hf_fastdecode.measurement.rows import NotAvailableError


def flex(model: PreTrainedModel, rows: Rows) -> Hidden:
    _refuse(model, rows)
    device, (count, width) = rows.ids.device, rows.completions.shape
    samples, positions = count // rows.prompts, _positions(rows)
    ids = torch.cat([_prefixes(rows), rows.completions.reshape(rows.prompts, -1)], 1).view(1, -1)
    at, packed = torch.arange(ids.shape[1], device=device), positions.shape[1]
    group, owner = at // packed, ((at % packed - rows.context) // width).clamp(min=-1)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (owner[key] == -1) | (owner[key] == owner[query])
        return (key <= query) & (group[key] == group[query]) & own

    mask = create_block_mask(attends, None, None, len(at), len(at), device=device, _compile=True)
    row = torch.arange(count, device=device)
    last = row // samples * packed + rows.context - 1  # of each row's prompt
    own = last + 1 + row % samples * width
    index = torch.cat([last[:, None], own[:, None] + torch.arange(width - 1, device=device)], 1)
    model.set_attn_implementation("flex_attention")
    return lambda: _states(model, ids, positions.reshape(1, -1), attention_mask=mask)[0, index]


def trl_trie(model: PreTrainedModel, rows: Rows) -> Hidden:
    _refuse(model, rows)
    packing = imported("trl.experimental.async_grpo.packing")
    trie, trained = packing.TreeRow(), torch.arange(rows.ids.shape[1]) >= rows.context
    unused = {"old_log_probs": torch.zeros(len(trained)), "advantage": 0.0}
    for number, ids in enumerate(rows.ids.cpu()):
        group = number * rows.prompts // len(rows.ids)
        trie.add({"input_ids": ids, "completion_mask": trained, "group_id": group, **unused})
    packed = {name: value.to(rows.ids.device) for name, value in trie.pack().items()}
    longest = dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), packed.pop("tree_max_seqlens").tolist()))
    tables = longest | {name: value for name, value in packed.items() if name.startswith("tree_")}
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_flash_attention_2)
    packing.register_tree_attention()
    model.set_attn_implementation(packing.TREE_ATTENTION)
    ids, positions = packed["input_ids"][None], packed["position_ids"][None]
    index = packed["token_index"].view(rows.completions.shape)
    return lambda: _states(model, ids, positions, **tables)[0, index]


def _flash_attention_2(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, *longest: int, **given: Any
) -> Tensor:
    options = {"scale": given["softmax_scale"]}
    operator = torch.ops.aten._flash_attention_forward
    out: Tensor = operator(query, key, value, starts_q, starts_k, *longest, 0.0, given["causal"], False, **options)[0]
    return out


def prefix_grouper(model: PreTrainedModel, rows: Rows) -> Hidden:
    _refuse(model, rows, on_cpu=True)
    count, width = rows.completions.shape
    lengths = [[rows.context] + [width] * (count // rows.prompts)] * rows.prompts
    grouper: Any = imported("prefix_grouper").PrefixGrouper(lengths, device=rows.ids.device)
    prefixes, positions = _prefixes(rows), _positions(rows)
    masks = torch.ones_like(prefixes), torch.ones_like(rows.completions)
    ids = grouper.concat_input(prefixes, masks[0], rows.completions, masks[1])

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        def causal(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            bias = causal_lower_right(query.shape[2], key.shape[2])
            grouped = query.shape[1] != key.shape[1]
            out = scaled_dot_product_attention(query, key, value, bias, scale=scaling, enable_gqa=grouped)
            return out.transpose(1, 2)

        return grouper.forward(causal, query, key, value), None

    AttentionInterface.register("prefix_grouper", attention)
    model.set_attn_implementation("prefix_grouper")

    def hidden() -> Tensor:
        suffixes: Tensor = grouper.split_output(_states(model, ids, positions), include_prefix_last=1)[2]
        return suffixes[:, :-1]

    return hidden


def _prefixes(rows: Rows) -> Tensor:
    """``[prompts, context]``"""
    return rows.ids[:: len(rows.ids) // rows.prompts, : rows.context]


def _positions(rows: Rows) -> Tensor:
    """Of each prompt and its completions in one packed row, ``[prompts, packed]``."""
    at = torch.arange(rows.ids.shape[1], device=rows.ids.device)
    own = at[rows.context :].repeat(len(rows.ids) // rows.prompts)
    return torch.cat([at[: rows.context], own]).expand(rows.prompts, -1)


def _states(model: PreTrainedModel, ids: Tensor, positions: Tensor, **more: Any) -> Tensor:
    out = model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False, **more)
    states: Tensor = out.last_hidden_state
    return states


def imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise NotAvailableError(f"{name} cannot be imported: {error}") from error


def _refuse(model: PreTrainedModel, rows: Rows, *, on_cpu: bool = False) -> None:
    """Raise where a way cannot run: on CPUs but for `on_cpu`, and over layers with windows and sinks."""
    if rows.ids.device.type != "cuda" and not on_cpu:
        raise NotAvailableError(f"its attention is for CUDA devices, got {rows.ids.device.type}")
    if getattr(model.config, "sliding_window", None) is not None:
        raise NotAvailableError("it leaves out windows and sinks")


if __name__ == "__main__":
    PEERS |= {"flex": flex, "trl-trie": trl_trie, "prefix-grouper": prefix_grouper}
    FORWARD_WAYS |= dict.fromkeys(PEERS, "see tests/clients/forward_peers.py")
    main()
