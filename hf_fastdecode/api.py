"""Public functions: `enable`, `disable`, `enabled`, `explain`, `prefill`."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from . import _compat
from .cache.layout.model import ModelLayout
from .cache.shared import SharedContextCache
from .errors import Unsupported, reason_of
from .generation.forward_pass import places_tokens
from .generation.identity import Fingerprint
from .generation.inputs.given import PLAIN
from .generation.instance_patch import STATE_ATTRIBUTE
from .generation.model_state import STATE_LOCK, ModelState, state_of
from .generation.options import Options
from .generation.overrides.methods import METHODS
from .generation.prompts.by_rows import Rows, prefill_rows
from .generation.prompts.packed import prefill_nodes
from .generation.prompts.prompt_ids import padded_ids
from .generation.prompts.prompt_plan import PromptGroup, PromptPlan, StoredPrompts, compare_prompts, group_prompts
from .generation.report import Report
from .generation.same_calls import require_same_prefill
from .generation.structure import Structure
from .generation.support.model import check_model, check_sequence_parallel, check_state, check_states, rope_limit
from .generation.support.prompts import check_prompts
from .generation.wrappers import unwrapped
from .patches.own_attention import register_own_attention

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("hf_fastdecode")

Model = TypeVar("Model", bound=nn.Module)

register_own_attention()


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
    max_rows: int | None = None,
    reuse_prefix: bool | int = False,
    sequence_parallel: bool | str | ProcessGroup | DeviceMesh = False,
    peer_timeout: float = 60,
) -> Model:
    """Make `model.generate` prefill, store and read the context that its samples share once.

    Calls and return values stay the same. Calls that cannot share context, e.g. with ``use_cache=False``, run stock
    transformers and log the reason once; `explain` reports what the last call did. Only this instance changes;
    `disable` restores it. Calling `enable` again replaces the options. Keep the model in a variable: the method
    ``model.generate`` alone does not keep it alive, as it does in stock.

    Args:
        model: A decoder-only transformers model, on any device. One wrapped by PEFT, `torch.compile`,
            DistributedDataParallel or DataParallel is unwrapped first, here and in the other functions.
        backend: Attention operators of decode steps: ``auto`` chooses by device, dtype and size; ``triton`` forces
            this package's kernels; ``flash``, ``cudnn``, ``efficient``, ``cpu`` and ``plain`` force one of PyTorch's
            operators. A forced backend runs or raises. The environment variable ``HF_FASTDECODE_BACKEND`` replaces
            ``auto``.
        mode: How decode steps run: ``eager``, captured in a CUDA ``graph``, or captured with the layers ``compile``-d
            (the first call then takes some seconds longer). ``auto`` runs eagerly on the CPU; on a GPU it captures
            once the model's calls have requested enough steps to amortize the capture, and compiles only models whose
            norms, rotary embedding or activations do not run as kernels. A forced mode runs or raises.
            Where steps are captured, so is the prefill of short prompts, once that pays.
        sampler: Sampling code: ``hf`` is transformers' own, draw for draw. ``fast`` is this package's kernel, which
            samples the same distribution with other random numbers and needs a GPU. ``auto`` uses it for
            half-precision models on a GPU, unless the call needs features that only transformers' code has.
        fuse_projections: Whether captured steps compute query, key and value projections, and gate and up
            projections, together: on Hopper GPUs by one kernel for up to 32 rows, as it does each other product, and
            otherwise as parallel branches of the graph, compiled or not. ``auto`` does for few rows; ``True`` captures
            steps from the first call on and does for any number of rows, or raises; ``False`` leaves products to
            PyTorch, one by one. Weights are never moved or copied.
        min_shared_tokens: Shortest run of tokens shared by neighbouring prompts, at any depth, that gets a node.
        min_saved_tokens: Calls in which sharing saves fewer stored tokens run stock, which is then faster, unless
            their steps are captured.
        max_prefill_tokens: Maximum tokens per prefill forward pass; longer contexts are prefilled in chunks.
        max_rows: Most rows of a call, samples of all its prompts, that decode at once; the others wait. Calls that
            return their cache, stream, or run processors or criteria of your own decode all at once, and raise if they
            have more. None: as many as fit in memory.
        reuse_prefix: Keep the prompts' keys and values of recent calls, so that later calls prefill only new tokens:
            for prompts with a common prefix that arrive one at a time. ``True`` keeps up to 2 GiB, an integer that
            many bytes, of at most 64 calls. They are dropped when weights or active adapters change. Prompts of at
            least `min_saved_tokens` then run shared although nothing is saved yet.
        sequence_parallel: Divide the context of each call between processes (Tree Attention, Shyam et al. 2024,
            section 5): each has the whole model and makes the same calls, stores its part of nodes and suffixes, and
            attends to it; a collective per layer merges what they found. ``"auto"`` divides between those of the
            default group (``torchrun``); a process group or a device mesh of one dimension between its own. Calls are
            then shared even where that saves nothing. See docs/multi-gpu.md.
        peer_timeout: Seconds without a sign of life of another process of a model that several compute together, until
            calls end with `hf_fastdecode.errors.PeerFailedError`; at least 3. A process that is slow gives signs of
            life.

    Returns:
        The same model.

    Raises:
        ValueError: An option has an invalid value.
        TypeError: `model` neither is nor wraps a transformers model that generates.
    """
    options = Options(
        backend,
        mode,
        sampler,
        fuse_projections,
        min_shared_tokens,
        min_saved_tokens,
        max_prefill_tokens,
        max_rows,
        reuse_prefix,
        sequence_parallel,
        peer_timeout,
    )
    _install(unwrapped(model), options)
    return model


def _install(model: PreTrainedModel, options: Options) -> None:
    """Override methods of the model instance, or replace the options of an enabled model."""
    if (newer := _compat.untested_transformers()) is not None:
        _warn_of(newer)
    with STATE_LOCK:
        model_state: ModelState | None = vars(model).get(STATE_ATTRIBUTE)
        if model_state is None:
            model_state = ModelState(model, options, METHODS)
            model_state.methods.install(model, model_state)
        else:
            model_state.options, model_state.disable_pending = options, False
            model_state.captures.retry()
            if not options.reuse_prefix:
                model_state.prefix_store.clear()


@functools.cache  # once per process
def _warn_of(newer: str) -> None:
    logger.warning(
        "transformers %s is newer than %d.%d, the newest release that this version of hf_fastdecode was tested with: "
        "calls that fail with it before their first token run stock transformers; look for a newer hf_fastdecode",
        newer,
        *_compat.NEWEST_TESTED,
    )


def disable(model: Model) -> Model:
    """Undo `enable`: every attribute it touched is the original object again. Does nothing on a stock model.

    `generate` calls in progress in any thread finish unchanged; the attributes are restored when the last one ends,
    and calls that start meanwhile run stock. A method that other code has since overridden on the instance stays; if
    it calls this package's override, that forwards to the original.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a transformers model.
    """
    inner = unwrapped(model)
    with STATE_LOCK:
        model_state = state_of(inner)
        if model_state is not None and model_state.is_generating():
            model_state.disable_pending = True
        elif model_state is not None:
            model_state.uninstall(inner)
    return model


@contextmanager
def enabled(model: Model, **options: Any) -> Iterator[Model]:
    """Context manager for `enable`; on exit, also by an error, restores the model's previous state.

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
            _install(inner, previous)


def explain(model: nn.Module) -> Report:
    """Report for each layer and for the last `generate` call which path ran and why; `print` it.

    Raises:
        TypeError: `model` is not a transformers model.
    """
    inner = unwrapped(model)
    model_state, layout = state_of(inner), ModelLayout.of(inner)
    return Report(
        model=type(inner).__name__,
        enabled=model_state is not None,
        layer_count=len(layout.layers) or None,
        model_reason=reason_of(check_model, inner, layout),
        last_call=model_state.last_call if model_state else None,
    )


def prefill(
    model: nn.Module, inputs: Tensor | Sequence[Tensor | Sequence[int]] | Mapping[str, Any]
) -> SharedContextCache:
    """Compute the keys and values of prompts once, for use in many `generate` calls.

    Pass the result as ``cache`` (before transformers 5.24: ``past_key_values``) together with full prompts that begin
    with these tokens; only the remaining tokens are prefilled. Each prompt of a call is matched to the row with the
    longest common prefix, so prompts that were not prefilled reuse their common prefix too. A short match logs a
    warning.

    The cache is not consumed; each call works on a fork. It is valid for the weights and active adapters that computed
    it: after they change, as in training, prefill again. `generate` raises when PyTorch's version counters or
    addresses show a change (in-place writes to ``parameter.data`` bypass them); direct forward passes do not check.

    Args:
        model: An enabled model.
        inputs: A list of prompts of any lengths, each a tensor ``[length]`` or a list of ids; or ``input_ids``
            ``[prompts, length]``; or what a tokenizer returns, padded or not: a mapping with either as ``input_ids``
            and, for padded prompts, ``attention_mask``; or what a processor returns for prompts with images, video or
            audio, as tensors.

    Returns:
        A cache with one row per prompt, in the given order. Any common prefix of at least `min_shared_tokens` (see
        `enable`) is computed and stored once; where layers have a state per row, if neighbours have it in common.

    Raises:
        ValueError: The model is not enabled or cannot share context (e.g. training mode with dropout, or custom
            forward hooks); or the inputs are not prompts, contain out-of-vocabulary ids, or are too long for a
            position embedding that depends on the text length.
    """
    inner = unwrapped(model)
    model_state = state_of(inner)
    if model_state is None:
        raise ValueError(f"prefill needs an enabled {type(inner).__name__}; call hf_fastdecode.enable(model) first")
    structure = model_state.structure_of(inner)
    with structure.ranks.watch.call("prefill", model_state.options.peer_timeout):
        if isinstance(inputs, Mapping) and _has_images(inner, inputs):
            return _prefill_with_images(inner, model_state, inputs)
        return _prefill(inner, structure, model_state.options, inputs)


def _has_images(inner: PreTrainedModel, inputs: Mapping[str, Any]) -> bool:
    """Whether the model takes pixels, or features of sounds, among these arguments, beside ids."""
    takes = inspect.signature(type(inner).forward).parameters
    found = {name: value for name, value in inputs.items() if name in takes and name not in PLAIN}
    return "input_ids" in inputs and any(isinstance(one, Tensor) and one.is_floating_point() for one in found.values())


def _prefill_with_images(
    inner: PreTrainedModel, model_state: ModelState, inputs: Mapping[str, Any]
) -> SharedContextCache:
    """Prefill by a call of `generate` for one token, which prepares positions, and returns its cache."""
    config = GenerationConfig(max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    cache, last_call = SharedContextCache(backend=model_state.options.backend), model_state.last_call
    try:
        kept = inner.generate(**inputs, **{_compat.CACHE: cache}, generation_config=config)[_compat.CACHE]
    finally:
        model_state.last_call = last_call
    kept.state.max_suffix = None
    kept.fingerprint, kept.protected_segments = Fingerprint(inner), len(kept.segment_tokens)
    return kept


def _prefill(
    inner: PreTrainedModel,
    structure: Structure,
    options: Options,
    inputs: Tensor | Sequence[Tensor | Sequence[int]] | Mapping[str, Any],
) -> SharedContextCache:
    with structure.ranks.together():
        with _or_value_error(f"{type(inner).__name__} cannot share context"):
            check_model(inner, structure.layout)
            if structure.layout.cross:
                raise Unsupported("its decoder's prompts need an encoder's output, which generate computes too")
            check_states(structure)
            check_state(structure.walk)
        input_ids, mask = padded_ids(inputs)
        with _or_value_error(f"{type(inner).__name__} cannot divide these contexts between processes"):
            check_sequence_parallel(inner, structure, longest=input_ids.shape[1])
        with _or_value_error("these prompts cannot be prefilled"):  # generate checks them again, with its own length
            check_prompts(inner, structure, input_ids, mask, longest=input_ids.shape[1])
        _check_rope(inner, input_ids.shape[1] if mask is None else int(mask.sum(1).max()))
        groups = group_prompts(input_ids, mask)
        _check_vocabulary(inner, groups)
        cache = SharedContextCache(backend=options.backend)
        cache.state.parallel, cache.gaps = structure.parallel, any(group.gaps for group in groups)
        if by_rows := bool(structure.layout.states):
            prompts = compare_prompts(groups, StoredPrompts(cache), min_shared_tokens=options.min_shared_tokens)
            prompts = prompts.from_ends(cache, continues=structure.layout.continues_states, alike=True)
            plan, rows = prompts.plan(), None
        elif by_rows := places_tokens(inner):  # no two of them share
            least = max(len(group.tokens) for group in groups) + 1
            plan, rows = compare_prompts(groups, StoredPrompts(cache), min_shared_tokens=least).plan(), None
        else:
            plan, rows = _plan(groups, cache, options.min_shared_tokens)
    require_same_prefill(inner, structure.ranks, plan.new_tokens, len(plan.forest.paths), options.max_prefill_tokens)
    with _or_value_error(f"{type(inner).__name__} cannot share context"):
        if by_rows:
            distinct = Rows.of(input_ids, mask).distinct(groups)
            prefill_rows(inner, cache, plan, distinct, structure.layout, max_tokens=options.max_prefill_tokens)
        else:
            prefill_nodes(inner, cache, plan, max_tokens=options.max_prefill_tokens, length=input_ids.shape[1])
    if rows is not None:
        cache.select_rows(rows)
    cache.fingerprint, cache.protected_segments = Fingerprint(inner), len(cache.segment_tokens)
    return cache


@contextmanager
def _or_value_error(what: str) -> Iterator[None]:
    try:
        yield
    except Unsupported as error:
        raise ValueError(f"{what}: {error}") from error


def _plan(
    groups: list[PromptGroup], cache: SharedContextCache, min_shared_tokens: int
) -> tuple[PromptPlan, list[int] | None]:
    """Plan the prompts in the given order, or sorted if that stores fewer tokens.

    Only neighbouring prompts share, and sorting makes prompts with a common prefix neighbours. The given order is
    preferred because evenly spaced spans of consecutive rows are read in one operator call.

    Returns:
        The plan, and the row of each prompt in it; None if the plan keeps the given order.
    """
    stored = StoredPrompts(cache)
    given = compare_prompts(groups, stored, min_shared_tokens=min_shared_tokens)
    texts = [group.tokens.numpy().tobytes() for group in groups]
    order = sorted(range(len(groups)), key=texts.__getitem__)
    alike = [list(indices) for _, indices in groupby(order, key=texts.__getitem__)]
    merged = [PromptGroup(groups[same[0]].tokens, sum(groups[index].count for index in same)) for same in alike]
    in_order = compare_prompts(merged, stored, min_shared_tokens=min_shared_tokens)
    if in_order.new_length >= given.new_length:
        return given.plan(), None
    starts = [0, *accumulate(group.count for group in groups)]
    prompts = [row for index in order for row in range(starts[index], starts[index + 1])]
    return in_order.plan(), sorted(range(len(prompts)), key=prompts.__getitem__)


def _check_rope(model: PreTrainedModel, longest: int) -> None:
    """Reject prompts that no call could continue from, because frequencies change after them."""
    limit = rope_limit(model.config.get_text_config(decoder=True))
    if limit is not None and longest >= limit:
        raise ValueError(
            f"a prompt of {longest} tokens cannot be kept: the position embedding of {type(model).__name__} changes "
            f"beyond {limit} tokens, so no call could continue from it; prefill at most {limit - 1} tokens, or call "
            "generate without a kept cache"
        )


def _check_vocabulary(model: PreTrainedModel, groups: list[PromptGroup]) -> None:
    """Reject out-of-vocabulary ids: on a GPU the lookup would trigger a device assert, fatal to the CUDA context."""
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
