"""Public functions: `enable`, `disable`, `enabled`, `explain`, `prefill`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from . import _compat
from .attention.torch_operators import Backend
from .cache.layout import ModelLayout
from .cache.shared import SharedContextCache
from .errors import reason_of
from .forward.decoder import decoder_of
from .forward.seam import forward as shared_forward
from .generation.foreign_code import held_model
from .generation.interception.generate import METHODS
from .generation.interception.switches import Wrapper
from .generation.model_state import STATE_LOCK, ModelState, generates, last_forward_of, state_of
from .generation.options import FuseProjections, LogProbs, Mode, Options, Sampler
from .generation.prompts.kept import prefill_kept
from .generation.prompts.prefix_store import require_room
from .generation.report import ForwardReport, Report
from .generation.support import check_model
from .instance_methods import STATE_ATTRIBUTE
from .log import logger
from .patches.architectures import register_own_attention

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


Model = TypeVar("Model", bound=nn.Module)

register_own_attention()


def enable(
    model: Model,
    *,
    backend: Backend = "auto",
    mode: Mode = "auto",
    sampler: Sampler = "auto",
    fuse_projections: FuseProjections = "auto",
    min_shared_tokens: int = 32,
    min_saved_tokens: int | Literal["auto"] = "auto",
    max_prefill_tokens: int = 16384,
    max_rows: int | None = None,
    reuse_prefix: bool | int = False,
    share_forward: bool = True,
    log_probs: LogProbs = "auto",
    sequence_parallel: Literal["auto", False] | ProcessGroup | DeviceMesh = False,
    peer_timeout: float = 60,
) -> Model:
    """Make `model.generate` prefill, store and read the context that its samples share once.

    Calls and return values stay the same. Calls that cannot share context, e.g. with ``use_cache=False``, run stock
    transformers and log the reason once; `explain` reports what the last call did. Only this instance changes;
    `disable` restores it. Calling `enable` again replaces the options. Keep the model in a variable: the method
    ``model.generate`` alone does not keep it alive, as it does in stock.

    Args:
        model: A transformers model on any device: one that generates, a decoder, or an encoder and a decoder; with
            text, images, video or audio; or one that does not, such as a reward model or a decoder without a head. One
            wrapped by PEFT, `torch.compile`, DistributedDataParallel or DataParallel is unwrapped first, here and in
            the other functions; of a module that holds exactly one model, such as one with a value head, that is
            taken.
        backend: Attention operators of decode steps: ``auto`` chooses by device, dtype and size; ``triton`` forces
            this package's kernels; ``flash``, ``cudnn``, ``efficient``, ``cpu`` and ``plain`` force one of PyTorch's
            operators. A forced backend runs or raises. The environment variable ``HF_FASTDECODE_BACKEND`` replaces
            ``auto``.
        mode: How decode steps run: ``eager``, or captured in a CUDA ``graph``. ``auto`` runs eagerly on the CPU; on a
            GPU it captures once the model's calls have requested enough steps to amortize the capture. A forced mode
            runs or raises. Where steps are captured, so is the prefill of short prompts, once that pays.
        sampler: Sampling code: ``hf`` is transformers' own, draw for draw. ``fast`` is this package's kernel, which
            samples the same distribution with other random numbers and needs a GPU. ``auto`` uses it for
            half-precision models on a GPU, unless the call needs features that only transformers' code has.
        fuse_projections: Whether captured steps compute query, key and value projections, and gate and up
            projections, together: on Hopper GPUs by one kernel for up to 32 rows, as it does each other product, and
            otherwise as parallel branches of the graph. ``auto`` does for few rows; ``True`` captures
            steps from the first call on and does for any number of rows, or raises; ``False`` leaves products to
            PyTorch, one by one. Weights are never moved or copied.
        min_shared_tokens: Shortest run of tokens shared by neighbouring prompts, at any depth, that gets a node.
        min_saved_tokens: Calls in which sharing saves fewer stored tokens run stock, which is then faster, unless
            their steps are captured. ``"auto"``: 64, and on the CPU as many as take stock the time that sharing costs
            the call, by a model of costs (docs/limits.md). Where layers have states or prompts have images, a
            common prefix is computed once if that saves as many tokens; ``"auto"`` asks for about 2,048 for each
            prefill pass that this adds.
        max_prefill_tokens: Maximum tokens per prefill forward pass; longer contexts are prefilled in chunks.
        max_rows: Most rows of a call, samples of all its prompts, that decode at once; the others wait. Calls that
            return their cache, stream, or run custom processors or criteria decode all rows at once, and raise if
            they have more. None: as many as fit in memory.
        reuse_prefix: Keep the prompts' keys and values of recent calls, so that later calls prefill only new tokens:
            for prompts with a common prefix that arrive one at a time. ``True`` keeps up to 2 GiB, an integer that
            many bytes (at least those of one token; 0 none), of at most 64 calls. They are dropped when weights or
            active adapters change. Prompts of at least `min_saved_tokens` then run shared although nothing is saved
            yet.
        share_forward: Whether forward passes without a cache over rows that begin alike, as in scoring and training,
            compute shared tokens once, with the outputs and gradients of stock: passes of the model itself and of
            all that holds its decoder, such as heads, adapters and trainers. Outputs of padding are 0, without a
            gradient. Passes that save fewer than `min_saved_tokens` run stock.
        log_probs: Which log-probabilities of drawn tokens `generate` returns, where it is asked for them
            (``return_dict_in_generate``, `TokenLogProbs`): ``auto`` those of the steps that drew them; ``trainer``
            those of a pass over the finished rows, as a trainer runs it, whose hidden states a trainer's own pass
            without gradients over these rows is then given. See `FastDecodeOutput` and docs/rl.md.
        sequence_parallel: Divide the context of each call between processes (Tree Attention, Shyam et al. 2024,
            section 5): each has the whole model and makes the same calls, stores its part of nodes and suffixes, and
            attends to it; a collective per layer merges the partials. ``"auto"`` divides between the processes of the
            default group (``torchrun``); a process group, or a device mesh of one dimension, between its own. Calls
            are then shared even where that saves nothing. See docs/multi-gpu.md.
        peer_timeout: Seconds without a sign of life of another process of a model that several compute together, until
            calls end with `hf_fastdecode.errors.PeerFailedError`; at least 3. A process that is slow gives signs of
            life.

    Returns:
        The same model.

    Raises:
        ValueError: An option has an invalid value, or `reuse_prefix` fewer bytes than a token of this model.
        TypeError: `model` neither is nor wraps a transformers model, nor holds exactly one.
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
        share_forward,
        log_probs,
        sequence_parallel,
        peer_timeout,
    )
    inner = held_model(model)
    require_room(inner, options)
    _install(inner, options)
    return model


def _install(model: PreTrainedModel, options: Options) -> None:
    """Override methods of the model instance, or replace the options of an enabled model."""
    if (newer := _compat.untested_transformers()) is not None:
        _warn_of(newer)
    with STATE_LOCK:
        decoder, methods = decoder_of(model), METHODS if generates(model) else {}
        if decoder is model:
            methods = {**methods, "forward": shared_forward}
        model_state = _installed(model, options, methods)
        if decoder is not None and decoder is not model:
            _installed(decoder, options, {"forward": shared_forward}, owner=model_state)


def _installed(
    model: PreTrainedModel, options: Options, methods: Mapping[str, Wrapper], *, owner: ModelState | None = None
) -> ModelState:
    """The state of a model, or of its decoder, with these options, and overrides of these methods."""
    model_state: ModelState | None = vars(model).get(STATE_ATTRIBUTE)
    if model_state is None:
        model_state = ModelState(model, options, methods, owner)
        model_state.methods.install(model, model_state)
    else:
        model_state.options, model_state.disable_pending = options, False
        model_state.captures.retry()
        if not options.reuse_prefix:
            model_state.prefix_store.clear()
            model_state.kept_forward = None
        model_state.last_rows = None
    return model_state


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
    inner = held_model(model)
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
    inner = held_model(model)
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
    inner = held_model(model)
    model_state, layout, can_generate = state_of(inner), ModelLayout.of(inner), generates(inner)
    return Report(
        model=type(inner).__name__,
        enabled=model_state is not None,
        layer_count=len(layout.layers) or None,
        model_reason=reason_of(check_model, inner, layout) if can_generate else "it does not generate",
        last_call=model_state.last_call if model_state else None,
        last_forward=_last_forward(inner, model_state),
        generates=can_generate,
    )


def _last_forward(model: PreTrainedModel, model_state: ModelState | None) -> ForwardReport | None:
    """The report of the last pass, or why none can share."""
    if model_state is None or (found := last_forward_of(model)) is not None:
        return None if model_state is None else found
    if not model_state.options.share_forward:
        return ForwardReport(reason="share_forward=False")
    if decoder_of(model) is None:
        return ForwardReport(reason="it has no decoder of text whose tokens attend to earlier ones alone")
    return None


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
        ValueError: The model does not generate, is not enabled or cannot share context (e.g. training mode with
            dropout, or custom forward hooks); or the inputs are not prompts, contain out-of-vocabulary ids, or are too
            long for a position embedding that depends on the text length.
    """
    inner = held_model(model)
    if not generates(inner):
        raise ValueError(
            f"prefill computes prompts for generate, and {type(inner).__name__} does not generate; pass a model that "
            "does, such as one of AutoModelForCausalLM"
        )
    model_state = state_of(inner)
    if model_state is None:
        raise ValueError(f"prefill needs an enabled {type(inner).__name__}; call hf_fastdecode.enable(model) first")
    return prefill_kept(inner, model_state, inputs)
