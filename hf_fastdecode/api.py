"""What a user calls: `enable`, `disable`, `enabled`, `explain`, `prefill`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention.interface import UnsupportedAttentionError
from .cache.fingerprint import Fingerprint
from .cache.shared import SharedContextCache
from .generation.enabled import install, report_on, uninstall
from .generation.model_state import state_of
from .generation.options import Options
from .generation.prompts.prefill import prefill_nodes
from .generation.prompts.prompt_tree import PromptGroup, PromptPlan, group_prompts, plan_prompts
from .generation.prompts.stored_prompts import StoredPrompts
from .generation.report import Report
from .generation.support import input_reason, method_reason, model_reason, rope_limit, switch_reason
from .prompt_ids import padded_ids
from .wrappers import unwrapped

Model = TypeVar("Model", bound=nn.Module)


def enable(
    model: Model,
    *,
    backend: str = "auto",
    mode: str = "auto",
    sampler: str = "auto",
    fuse_projections: str | bool = "auto",
    min_shared_tokens: int = 32,
    min_saved_tokens: int = 64,
    max_prefill_tokens: int = 16384,
    reuse_prefix: bool | int = False,
) -> Model:
    """Make `model.generate` share the context of its samples: prefilled once, stored once, read once per step.

    The model goes on being called as before, and returns what it returned before. Calls that cannot share, e.g. those
    with ``use_cache=False``, run stock and say so once in the log; `explain` tells what the last call did. Only this
    instance changes; `disable` restores it. Calling `enable` again replaces the options.

    Args:
        model: A decoder-only transformers model, on any device. One wrapped by PEFT, `torch.compile`,
            DistributedDataParallel or DataParallel is enabled by what it wraps; so for the other functions here.
        backend: What attends in a decode step: ``auto`` chooses by device, dtype and size; ``triton`` forces this
            package's kernels, ``flash``, ``cudnn``, ``efficient``, ``cpu`` and ``plain`` one of PyTorch's operators. A
            forced one runs or raises. The environment variable ``HF_FASTDECODE_BACKEND`` stands in for ``auto``.
        mode: How decode steps run: ``eager``, captured in a CUDA ``graph``, or captured with the layers ``compile``-d
            (the first call then takes some seconds longer). ``auto`` runs eagerly on the CPU, and on a GPU captures
            once a model's calls have asked for enough steps to pay for it. A forced one runs or raises.
        sampler: Who draws tokens: ``hf`` is transformers' own code, draw for draw. ``fast`` is this package's kernel,
            which draws from the same distribution with other random numbers, and needs a GPU. ``auto`` takes it for
            half-precision models on a GPU, unless the call asks for what only transformers' code does.
        fuse_projections: Whether captured steps compute query, key and value projections concurrently, and gate and up
            projections, as parallel branches of the graph: ``auto`` does where that gains, ``True`` captures steps for
            it or raises, ``False`` computes them one by one. No weight is moved or copied, whichever.
        min_shared_tokens: Shortest run of tokens that neighbouring prompts share, at any depth, to be stored once.
        min_saved_tokens: A call in which sharing saves fewer stored tokens than this runs stock, which is faster then,
            unless its steps are captured.
        max_prefill_tokens: Most tokens in one prefill forward pass; longer contexts are prefilled in parts.
        reuse_prefix: Keep the prompts' keys and values of the last calls, so that a later call prefills only what is
            new in its prompts: for prompts that come one at a time and begin alike. ``True`` keeps up to 2 GiB, a
            number so many bytes, of at most 64 calls. They are dropped when weights or active adapters change. Prompts
            of at least `min_saved_tokens` then run shared although nothing is saved yet.

    Returns:
        The same model.

    Raises:
        ValueError: An option is out of its bounds.
        TypeError: `model` is not a transformers model that generates, and wraps none.
    """
    options = Options(
        backend,
        mode,
        sampler,
        fuse_projections,
        min_shared_tokens,
        min_saved_tokens,
        max_prefill_tokens,
        reuse_prefix,
    )
    install(unwrapped(model), options)
    return model


def disable(model: Model) -> Model:
    """Undo `enable`: every attribute it touched is the original object again. Does nothing on a stock model.

    `generate` calls under way, in this thread or another, go on as they began: for them it takes effect when the last
    of them ends, and calls that begin meanwhile run stock. A method of the instance that others have put in the place
    of ours since stays; where it calls ours, that passes the call on.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a transformers model.
    """
    uninstall(unwrapped(model))
    return model


@contextmanager
def enabled(model: Model, **options: Any) -> Iterator[Model]:
    """`enable` for a block: on leaving it, by an error too, the model is as it was, enabled or not.

    Args:
        model: As for `enable`.
        options: As for `enable`.
    """
    inner = unwrapped(model)
    before = state_of(inner)
    previous = before.options if before is not None else None
    enable(model, **options)
    try:
        yield model
    finally:
        if previous is None:
            disable(model)
        else:
            install(inner, previous)


def explain(model: nn.Module) -> Report:
    """Tell, for each layer and for the last `generate` call, which path ran and why; `print` it to read it.

    Raises:
        TypeError: `model` is not a transformers model.
    """
    return report_on(unwrapped(model))


def prefill(
    model: nn.Module, inputs: Tensor | Sequence[Tensor | Sequence[int]] | Mapping[str, Any]
) -> SharedContextCache:
    """Compute the keys and values of prompts once, to be used by many `generate` calls.

    Pass the result as ``past_key_values`` together with prompts that begin with these tokens (or are these tokens):
    only what lies behind them is prefilled. Each prompt of a call is matched with the row that it has the longest
    common prefix with, so a prompt that was not prefilled still finds what it has in common with those that were. The
    log warns when that is little.

    The cache is not consumed; each call works on a fork of it. It holds what this model's weights and active adapters
    made of the tokens: after they have changed, as in training, prefill again. `generate` raises where PyTorch's
    version counters or addresses tell (writing to ``parameter.data`` in place goes around them); a forward pass of
    your own does not look.

    Args:
        model: An enabled model.
        inputs: A list of prompts of any lengths, each a tensor ``[length]`` or a list of ids; or ``input_ids``
            ``[prompts, length]``; or what a tokenizer returns, padded or not: a mapping with either as ``input_ids``
            and, for padded prompts, ``attention_mask``.

    Returns:
        A cache with one row for each prompt, in the order given. A common prefix of at least `min_shared_tokens` (see
        `enable`) is computed and stored once, whichever prompts have it.

    Raises:
        ValueError: The model is not enabled or cannot share context (in training mode with dropout, for one, or with
            forward hooks of your own), or the inputs are not prompts, or hold ids that the model does not know, or are
            too long for a position embedding that changes with the length of the text.
    """
    inner = unwrapped(model)
    model_state = state_of(inner)
    if model_state is None:
        raise ValueError(f"prefill needs an enabled {type(inner).__name__}; call hf_fastdecode.enable(model) first")
    if reason := model_reason(inner) or method_reason(inner) or switch_reason(inner):
        raise ValueError(f"{type(inner).__name__} cannot share context: {reason}")
    input_ids, mask = padded_ids(inputs)
    if reason := input_reason(inner, input_ids, mask, longest=input_ids.shape[1]):  # a later call looks again
        raise ValueError(f"these prompts cannot be prefilled: {reason}")
    limit = rope_limit(inner.config.get_text_config(decoder=True))
    longest = input_ids.shape[1] if mask is None else int(mask.sum(1).max())
    if limit is not None and longest >= limit:
        raise ValueError(
            f"a prompt of {longest} tokens cannot be kept: the position embedding of {type(inner).__name__} changes "
            f"beyond {limit} tokens, so that no call could go on from it; prefill at most {limit - 1} tokens, or call "
            "generate without a kept cache"
        )
    groups = group_prompts(input_ids, mask)
    _check_vocabulary(inner, groups)
    cache = SharedContextCache(backend=model_state.options.backend)
    plan, rows = _plan(groups, cache, model_state.options.min_shared_tokens)
    try:
        with torch.no_grad():
            prefill_nodes(
                inner, cache, plan, max_tokens=model_state.options.max_prefill_tokens, length=input_ids.shape[1]
            )
    except UnsupportedAttentionError as error:
        raise ValueError(f"{type(inner).__name__} cannot share context: {error}") from error
    if rows is not None:
        cache.select_rows(rows)
    cache.fingerprint, cache.protected_segments = Fingerprint(inner), len(cache.segment_tokens)
    return cache


def _plan(
    groups: list[PromptGroup], cache: SharedContextCache, min_shared_tokens: int
) -> tuple[PromptPlan, list[int] | None]:
    """Plan the prompts in the given order, or sorted where that stores fewer tokens.

    Only neighbours share, and sorting makes prompts with a common prefix neighbours. The given order is preferred
    because evenly spaced spans of consecutive rows are read in one call.

    Returns:
        The plan, and for each prompt its row in the plan; None where the plan keeps the given order.
    """
    stored = StoredPrompts(cache)
    plan = plan_prompts(groups, stored, min_shared_tokens=min_shared_tokens)
    texts = [group.tokens.numpy().tobytes() for group in groups]
    order = sorted(range(len(groups)), key=texts.__getitem__)
    alike = [list(indices) for _, indices in groupby(order, key=texts.__getitem__)]
    merged = [PromptGroup(groups[same[0]].tokens, sum(groups[index].count for index in same)) for same in alike]
    sorted_plan = plan_prompts(merged, stored, min_shared_tokens=min_shared_tokens)
    if len(sorted_plan.new_tokens) >= len(plan.new_tokens):
        return plan, None
    starts = [0, *accumulate(group.count for group in groups)]
    prompts = [row for index in order for row in range(starts[index], starts[index + 1])]
    return sorted_plan, sorted(range(len(prompts)), key=prompts.__getitem__)


def _check_vocabulary(model: PreTrainedModel, groups: list[PromptGroup]) -> None:
    """Refuse ids that have no embedding: on a GPU the lookup fails in a device assert, which CUDA does not survive."""
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if size is None:
        return
    row = 0
    for group in groups:
        for found in (int(group.tokens.min()), int(group.tokens.max())):
            if not 0 <= found < size:
                raise ValueError(
                    f"prompt {row} holds the id {found}; {type(model).__name__} has embeddings for 0 to {size - 1}: "
                    "use its own tokenizer"
                )
        row += group.count
