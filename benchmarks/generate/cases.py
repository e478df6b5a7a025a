"""Whole calls of `generate` and growing completions as data, without torch: the cases, and the names of the ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count, pairwise
from math import gcd, log
from typing import Any, Final

from hf_fastdecode.generation.options import Options
from hf_fastdecode.measurement.rows import Case

WAYS: dict[str, str] = {
    "stock": "transformers' generate, dynamic cache",
    "stock-static": "the same with cache_implementation='static', which transformers compiles on CUDA",
    "stock-slim-k": "the same with a slim model of this shape that caches keys only; multi-head shapes only",
    "stock-slim-k+r": "the same with keys and d/8 V-coordinates",
    "quantized-fp8": "stock with transformers' QuantizedCache in fp8",
    "quantized-hqq": "the same in 8 bits by HQQ, where hqq is installed",
    "stock-beams": "transformers' beam search, with as many beams as samples",
    "stock-lookup": "transformers' prompt lookup, 8 tokens at a time; one sample only",
    "stock-hidden-states": "stock with output_hidden_states",
    "shared": "hf_fastdecode.enable(model), as it is",
    "slim-k": "the same with a slim model of this shape: what one row alone has is stored as keys only",
    "slim-k+r": "the same as keys and d/8 V-coordinates",
    "eager": "hf_fastdecode, mode='eager'",
    "graph": "hf_fastdecode, mode='graph'",
    "beams": "hf_fastdecode under transformers' beam search, with as many beams as samples",
    "lookup": "hf_fastdecode under transformers' prompt lookup; one sample only",
    "hidden-states": "hf_fastdecode under transformers' loop that keeps hidden states",
    "shared-no-attention": "the ceiling of shared: the same loop, attention left out",
    "eager-no-attention": "the ceiling of eager",
    "graph-no-attention": "the ceiling of graph",
}
"""Ways and what they are. ``+name=value`` after one of ours passes an option to `enable`: ``graph+sampler=fast``."""

LOOPS = ("beams", "lookup", "hidden-states")
"""Ways of ours that keep transformers' own loop; each has a ``stock-`` one."""

_STOCK_WAYS = (
    *("stock", "stock-static", "stock-slim-k", "stock-slim-k+r", "quantized-fp8", "quantized-hqq"),
    *(f"stock-{name}" for name in LOOPS),
)

DEFAULT_WAYS = (
    *("stock", "stock-static", "shared", "eager", "graph"),
    *("eager-no-attention", "graph-no-attention"),
)


def parse_way(name: str) -> tuple[str, dict[str, Any]]:
    """The way and the options of a name such as ``graph+sampler=fast``; ValueError where one is unknown."""
    base = max((way for way in WAYS if f"{name}+".startswith(f"{way}+")), key=len, default=name.partition("+")[0])
    options = name.removeprefix(base).split("+")[1:]
    if base not in WAYS:
        raise ValueError(f"a way is one of {', '.join(WAYS)}, got {base!r}")
    if options and (base in _STOCK_WAYS or not all("=" in option for option in options)):
        raise ValueError(
            f"options are written NAME=VALUE behind one of ours, such as graph+sampler=fast, got {name!r}"
        )
    given = {key: _value(value) for key, _, value in (option.partition("=") for option in options)}
    named_by_mode = not base.startswith("slim") and base not in LOOPS  # others have a way for each mode
    names = [field.name for field in fields(Options) if field.name != "mode" or not named_by_mode]
    if unknown := next((key for key in given if key not in names), None):
        raise ValueError(f"an option of a way is one of {', '.join(names)}, got {unknown!r} in {name!r}")
    if given:
        Options(**given)
    return base, given


def _value(text: str) -> Any:
    return text == "True" if text in ("True", "False") else int(text) if text.isdecimal() else text


TREE: Final = " tree "
"""Stands between shape and tree in a row."""


@dataclass(frozen=True)
class PromptTree:
    """Prompts of `shared` tokens, then `own` tokens of each of `problems`, with `samples` completions each."""

    shared: int
    problems: int
    own: int
    samples: int

    @classmethod
    def parse(cls, text: str) -> PromptTree:
        """The tree of ``SHARED+PROBLEMSxOWNxSAMPLES``, such as ``2400+8x512x128``; ValueError for another text."""
        first, plus, rest = text.partition("+")
        numbers = [first, *rest.split("x")]
        if not plus or len(numbers) != 4 or not all(number.isdecimal() and int(number) for number in numbers):
            raise ValueError(f"a tree is SHARED+PROBLEMSxOWNxSAMPLES, such as 2400+8x512x128, got {text!r}")
        return cls(*map(int, numbers))

    @classmethod
    def of_row(cls, shape: str) -> PromptTree | None:
        """The tree that stands after the shape in a row, if one does."""
        _, found, text = shape.partition(TREE)
        return cls.parse(text) if found else None

    @property
    def tokens(self) -> int:
        return self.shared + self.problems * self.own

    def __str__(self) -> str:
        return f"{self.shared}+{self.problems}x{self.own}x{self.samples}"

    def case(self, shape: str, new_tokens: int, dtype: str = "bfloat16") -> GenerateCase:
        context, samples = self.shared + self.own, self.problems * self.samples
        return GenerateCase(shape, context, samples, new_tokens, dtype, tree=self)


@dataclass(frozen=True)
class GenerateCase(Case):
    """One setting: `samples` completions of up to `new_tokens` tokens after a prompt of `context` tokens.

    `finish` is ``FROM-TO``: rows end after FROM to TO tokens, spread evenly, TO being `new_tokens`; ``~MEAN``: after
    MEAN tokens on average, spread as where each token may be the last, the longest after `new_tokens`; or empty: every
    row runs to the end.
    """

    shape: str  # a named shape, ``embedded``, or a checkpoint's path or hub id
    context: int  # tokens of the prompt, those of an image among them; with an encoder, those it encodes
    samples: int
    new_tokens: int
    dtype: str = "bfloat16"  # of weights and cache
    finish: str = ""
    tree: PromptTree | None = None  # several prompts that share, of `context` tokens each; `samples` rows in all

    def __post_init__(self) -> None:
        if min(self.context, self.samples) < 1 or self.new_tokens < 2:
            raise ValueError(f"context and samples must be at least 1 and new_tokens at least 2, got {self}")
        first, last = self.finish_bounds
        if not 1 <= first <= last == self.new_tokens:
            raise ValueError(f"rows must finish between 1 and new_tokens = {self.new_tokens}, got {self.finish!r}")
        if self.tree is not None and self.finish:
            raise ValueError(f"rows of a tree run to the end, got finish={self.finish!r} with {self.tree}")

    @property
    def prompts(self) -> int:
        return 1 if self.tree is None else self.tree.problems

    @property
    def prompt_tokens(self) -> int:
        return self.context if self.tree is None else self.tree.tokens

    @property
    def finish_bounds(self) -> tuple[int, int]:
        """Tokens of the first row to end and of the last."""
        if not self.finish or self.finish_mean:
            return self.finish_mean or self.new_tokens, self.new_tokens
        first, _, last = self.finish.partition("-")
        return int(first), int(last)

    @property
    def finish_mean(self) -> int:
        """Tokens after which rows end on average, if `finish` says so; else 0."""
        return int(self.finish[1:]) if self.finish.startswith("~") else 0

    def lengths(self) -> list[int]:
        """Tokens that each row draws: the longest first, then in an order that is the same each time."""
        first, last = self.finish_bounds
        steps = max(1, self.samples - 1)
        spread = [last - (last - first) * index // steps for index in range(self.samples)]
        if mean := self.finish_mean:
            shares = ((index + 0.5) / self.samples for index in range(self.samples))
            spread = [last, *(min(last, max(1, round(-mean * log(share)))) for share in shares)][: self.samples]
        stride = next(step for step in count(self.samples // 2 + 1) if gcd(step, self.samples) == 1)
        return [spread[index * stride % self.samples] for index in range(self.samples)]

    def columns(self) -> dict[str, Any]:
        columns = asdict(self)
        del columns["tree"]
        return columns if self.tree is None else columns | {"shape": f"{self.shape}{TREE}{self.tree}"}

    def call_columns(self) -> dict[str, Any]:
        """The columns of cases about a call in which all rows run to the end."""
        columns = self.columns()
        return {name: columns[name] for name in ("shape", "context", "samples", "new_tokens", "dtype")}


@dataclass(frozen=True)
class CompletionCase(Case):
    """A span of the steps of one call, whose samples all run to the end: from ``marks[index]`` to the next mark.

    `marks` are numbers of tokens per sample at which time is taken, rising; the last one ends the call.
    """

    call: GenerateCase
    marks: tuple[int, ...]
    index: int

    @property
    def span(self) -> tuple[int, int]:
        """Tokens per sample at its beginning and at its end."""
        return self.marks[self.index], self.marks[self.index + 1]

    def kv_tokens(self) -> float:
        """Mean tokens per step whose keys and values must be read: each prompt's once, and each sample's own."""
        first, last = self.span
        return self.call.prompt_tokens + self.call.samples * (first + last) / 2

    def columns(self) -> dict[str, Any]:
        first, last = self.span
        return self.call.call_columns() | {"from_token": first, "to_token": last}


CACHES: dict[str, str] = {
    "cold": "no compiled kernels on disk",
    "warm": "the kernels that an earlier process has compiled",
}
"""What a fresh process finds on disk."""


@dataclass(frozen=True)
class FirstCallsCase(Case):
    """Calls of a fresh process that finds `caches`, one of `CACHES`."""

    call: GenerateCase
    caches: str

    def columns(self) -> dict[str, Any]:
        return self.call.call_columns() | {"caches": self.caches}


KINDS: dict[str, str] = {
    "products": "with weights, those of experts and of the head among them",
    "attention": "also appending keys and values",
    "pointwise": "norms, rotary embedding, activations",
    "sampling": "drawing tokens",
    "copies": "and lookups",
    "other": "the rest",
}
"""What kernels compute."""

PARTS = ("first token", "step")


@dataclass(frozen=True)
class ProfileCase(Case):
    """The first token or a step of a call, one of `PARTS`."""

    call: GenerateCase
    part: str

    def columns(self) -> dict[str, Any]:
        return self.call.call_columns() | {"part": self.part}


def spans(call: GenerateCase, marks: Sequence[int]) -> list[CompletionCase]:
    """The cases of a call, one for each pair of neighbouring marks; ValueError unless these rise from 1 to its end."""
    rising = all(before < after for before, after in pairwise(marks))
    if len(marks) < 2 or not rising or marks[0] < 1 or marks[-1] != call.new_tokens:
        raise ValueError(f"marks must be two or more, rising, and at least 1, got {','.join(map(str, marks))}")
    return [CompletionCase(call, tuple(marks), index) for index in range(len(marks) - 1)]
