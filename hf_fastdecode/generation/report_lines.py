"""The text of reports: one line for each thing that a call did, folded to 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import CallReport

_COLUMNS = 80


def lines_of(call: CallReport) -> list[str]:
    """Lines of a call's report, of any length."""
    lines = [f"last generate call: {call.path} ({call.reason})", *_inner_lines(call.inner)]
    if call.path != "shared":
        return lines
    stored, _, stock = call.nbytes
    return [
        *lines,
        f"  {call.forest}",
        f"  tokens prefilled: {call.prefilled_tokens} (stock: {call.rows * call.padded_length})",
        *_prefill(call),
        f"  {'KV and state' if call.state_bytes else 'KV'} bytes: {stored:,} (stock: {stock:,})",
        *([f"  of these, for encoder inputs ({call.inputs}): {call.input_bytes:,}"] if call.inputs else []),
        *([f"  KV bytes kept for later calls: {call.kept_bytes:,}"] if call.kept_bytes else []),
        f"  steps: {call.mode} ({call.mode_reason})",
        *([f"  {call.parallel}"] if call.parallel else []),
        *([f"  as kernels: {call.fused}"] if call.fused else []),
        f"  sampler: {call.sampler} ({call.sampler_reason})",
        *_events(call),
        *_layer_lines(call.layers),
    ]


def _inner_lines(inner: Sequence[CallReport]) -> list[str]:
    """One line for each run of inner calls that went alike."""
    lines, first = [], 1
    for (path, reason), run in groupby((one.path, one.reason) for one in inner):
        count = len(list(run))
        numbers = f"call {first}" if count == 1 else f"calls {first}-{first + count - 1}"
        lines.append(f"  inner {numbers}: {path} ({reason})")
        first += count
    return lines


def ordinal(inner: Sequence[CallReport], one: CallReport) -> str:
    """Which of the calls one is, such as ``2nd``."""
    number = next(index for index, other in enumerate(inner, 1) if other is one)
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"


def _prefill(call: CallReport) -> list[str]:
    lines = []
    if call.computed_again:
        lines.append(f"  beside them, the last token of each prompt, again, as the first step: {call.computed_again}")
    if call.own_tokens:
        lines.append(f"  of these, stored with one row alone: {call.own_tokens}")
    if call.captured_prefill_tokens:
        lines.append(f"  of these, by captured passes: {call.captured_prefill_tokens}")
    if call.prefill_reason:
        lines.append(f"  prefill passes cannot be captured: {call.prefill_reason}")
    if call.known_tokens is not None:
        least, most = min(call.known_tokens), max(call.known_tokens)
        each = f"{least}" if least == most else f"{least} to {most}"
        lines.append(f"  tokens of each prompt that were stored before: {each}")
    return lines


def _events(call: CallReport) -> list[str]:
    counts = {
        "CUDA graphs captured": call.captures,
        "compactions of finished rows": call.compactions,
        "waves of rows, one after another": call.waves,
    }
    lines = [f"  {what}: {count}" for what, count in counts.items() if count]
    if call.rows_at_once:
        how = f"in waves: {call.waves_reason}" if call.waves_reason else f"{call.refilled} in places of finished ones"
        lines.append(f"  rows at once: {call.rows_at_once} of {call.rows}, {how}")
    return lines


def _layer_lines(layers: Sequence[str]) -> list[str]:
    """One line for all layers with equal reports, such as ``layers 0-2, 4-6: a state for each row``."""
    runs: dict[str, list[str]] = {}
    first = 0
    for what, run in groupby(layers):
        last = first + len(list(run)) - 1
        runs.setdefault(what, []).append(f"{first}" if first == last else f"{first}-{last}")
        first = last + 1
    return [
        f"  layer{'' if len(which) == 1 and which[0].isdigit() else 's'} {', '.join(which)}: {what}"
        for what, which in runs.items()
    ]


def fold(line: str) -> list[str]:
    """A line of a report in lines of at most 80 columns, indented behind the first."""
    text = line.lstrip(" ")
    indent = line[: len(line) - len(text)]
    wrap = textwrap.TextWrapper(
        _COLUMNS, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
    return wrap.wrap(text) or [""]
