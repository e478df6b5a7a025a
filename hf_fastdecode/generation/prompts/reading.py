"""Reads the prompts of a call once: what `generate`'s loop, another loop's first pass or `prefill` is given.

`Prompts` has what follows from these alone, whatever is stored of them: which rows are equal, whether tokens tell
prompts apart, and whether they run by rows. Checks of prompts are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

from ...attention.overrides import OwnCode, own_code_of
from ...errors import Unsupported
from ..call_context import CallContext
from ..forward_pass import Positions, counts_padding, places_tokens, prepares_positions, reads_positions
from ..inputs.distinct import FoundInputs
from ..structure import Structure
from .by_rows import Rows
from .prefixes import TEXT, TextPrefixes, prefixes_of
from .prompt_plan import PromptGroup, PromptPlan, continuation_of, group_prompts

_FEW = 1 << 17
"""Elements of prompts, mask and positions that are checked on the CPU: a copy of 1 MB."""

_WHOLE: Final = (torch.int32, torch.int64, torch.bool)


class Embeddings(NamedTuple):
    """Embeddings ``[rows, width, hidden]`` and negative ids ``[rows, width]``, equal for bitwise equal vectors.

    `known`, ``[tokens, hidden]``, are those of distinct prompts, which ids count.
    """

    given: Tensor
    ids: Tensor
    known: Tensor

    @classmethod
    def of(cls, given: Tensor) -> Embeddings:
        rows, width, hidden = given.shape
        vectors = given.detach()
        distinct, row_of = [0], [0]  # expanded prompts are equal neighbours
        for row in range(1, rows):
            if not torch.equal(vectors[row], vectors[row - 1]):
                distinct.append(row)
            row_of.append(len(distinct) - 1)
        known = vectors[distinct].reshape(-1, hidden)
        bits = known.contiguous().view(torch.int16 if known.dtype.itemsize == 2 else torch.int32).long()
        _, numbers = torch.unique(bits, dim=0, return_inverse=True)
        first = torch.full((int(numbers.max()) + 1,), len(known), device=known.device)
        first.scatter_reduce_(0, numbers, torch.arange(len(known), device=known.device), "amin")
        ids = (-1 - first[numbers]).view(len(distinct), width)[row_of]
        return cls(given, ids, known)

    def of_ids(self, ids: Tensor) -> Tensor:
        """The embeddings ``[tokens, hidden]`` of ids ``[tokens]``."""
        return self.known[-1 - ids.to(self.known.device)]


@dataclass(frozen=True)
class Prompts:
    """The prompts of a call."""

    ids: Tensor  # [rows, width]; of embeddings, ids that stand for them
    mask: Tensor | None
    positions: Positions
    row_positions: Tensor | None  # positions for passes by rows, [..., rows or 1, width]; None for those of the mask
    groups: list[PromptGroup]  # neighbouring rows with equal prompts
    padded: bool  # whether positions count the padding of prompts
    # Whether tokens have other positions than those counted from a row's first: of padding, or the model's.
    apart: bool
    # Whether prompts with equal tokens are equal, so that stored ones may be used, and these stored.
    tokens_say_all: bool
    by_rows: bool  # whether prompts run by rows, see `by_rows`
    inputs: FoundInputs | None = None  # encoder inputs, or images that layers attend to, and which one each row reads
    prefixes: TextPrefixes = TEXT  # what the prompts may share and reuse
    embeddings: Embeddings | None = None  # of ids, if the prompts are embeddings

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    @property
    def row_groups(self) -> list[int]:
        """For each row the index of its group."""
        return [index for index, group in enumerate(self.groups) for _ in range(group.count)]

    def distinct_rows(self) -> Rows:
        """The first row of each group, as stock would be given it."""
        inputs = self.ids if self.embeddings is None else self.embeddings.given
        of_rows = None if self.inputs is None else self.inputs.of_rows
        return Rows.of(inputs, self.mask, self.row_positions, of_rows, self.prefixes.rows).distinct(self.groups)

    def narrowed(self, nodes: PromptPlan) -> Prompts | None:
        """The prompts, which may share less after a pass over these nodes failed; None if it had nothing else."""
        narrower = self.prefixes.narrowed(nodes, self.distinct_rows)
        return None if narrower is None else replace(self, prefixes=narrower)

    @property
    def alike(self) -> bool:
        """Whether prompts that begin with the same tokens may share these."""
        return self.tokens_say_all and not self.apart and self.inputs is None

    @property
    def reusable(self) -> bool:
        """Whether later calls may reuse these prompts, found by tokens alone."""
        return self.embeddings is None and self.tokens_say_all and not self.apart

    @property
    def may_reuse(self) -> bool:
        """Whether tokens of a given cache may be used."""
        return (self.embeddings is None and self.alike) or not self.prefixes.of_text


def read_prompts(
    call: CallContext,
    ids: Tensor | None,
    arguments: Mapping[str, Any],
    positions: Positions,
    *,
    longest: int,
    hidden: bool = False,
    of_pass: bool = False,
) -> Prompts:
    """The prompts of a call or of a first pass, checked.

    Args:
        ids: ``[rows, width]``; None where `arguments`, which come with them, have embeddings.
        positions: As `arguments` have them.
        longest: Maximum row length, padding included.
        hidden: Whether hidden states are returned.
        of_pass: Whether a pass of another loop is given them, in which the model itself counts positions where none
            are given; before the own loop `generate` makes them of the mask.

    Raises:
        Unsupported: The call must run stock.
    """
    model, structure, names, text = call.model, call.structure, call.names, call.inputs is None
    embeddings = None
    if ids is None:
        embeddings = Embeddings.of(arguments[names.embeddings])
        ids = embeddings.ids
    mask = arguments.get(names.mask)
    _require_rows(positions, len(ids))
    prefixes = prefixes_of(call, arguments, len(ids), narrow=of_pass)
    tokens_say_all = text and not positions.differ
    if not tokens_say_all:
        _check_unkept(call, hidden=hidden)
    here, shown, placed = _on_host(ids, mask, positions)
    check_prompts(model, structure, here, shown, placed if text else Positions(None), longest=longest)
    if prefixes.found is not None or embeddings is not None:  # later passes of PEFT's have masks that cut tokens off
        _require_counted(model, shown, positions)
    counts = of_pass and positions.ids is None and reads_positions(model)
    if counts and not text:
        raise Unsupported("without position_ids, models count those behind images by themselves")
    padded = (counts or counts_padding(model)) and shown is not None and not bool(shown.all())
    apart = padded or places_tokens(model)
    planes = None if tokens_say_all else placed.ids
    groups = group_prompts(prefixes.known_ids(here), shown, planes, prefixes.numbers())
    by_rows = apart or not tokens_say_all or not _pack(structure, groups)
    _check_uses(apart=apart and prefixes.found is None, by_rows=by_rows, kept=call.may_keep_cache, hidden=hidden)
    inputs = prefixes.inputs([group.count for group in groups])
    # Of images, passes by rows are given what the model is given, which may prepare it further.
    row_positions = positions.ids if text else call.arguments.get(names.positions)
    if padded:
        row_positions = torch.arange(ids.shape[1], device="cpu")[None]
    return Prompts(
        *(ids, mask, positions, row_positions, groups, padded, apart, tokens_say_all, by_rows),
        *(inputs, prefixes, embeddings),
    )


def _pack(structure: Structure, groups: list[PromptGroup]) -> bool:
    """Whether prompts of text may be packed into one row; not those with gaps, over which layers scan."""
    scans = continuation_of(structure.layout).scans
    return structure.layout.packs and not (scans and any(group.gaps for group in groups))


def _check_uses(*, apart: bool, by_rows: bool, kept: bool, hidden: bool) -> None:
    """Raise `Unsupported` where a kept cache, or hidden states, would need another prefill than prompts have."""
    if apart and (kept or hidden):
        what = "hidden states are asked for" if hidden else "the call's cache would be kept"
        raise Unsupported(f"tokens have other positions than those counted from a row's first, and {what}")
    if by_rows and hidden:
        raise Unsupported("output_hidden_states is not accelerated yet for prompts by rows, as of an encoder's inputs")


def read_text(model: PreTrainedModel, structure: Structure, ids: Tensor, mask: Tensor | None) -> Prompts:
    """Prompts of text alone that are kept without a call; raises `Unsupported` where they cannot share context."""
    check_prompts(model, structure, ids, mask, longest=ids.shape[1])
    apart = places_tokens(model)
    groups = group_prompts(ids, mask)
    by_rows = apart or not _pack(structure, groups)
    return Prompts(ids, mask, Positions(None), None, groups, False, apart, True, by_rows)


def _on_host(ids: Tensor, mask: Tensor | None, positions: Positions) -> tuple[Tensor, Tensor | None, Positions]:
    """Prompts, mask and positions on the CPU, by one transfer, where launches of their checks would take longer."""
    given = [one for one in (ids, mask, positions.ids) if one is not None]
    few = all(one.dim() == 2 and one.shape[1] == ids.shape[1] and one.dtype in _WHOLE for one in given)
    few = few and sum(one.numel() for one in given) <= _FEW and len({one.device for one in given}) == 1
    if not few or not ids.is_cuda:
        return ids, mask, positions
    whole = torch.cat([one.long() for one in given]).cpu()
    parts = dict(zip(map(id, given), whole.split([len(one) for one in given]), strict=True))
    return parts[id(ids)], parts.get(id(mask)), positions._replace(ids=parts.get(id(positions.ids)))


Check = tuple[Tensor, Callable[[], Unsupported]]
"""Whether a condition holds, a scalar on the device, and the error if it does not."""


def check_prompts(
    model: PreTrainedModel,
    structure: Structure,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    positions: Positions = Positions(None),  # noqa: B008 - it is immutable
    *,
    longest: int,
) -> None:
    """Raise `Unsupported` for prompts, masks ``[rows, length]`` or positions that cannot share context, in a call of
    rows of up to `longest` tokens, padding included."""
    if input_ids.shape[1] == 0:
        raise Unsupported("the prompt is empty")
    if input_ids.dtype not in (torch.int64, torch.int32):  # of which stock's embeddings, if they refuse it, raise
        raise Unsupported(f"input_ids are {str(input_ids.dtype)[6:]}, not int64 or int32", "call the tokenizer")
    own = own_code_of(type(model))
    most = None if own is None else own.most_tokens(structure.text_config)
    if most is not None and longest > most:
        raise Unsupported(f"biases by distance are made for rows of up to {most} tokens, and max_length is {longest}")
    checks: list[Check] = []  # read from the device at once
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise Unsupported(
                f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}"
            )
        checks += _mask_checks(own, structure, attention_mask, longest)
    if positions.ids is not None and not positions.differ:
        checks.append(_position_check(model, input_ids, attention_mask, positions))
    passed = torch.stack([check for check, _ in checks]).tolist() if checks else []
    for holds, (_, error) in zip(passed, checks, strict=True):
        if not holds:
            raise error()


def _mask_checks(own: OwnCode | None, structure: Structure, mask: Tensor, longest: int) -> list[Check]:
    other = partial(Unsupported, "attention_mask holds values other than 0 and 1")
    remedy = "set padding_side='left' when calling the tokenizer"
    checks: list[Check] = [
        (((mask == 0) | (mask == 1)).all(), other),
        (mask[:, -1].all(), partial(Unsupported, "a prompt ends in padding", remedy)),
    ]
    window = structure.layout.smallest_window
    counted_by = None if window is None or longest <= window else f"windows of {window} tokens"
    if own is not None and own.counts_hidden:
        counted_by = "its distances"
    if counted_by is not None:
        hides = f"attention_mask hides tokens inside a prompt, which {counted_by} count as seen"
        gaps = (mask[:, 1:] < mask[:, :-1]).any()
        checks.append((~gaps, partial(Unsupported, hides, of_prompts=True)))
    scales_from = None if own is None else own.scales_from(structure.text_config)
    if scales_from is not None and longest >= scales_from:
        padding = f"from {scales_from} tokens on, its attention scales with the padding of prompts"
        checks.append((mask.all(), partial(Unsupported, padding, of_prompts=True)))
    return checks


def _position_check(model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None, positions: Positions) -> Check:
    """Whether positions are those that the model counts: of what the mask shows, or with padding."""
    ids = positions.ids
    assert ids is not None
    if mask is None or counts_padding(model):
        expected = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    else:
        expected = mask.cumsum(-1, dtype=torch.long).sub_(1).masked_fill_(mask == 0, 0)
    # Others are no rows of a table: stock raises where there is one.
    whole = ids.dtype in (torch.int32, torch.int64)
    comparable = whole and ids.dim() == 2 and ids.shape[1] == input_ids.shape[1]
    right = ids == expected if comparable else torch.zeros_like(expected, dtype=torch.bool)
    if positions.planes and mask is not None:
        right = right | (mask == 0)  # where planes have values of their own
    return right.all(), lambda: Unsupported(_why_not_counted(model, positions))


def _require_rows(positions: Positions, rows: int) -> None:
    """Raise `Unsupported` for positions of another number of rows, as `generate` makes of one row for several prompts;
    stock raises where the model reads them."""
    if (ids := positions.ids) is not None and ids.dim() > 1 and ids.shape[-2] not in (1, rows):
        remedy = "give each prompt its row, or leave them out"
        raise Unsupported(f"position_ids have {ids.shape[-2]} rows, and the call {rows}", remedy)


def _require_counted(model: PreTrainedModel, mask: Tensor | None, positions: Positions) -> None:
    counts = reads_positions(model) and positions.ids is None and not prepares_positions(model)
    if mask is not None and counts and not bool(mask.all()):
        raise Unsupported(
            "without position_ids, models count the padding of prompts in positions", "pass position_ids"
        )


def _why_not_counted(model: PreTrainedModel, positions: Positions) -> str:
    """Why positions are not those of the attention mask: the model makes others, or the caller gave them."""
    for name in ("_prepare_position_ids_for_generation", "prepare_inputs_for_generation"):
        if getattr(type(model), name, None) is not getattr(GenerationMixin, name, None):
            made_by, shape = f"{type(model).__name__}.{name}", positions.shape
            if len(shape) == 2:  # as those that a caller may give
                return f"position_ids, given or made by {made_by}, are not those of the attention mask"
            return (
                f"{type(model).__name__} makes position_ids of its own, of shape {shape}, which are not followed yet"
            )
    return "position_ids are not those of the attention mask; leave them out"


def _check_unkept(call: CallContext, *, hidden: bool) -> None:
    """Raise `Unsupported` for a kept cache or hidden states, which know tokens alone, where these do not say all.

    They do with images whose ids do (`ids_of_images`), where the model itself makes positions, in a known loop.
    """
    what = "the planes of position_ids differ"
    if call.inputs is not None:
        what = f"prompts come with {call.inputs.name}"
    if hidden:
        raise Unsupported(f"output_hidden_states is for positions of text, and {what}")
    if call.inputs is not None and not (call.places_given or call.loop_is_users):
        return
    if call.must_share:
        raise Unsupported(f"a SharedContextCache is for positions of text, and {what}")
    if call.may_keep_cache:
        raise Unsupported(f"{what}, and the call's cache would be kept")
