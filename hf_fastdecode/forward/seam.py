"""The override of a decoder's ``forward``: passes without a cache compute tokens that rows share once.

The decoder is the module that returns ``last_hidden_state``. It is given all rows, and returns hidden states of all
rows, so that heads, losses and wrappers around it do not notice; between, its layers run on one packed row of the
batch's distinct tokens, of which each attends to its own path of the trie.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._compat import CACHE, cache_in, stored_parts, tensor_version, with_cache
from ..cache.shared import named_arguments
from ..errors import Unsupported, reason_of
from ..generation.call_context import active_call_of_thread, scores_rows
from ..generation.model_state import ModelState
from ..generation.options import Options
from ..generation.report import ForwardReport
from ..generation.structure import Structure
from .packed import CacheOfRows, PackedPass, fill, to_rows
from .replayed_rows import Routing
from .reuse import KeptRows, ModelThen, Prefixes, keep
from .rows import NAMES, WITHOUT_EFFECT, Batch, check_arguments, read_batch
from .support import (
    check_backward_hooks,
    check_decoder,
    check_labels,
    check_length,
    check_settings,
    knows_distances_alone,
)
from .trie import Trie

_LEAST_SHARE = 0.02
"""Part of the given tokens that sharing must save: less is lost in attention by parts."""


def forward(state: ModelState, decoder: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
    """Run a pass without a cache over the distinct tokens of its rows if that saves enough, else the decoder's."""
    original = state.methods.original(decoder, "forward")
    may_replay = state.replayed is not None or state.options.log_probs == "trainer"
    if cache_in(kwargs) is not None or not (state.options.share_forward or may_replay):
        return original(*args, **kwargs)
    if _is_transformed():
        if state.replayed is not None:
            raise ValueError("replay_routing cannot reach routers in passes that are compiled, traced or transformed")
        return original(*args, **kwargs)
    return _forward(state, decoder, original, args, kwargs)


def _is_transformed() -> bool:
    """Whether the pass is compiled, traced, or transformed by `torch.func`: tokens then have no values, or others."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(
    state: ModelState,
    decoder: PreTrainedModel,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    given = dict(kwargs)
    if args:
        names = list(inspect.signature(type(decoder).forward).parameters)[1:]
        given = named_arguments(names, args, kwargs)
    if cache_in(given) is not None:
        return original(*args, **kwargs)
    report = state.last_forward = ForwardReport()
    structure = state.structure_of(decoder)
    call = active_call_of_thread.get()  # whose passes replay nothing but what it has recorded
    replayed = state.replayed if call is None else getattr(call.recorder, "made", None)
    try:
        routing = Routing() if replayed is None else Routing.of(replayed, decoder, given)
        report.replayed = int((routing.places >= 0).sum())
        try:
            return _shared(state, decoder, original, structure, given, report, routing)
        except Unsupported as error:
            report.path, report.reason = "stock", str(error)
        return routing.run(structure, original, *args, **kwargs)
    except BaseException as error:
        report.fail(error)
        raise
    finally:
        structure.release()
        state.log_once(str(report), logging.INFO)


def _shared(
    state: ModelState,
    decoder: PreTrainedModel,
    original: Callable[..., Any],
    structure: Structure,
    given: dict[str, Any],
    report: ForwardReport,
    routing: Routing,
) -> Any:
    """The output of the packed pass, or of the last one's rows; raises `Unsupported`."""
    options, last = routing.kept(state.options, state.last_rows)
    state.last_rows = None
    most = _most_kept(options, decoder, given)
    batch = _checked_batch(decoder, structure, given, routing, alone=most > 0 or last is not None)
    if (output := _of_last_rows(last, decoder, structure, batch, given, report)) is not None:
        state.last_rows = last
        return output
    before = _before(state, decoder, structure) if most else None
    moved, trie = _found(options, decoder, structure, batch, before)
    report.rows, report.tokens, report.computed = len(moved.rows), trie.given, len(trie.places)
    report.kept = trie.tree.kept
    check_length(decoder, trie.longest)
    check_labels(batch)
    if torch.is_grad_enabled():
        check_backward_hooks(structure.walk)
    try:
        _check_gain(options, trie, counts_padding=moved.counts_padding and moved is batch)
    except Unsupported:
        if most:
            state.kept_forward = replace(before or Prefixes(), seen=batch.rows)
        raise
    makes_cache = _makes_cache(decoder, given)
    kept, hidden_before = ({}, None) if before is None or not trie.tree.kept else before.at(trie)
    packed = PackedPass(trie.longest, tree=trie.tree, kept=kept, keeps=makes_cache or bool(most))
    output = _run_packed(packed, original, structure, moved, trie, given, routing)
    hidden = output["last_hidden_state"]
    if hidden_before is not None:
        hidden = output["last_hidden_state"] = torch.cat([hidden_before, hidden], 1)
    state.last_rows = _rows_to_keep(options, decoder, structure, given, (batch.rows, trie, output))
    if most:
        then = before.then if before is not None and before.then is not None else ModelThen.of(decoder, structure)
        state.kept_forward = keep(moved.rows, trie, packed.stored, hidden, then, most) or before
    report.path, report.reason = "shared", "rows begin alike" if not trie.tree.kept else "rows begin like earlier ones"
    index = torch.from_numpy(trie.index).to(hidden.device)
    if makes_cache:
        run = partial(routing.run, structure, original)
        of_stock = partial(_fill_by_stock, decoder, run, given, _versions(decoder))
        of_packed = partial(fill, {layer: packed.stored[layer] for layer in structure.layout.per_token}, index)
        output[CACHE] = CacheOfRows(decoder.config, of_packed if moved is batch else of_stock)
    packed.keeps, packed.stored = False, {}  # checkpoints in the graph of these keep the pass
    return _of_rows(decoder, output, index, given)


def _checked_batch(
    decoder: PreTrainedModel, structure: Structure, given: dict[str, Any], routing: Routing, *, alone: bool
) -> Batch:
    """The rows of a pass, which may be one row `alone`; raises `Unsupported` if the decoder cannot pack them now."""
    if (reason := structure.kept("forward", lambda: reason_of(check_decoder, decoder, structure))) is not None:
        raise Unsupported(reason)
    check_settings(decoder, structure, given)
    check_arguments(given)
    return routing.batch or read_batch(decoder, given, least=1 if alone else 2)


def _fill_by_stock(
    decoder: PreTrainedModel, original: Callable[..., Any], given: dict[str, Any], versions: list[int], cache: Any
) -> None:
    """Fill a cache by the decoder's own pass: its positions count padding, as those do at which it is continued."""
    if versions != _versions(decoder):
        raise RuntimeError(
            "weights have changed since the pass of this cache, which is filled when it is first read; read it "
            "before, or give the pass position_ids that count from each row's first token"
        )
    original(**with_cache(given | {"use_cache": True}, cache))


def _versions(decoder: PreTrainedModel) -> list[int]:
    return [tensor_version(part) for weight in decoder.parameters() for part in stored_parts(weight)]


def _before(state: ModelState, decoder: PreTrainedModel, structure: Structure) -> Prefixes | None:
    """What earlier passes have kept, and the rows of the last one, if the decoder would compute the same."""
    before = state.kept_forward
    if not isinstance(before, Prefixes):
        return None
    return before if before.then is None or before.then.is_now(decoder, structure) else None


def _found(
    options: Options, decoder: PreTrainedModel, structure: Structure, batch: Batch, before: Prefixes | None
) -> tuple[Batch, Trie]:
    """The batch, without offsets of positions if it then shares more, and what its rows and earlier ones share."""
    kept = before.rows_and_seen if before is not None else ()
    find = partial(Batch.trie, least=options.min_shared_tokens, saving=options.fewest_saved)
    trie = find(batch, kept=kept)
    if batch.counts_padding and structure.kept("offsets", lambda: knows_distances_alone(decoder)):
        moved = find(batch.without_offsets, kept=kept)
        if moved.saved >= trie.saved + options.fewest_saved:
            batch, trie = batch.without_offsets, moved
    return batch, trie if len(trie.places) else find(batch)  # the decoder runs over at least one token


def _check_gain(options: Options, trie: Trie, *, counts_padding: bool) -> None:
    """Raise `Unsupported` if a pass saves too little, now or for later ones."""
    needed = options.fewest_saved
    if options.min_saved_tokens == "auto":
        needed = max(needed, int(_LEAST_SHARE * trie.given))
    if trie.saved + trie.repeated < needed:
        remedy = "position_ids that count from each row's first token may share more" if counts_padding else None
        raise Unsupported(
            f"beginnings that save {options.fewest_saved} or more save {trie.saved} of {trie.given} tokens in all, "
            f"and sharing takes {needed} to pay",
            remedy,
        )


def _most_kept(options: Options, decoder: PreTrainedModel, given: dict[str, Any]) -> int:
    """Bytes that the pass may keep for later ones."""
    return options.reused_bytes if _may_keep(decoder, given) and not scores_rows.get() else 0


def _may_keep(decoder: PreTrainedModel, given: dict[str, Any]) -> bool:
    """Whether a pass is one of last hidden states of ids alone, without gradients, of which others may have some."""
    if torch.is_grad_enabled() or given.get(NAMES.embeddings) is not None:
        return False
    return not (given.get("output_hidden_states") or decoder.config.output_hidden_states)


def _rows_to_keep(
    options: Options, decoder: PreTrainedModel, structure: Structure, given: dict[str, Any], rows: tuple[Any, Any, Any]
) -> KeptRows | None:
    """All rows of a pass, as `KeptRows.of` takes them, with ``log_probs="trainer"``."""
    keeps = options.log_probs == "trainer" and _may_keep(decoder, given)
    return KeptRows.of(*rows, ModelThen.of(decoder, structure)) if keeps else None


def _of_last_rows(
    last: object,
    decoder: PreTrainedModel,
    structure: Structure,
    batch: Batch,
    given: dict[str, Any],
    report: ForwardReport,
) -> Any:
    """The output of a pass over rows that the last one has kept; None for others."""
    if not isinstance(last, KeptRows) or not _may_keep(decoder, given) or _makes_cache(decoder, given):
        return None
    if structure.gathering is not None:  # other processes, whose rows may be new, would wait in layers
        return None
    if (index := last.index(batch.rows, batch.width)) is None or not last.then.is_now(decoder, structure):
        return None
    check_labels(batch)
    report.rows, report.tokens = len(batch.rows), sum(len(row.keys) for row in batch.rows)
    report.kept, report.path, report.reason = last.hidden.shape[1], "shared", "the last pass computed these rows"
    output = last.kind(last_hidden_state=last.hidden)
    return _of_rows(decoder, output, torch.from_numpy(index).to(last.hidden.device), given)


def _run_packed(
    packed: PackedPass,
    original: Callable[..., Any],
    structure: Structure,
    batch: Batch,
    trie: Trie,
    given: dict[str, Any],
    routing: Routing,
) -> Any:
    """The output of the decoder's own method for the distinct tokens that are computed."""
    arguments = {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
    arguments |= dict.fromkeys(NAMES) | batch.arguments(trie) | {"use_cache": False, "return_dict": True}
    output = None
    try:
        with packed.running(structure), routing.running(structure, trie.places):
            output = original(**arguments)
        _check_output(structure, packed, output)
    except Unsupported as error:
        ran = packed.layers or output is not None
        if ran and structure.gathering is not None:  # others may wait in layers that would run again
            raise ValueError(f"{error}; call hf_fastdecode.enable with `share_forward=False`") from error
        raise
    return output


def _check_output(structure: Structure, packed: PackedPass, output: Any) -> None:
    """Raise `Unsupported`, from now on without a pass, if layers attended otherwise than was seen."""
    expected, reason = structure.layout.per_token.keys(), None
    if packed.layers < len(expected):
        reason = f"{packed.layers} of its {len(expected)} layers attend by transformers' attention interface"
    elif packed.keeps and expected - packed.stored.keys():
        reason = "its layers' keys and values are not those of a cache; pass use_cache=False"
    elif others := output.keys() - {"last_hidden_state", "hidden_states"}:
        reason = f"its output has {', '.join(sorted(others))}"
    if reason is not None:
        structure.keep("forward", reason)
        raise Unsupported(reason)


def _of_rows(decoder: PreTrainedModel, output: Any, index: Tensor, given: dict[str, Any]) -> Any:
    """The output of a packed row as that of all rows."""
    output["last_hidden_state"] = to_rows(output["last_hidden_state"], index)
    if (states := output.get("hidden_states")) is not None:
        output["hidden_states"] = tuple(to_rows(layer, index) for layer in states)
        output.move_to_end("hidden_states")  # after the cache, as in stock: the order of tuples
    asked = given.get("return_dict")
    return output if (decoder.config.return_dict if asked is None else asked) else output.to_tuple()


def _makes_cache(decoder: PreTrainedModel, given: dict[str, Any]) -> bool:
    """Whether the decoder's own pass would return a cache, which it is not given."""
    asked = given.get("use_cache")
    if not (getattr(decoder.config, "use_cache", False) if asked is None else asked):
        return False
    checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in decoder.modules())
    return not (checkpoints and decoder.training)
