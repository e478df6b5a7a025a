"""``forward``: passes over a shared-context cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import CACHE, TRANSFORMERS, cache_in, ignored_cache, with_cache
from ...attention.interface import at_positions, given_positions
from ...attention.overrides import RowLengths
from ...cache.captured import CapturedCache
from ...cache.shared import SharedContextCache, named_arguments, next_positions
from ..autocast import entered_again
from ..call_context import active_call_of, active_call_of_thread, structure_of_call
from ..fingerprint import filled_by
from ..forward_pass import input_device, prompt_names, reads_positions, takes_positions, with_labels
from ..model_state import ModelState
from ..structure import Structure


def forward(model_state: ModelState, model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
    """Run a pass over a shared-context cache, if it is given one, else the model's own method."""
    cache = cache_in(kwargs)
    if cache is None:
        cache = next((argument for argument in args if isinstance(argument, SharedContextCache)), None)
    if not isinstance(cache, SharedContextCache):
        if isinstance(ignored_cache(kwargs), SharedContextCache):
            model_state.log_once(
                f"a pass was given a SharedContextCache as cache=, which transformers {TRANSFORMERS} calls {CACHE} "
                "and otherwise ignores: the pass runs without it"
            )
        original, labels = model_state.methods.original(model, "forward"), kwargs.get("labels")
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if cache is not None and active_call_of_thread.get() is not None:
            original = _recorded(model, cache, original)
        if not isinstance(labels, Tensor):
            return original(*args, **kwargs)
        with with_labels(labels):
            return original(*args, **kwargs)
    return _forward_shared(model_state, model, cache, *args, **kwargs)


def _recorded(model: PreTrainedModel, cache: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """A pass that records what routers choose, where the call asks for it; captured ones do by themselves."""
    call = active_call_of(model)
    if call is None or (recorder := call.recorder) is None or isinstance(cache, CapturedCache):
        return original
    return lambda *args, **kwargs: recorder.run(cache, partial(original, *args, **kwargs))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as `forward_pass` does, for direct passes
def _forward_shared(
    model_state: ModelState, model: PreTrainedModel, cache: SharedContextCache, /, *args: Any, **kwargs: Any
) -> Any:
    given, called = dict(kwargs), prompt_names(model)
    if args:
        given = named_arguments(list(inspect.signature(type(model).forward).parameters)[1:], args, kwargs)
    original = model_state.methods.original(model, "forward")
    if called.positions in given and given_positions() is None and not reads_positions(model):  # of a caller's
        del given[called.positions]
        args, kwargs = (), given
    if cache.first_pass is not None:
        with entered_again(model):
            return cache.first_pass.run(cache, with_cache(given, cache), original)
    input_ids = given.get(called.ids)
    inputs = input_ids if input_ids is not None else given.get(called.embeddings)
    rows, queries = inputs.shape[:2] if isinstance(inputs, Tensor) else (0, 0)
    if not cache.state.current.items:
        if cache.checks_masks:
            _check_mask(cache, given.get(called.mask), queries)
        unplaced = given.get(called.positions) is None and takes_positions(model)
        if isinstance(inputs, Tensor) and len(inputs) == cache.rows and unplaced:
            # The model would count from the longest row, padding included.
            given |= {called.positions: next_positions(cache, queries).to(inputs.device)}
            args, kwargs = (), given
    if cache.inputs is not None:  # in the place of as many rows as the decoder has
        cache.inputs.see(given)
        given |= cache.inputs.arguments
    structure = structure_of_call(model_state, model)
    active_call, was_empty = active_call_of_thread.get(), cache.is_empty
    if active_call is not None and active_call.loop is not None:
        structure.forget()  # the user's loop may have changed the model since the last pass
        if not cache.state.current.items:  # prefill replaces methods for its time
            structure.known = model_state.structure_of(model).known
            structure.require_same_pass(input_ids, queries)
    output = None
    if cache.later_passes is not None:
        with entered_again(model):
            output = cache.later_passes.run(cache, with_cache(given, cache))
    if output is None:
        original = _recorded(model, cache, original)
        run = partial(original, *args, **kwargs)
        if cache.inputs is not None:
            run = partial(original, **with_cache(given, None))
        positions = given.get(called.positions)
        output = _run_eagerly(model, cache, structure, run, positions, input_ids, (rows, queries))
    users = active_call is None or active_call.model is not model or active_call.loop is not None
    _note_model(model_state, model, cache, structure, users=users, was_empty=was_empty)
    return output


def _note_model(
    model_state: ModelState,
    model: PreTrainedModel,
    cache: SharedContextCache,
    structure: Structure,
    *,
    users: bool,
    was_empty: bool,
) -> None:
    """Let a kept cache remember the model that has computed its tokens, and a report of the call the cache."""
    if cache.kept and not cache.state.current.items and (users or cache.fingerprint is None):
        before = None if was_empty else cache.fingerprint
        cache.fingerprint = filled_by(before, model, structure.walk, structure.known, compares=users)
    report = model_state.last_call
    if report is not None and report.cache is not None and report.cache() is cache:
        report.observe(cache)


def _run_eagerly(
    model: PreTrainedModel,
    cache: SharedContextCache,
    structure: Structure,
    run: Callable[..., Any],
    positions: Tensor | None,
    input_ids: Any,
    shape: tuple[int, int],
) -> Any:
    """Run a pass over a shared-context cache by the model's own method, in `shape` rows and tokens of each."""
    queries = shape[1]
    own = cache.state.current.tensors is not None  # by transformers' own attention
    with (
        structure.running_pass(),
        nullcontext() if own else structure.passing(RowLengths(cache.longest_row(queries))),
        cache.all_or_nothing(*shape),
    ):
        if active_call_of_thread.get() is None and not cache.state.current.items:  # prefill may divide a pass
            structure.require_same_pass(input_ids, queries)
        if cache.state.met is None or cache.state.met() is not model:
            cache.meet(structure.layout)
            cache.state.met = ref(model)
        if positions is None and cache.inputs is not None:  # counted by the slots of the cache
            positions = torch.arange(queries, device=input_device(model))[None] + cache.get_seq_length()
        with at_positions(positions):
            if cache.inputs is None:
                output = run()
            else:
                output = run(**{CACHE: cache.inputs.view(cache, cache.state)})
                output[CACHE] = cache
        if not cache.state.current.items and isinstance(input_ids, Tensor):
            cache.record_tokens(input_ids)
    return output


def _check_mask(cache: SharedContextCache, mask: Any, queries: int) -> None:
    """Raise ValueError for a mask ``[rows, tokens]`` that hides more than left padding, or tokens of an empty cache.

    Other types and masks of four dimensions are left to the attention function, which rejects them.
    """
    if not isinstance(mask, Tensor) or mask.dim() == 4 or (mask.dim() == 2 and bool(mask.all())):
        return
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be [rows, tokens], got shape {list(mask.shape)}; omit it for no padding"
        )
    if not cache.rows:
        raise ValueError(
            "an empty SharedContextCache takes no padded prompts; make it with hf_fastdecode.prefill(model, ...)"
        )
    hidden = (mask == 0).cpu()
    own = torch.tensor(cache.forest.context_lengths, device="cpu") + cache.suffix_lengths + queries
    in_front = hidden.long().cumprod(1).sum(1)
    if len(own) != len(hidden) or bool((hidden.sum(1) > in_front).any() or (in_front > mask.shape[1] - own).any()):
        raise ValueError(
            "attention_mask hides tokens of the cache, but every row attends to all of its own; omit the mask, or "
            "mask only left padding"
        )
