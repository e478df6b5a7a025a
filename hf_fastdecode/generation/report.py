"""Which path ran and why: what `hf_fastdecode.explain` returns."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from weakref import ref

from ..cache.accounting import CacheBytes, within
from ..cache.shared import SharedContextCache


@dataclass
class CallReport:
    """One `generate` call.

    Attributes:
        path: ``shared``, ``stock``, or ``failed`` when the call raised.
        reason: Why this path; what was raised.
        rows: Sequences decoded; 0 when the call ran stock before its prompts were looked at.
        padded_length: Length of the rows' prompts with padding.
        forest: The nodes, in words.
        prefilled_tokens: Tokens run through the model before the decode steps.
        known_tokens: For each prompt, how many of its tokens a given cache held, or that of an earlier call; None
            without one.
        kept_bytes: Bytes of keys and values kept for later calls, with ``reuse_prefix``.
        layers: For each layer, what attended.
        context_width: Padded length of what the rows' nodes hold.
        cache: The call's cache, while anything else holds it.
        suffix_length: Tokens each row has appended.
        stored_tokens: Tokens held in the nodes' storage, whether or not rows attend to all of it.
        layer_sizes: For each layer, bytes of one token's keys and values, and its window where that hides anything.
        mode: How the decode steps ran: ``eager``, ``graph`` or ``compile``.
        mode_reason: Why.
        sampler: Who drew the tokens: ``hf`` or ``fast``.
        sampler_reason: Why.
        captures: CUDA graphs captured in this call.
        compactions: How often rows that had ended left the batch.
        waves: Parts that the rows were cut into to fit into memory; 0 when they were not.
    """

    path: str = "stock"
    reason: str = ""
    rows: int = 0
    padded_length: int = 0
    forest: str = ""
    prefilled_tokens: int = 0
    known_tokens: tuple[int, ...] | None = None
    kept_bytes: int = 0
    layers: list[str] = field(default_factory=list)
    context_width: int = 0
    cache: ref[SharedContextCache] | None = field(default=None, repr=False, compare=False)
    suffix_length: int = 0
    stored_tokens: int = 0
    layer_sizes: list[tuple[int, int | None]] = field(default_factory=list)
    mode: str = "eager"
    mode_reason: str = ""
    sampler: str = "hf"
    sampler_reason: str = ""
    captures: int = 0
    compactions: int = 0
    waves: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"cache": None}  # a weak reference is of this process

    def observe(self, cache: SharedContextCache) -> None:
        """Note what a forward pass with this cache did."""
        if not self.layers or self.suffix_length == 0:
            self.layers = [
                "; ".join(f"{phase}: {what}" for phase, what in layer.ran.items()) for layer in cache.layers
            ]
            self.layer_sizes = [(layer.storage.bytes_per_token, layer.window) for layer in cache.layers]
        self.suffix_length = cache.suffix_length

    def fail(self, error: BaseException) -> None:
        """Note that the call raised."""
        self.path, self.reason = "failed", type(error).__name__
        with suppress(Exception):  # what cannot be written must not hide what was raised
            self.reason += f": {error}" if str(error) else ""

    @property
    def nbytes(self) -> CacheBytes:
        """Bytes of keys and values at the end of the call: stored here, and what a stock cache held."""
        stored = (self.stored_tokens + self.rows * self.suffix_length) * sum(size for size, _ in self.layer_sizes)
        length = self.context_width + self.suffix_length
        stock = self.rows * sum(size * within(length, window) for size, window in self.layer_sizes)
        return CacheBytes(stored=stored, allocated=stored, stock=stock)

    def lines(self) -> list[str]:
        """The report for a person."""
        lines = [f"last generate call: {self.path} ({self.reason})"]
        if self.path == "shared":
            stored, _, stock = self.nbytes
            lines += [
                f"  {self.forest}",
                f"  tokens prefilled: {self.prefilled_tokens} (stock: {self.rows * self.padded_length})",
                *self._given(),
                f"  KV bytes: {stored:,} (stock: {stock:,})",
                *([f"  KV bytes kept for later calls: {self.kept_bytes:,}"] if self.kept_bytes else []),
                f"  steps: {self.mode} ({self.mode_reason})",
                f"  sampler: {self.sampler} ({self.sampler_reason})",
                *self._events(),
                *_layer_lines(self.layers),
            ]
        return lines

    def _given(self) -> list[str]:
        if self.known_tokens is None:
            return []
        least, most = min(self.known_tokens), max(self.known_tokens)
        each = f"{least}" if least == most else f"{least} to {most}"
        return [f"  tokens of each prompt that were stored before: {each}"]

    def _events(self) -> list[str]:
        counts = {
            "CUDA graphs captured": self.captures,
            "times that ended rows left the batch": self.compactions,
            "waves, since not all rows fitted into memory": self.waves,
        }
        return [f"  {what}: {count}" for what, count in counts.items() if count]


@dataclass(frozen=True)
class Report:
    """What `hf_fastdecode.explain` returns; ``str(report)`` reads as text.

    Attributes:
        model: The model's class.
        enabled: Whether `enable` is in effect.
        layer_count: Number of decoder layers; None where the config does not say, as of models without a decoder.
        model_reason: Why this model never shares, or None when it can.
        last_call: The last `generate` call since `enable`, or None.
    """

    model: str
    enabled: bool
    layer_count: int | None
    model_reason: str | None
    last_call: CallReport | None

    def __str__(self) -> str:
        if not self.enabled:
            return f"{self.model}: not enabled; call hf_fastdecode.enable(model)"
        able = "stock decoding" if self.model_reason else "shared-context KV"
        why = f" ({self.model_reason})" if self.model_reason else ""
        layers = "" if self.layer_count is None else f"{self.layer_count} layers, "
        lines = [f"{self.model}: enabled, {layers}{able}{why}"]
        lines += self.last_call.lines() if self.last_call else ["no generate call yet"]
        return "\n".join(lines)


def _layer_lines(layers: list[str]) -> list[str]:
    """One line for each run of layers that did the same."""
    lines, first = [], 0
    for what, run in groupby(layers):
        last = first + len(list(run)) - 1
        lines.append(f"  layer{'' if first == last else 's'} {first}{'' if first == last else f'-{last}'}: {what}")
        first = last + 1
    return lines
