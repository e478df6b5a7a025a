"""The settings of the papers' tables and figures on decoding speed, scaled to one GPU, with what they published.

Facts only; the numbers are the papers': Bifurcated attention (arXiv 2403.08845) tables 1, 6 and 7 on one H100, and
Hydragen (arXiv 2402.05099) figures 1, 4 and 5 and tables 1 and 2 on eight A100 (figure 5: on one). Nothing here needs
torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product

from .generate.cases import GenerateCase
from .ops.cases import OpCase, shared

_K = 1024


@dataclass(frozen=True)
class PaperTable:
    """One table or figure: where it stands in which paper, how the setting differs, ways measured by default, cases.

    The paper reports `published` for its method, in a `unit`, by context and samples.
    """

    source: str
    scaled: str
    ways: tuple[str, ...]
    cases: tuple[GenerateCase, ...] | tuple[OpCase, ...]
    unit: str = ""
    published: dict[tuple[int, int], float] = field(default_factory=dict)


_FULL = ("stock", "stock-static", "eager", "graph", "graph-no-attention")
_OURS = ("stock", "graph", "graph-no-attention")


def _cases(shape: str, contexts: Iterable[int], samples: Iterable[int], new_tokens: int) -> tuple[GenerateCase, ...]:
    return tuple(GenerateCase(shape, context, n, new_tokens) for context, n in product(contexts, samples))


def _columns(first: int, longest: int = 32 * _K, **columns: str) -> dict[tuple[int, int], float]:
    """Columns of a table, ``K8="8.63 11.74"``: values at 8K context for `first` samples, twice as many, ...

    None is of more tokens than `longest`, which is what Hydragen's "16K" leaves for the prompt.
    """
    return {
        (min(longest, int(name[1:]) * _K), first << step): float(value)
        for name, text in columns.items()
        for step, value in enumerate(text.split())
    }


# Milliseconds a step, "Bifurcated" with torch.compile.
_TABLE_1 = _columns(
    1, K8="8.64 11.77 12.03 12.36 12.60", K16="12.16 17.17 17.33 18.07 18.46", K32="20.90 29.34 29.73 30.30 30.66"
)
_TABLE_6 = _columns(
    1,
    K8="8.63 11.74 12.03 12.36 12.59 13.47 15.35 19.56 27.15 44.33 81.14",
    K16="12.16 17.17 17.33 18.07 18.46 19.92 22.96 28.98 40.07 65.02 117.75",
    K32="20.90 29.34 29.73 30.30 30.66 32.15 35.25 41.44",
)
_TABLE_7 = _columns(
    1,
    K8="10.56 11.35 11.52 11.79 11.72 12.50 13.87 17.03 24.38 39.08 72.24",
    K16="15.16 15.99 16.20 16.61 16.68 17.77 19.90 24.90 33.76",
    K32="22.79 23.72 23.98 24.59 24.87 27.01 30.31 37.60 52.06",
)
# Thousands of tokens a second on eight A100, "Hydragen".
_HYDRAGEN_1 = _columns(
    first=32,
    longest=16256,
    K1="2.8 5.2 8.4 13.5 19.8 25.5 27.8",
    K2="2.7 4.9 8.6 10.9 19.6 25.3 27.4",
    K4="2.8 5.0 8.4 10.9 19.4 24.9 25.4",
    K8="2.6 4.9 8.4 11.0 18.8 24.0 25.2",
    K16="2.5 4.7 8.2 12.5 17.7 22.3 22.7",
)
_HYDRAGEN_2 = _columns(
    first=32,
    longest=16128,
    K1="2.7 5.0 8.4 12.9 18.6 23.6",
    K2="2.6 4.9 8.3 11.1 18.4 23.0",
    K4="2.6 4.9 8.2 11.5 18.2 21.9",
    K8="2.6 4.8 8.1 12.4 17.1 22.2",
    K16="2.5 4.6 7.9 12.0 16.8 20.9",
)


def _bifurcated(
    table: str, ways: tuple[str, ...], shape: str, doublings: int, published: dict[tuple[int, int], float]
) -> PaperTable:
    return PaperTable(
        f"Bifurcated attention, table {table}",
        "as there, on your GPU; 128 new tokens, which the paper leaves open",
        ways,
        _cases(shape, (8 * _K, 16 * _K, 32 * _K), [1 << step for step in range(doublings)], 128),
        "ms/step on an H100, compiled",
        published,
    )


PAPER_TABLES: dict[str, PaperTable] = {
    "bifurcated-1": _bifurcated("1: a 7B multi-head model, eager and captured", _FULL, "7b-mha", 5, _TABLE_1),
    "bifurcated-6": _bifurcated("6: a 7B multi-head model, up to 2048 samples", _OURS, "7b-mha", 12, _TABLE_6),
    "bifurcated-7": _bifurcated("7: a 7B model with 8 KV heads", _OURS, "7b-gqa", 12, _TABLE_7),
    "hydragen-fig1": PaperTable(
        "Hydragen, figure 1: CodeLlama-13B, a prompt of 2048 tokens, growing batches",
        "one GPU for the paper's eight; batches that do not fit say so",
        _OURS,
        _cases("13b-mha", (2 * _K,), (16, 32, 64, 128, 256, 512, 1024), 128),
    ),
    "hydragen-fig4": PaperTable(
        "Hydragen, figure 4: CodeLlama-13B, a fixed batch, growing prompts",
        "one GPU for the paper's eight: 512 samples for its 1024, whose suffixes alone are 107 GB",
        ("graph", "graph-no-attention"),
        _cases("13b-mha", (_K, 2 * _K, 4 * _K, 8 * _K, 16256), (512,), 128),
    ),
    "hydragen-fig5": PaperTable(
        "Hydragen, figure 5: attention alone, 8 query heads and 1 KV head of 128 numbers",
        "as there; the figure's axes are not in its text, so these span its range",
        ("ours", "plain", "recipe", "hydragen", "bifurcated"),
        tuple(
            shared(n, context, suffix, 8, 1)
            for suffix, context, n in product((64, 256, 1024), (_K, 4 * _K, 16 * _K), (64, 256, 1024))
        ),
    ),
    "hydragen-table1": PaperTable(
        "Hydragen, table 1: CodeLlama-7B, 128 new tokens",
        "one GPU for the paper's eight; batches that do not fit say so",
        _OURS,
        _cases("7b-mha", (_K, 2 * _K, 4 * _K, 8 * _K, 16256), [32 << step for step in range(7)], 128),
        "thousand tokens/s on eight A100",
        _HYDRAGEN_1,
    ),
    "hydragen-table2": PaperTable(
        "Hydragen, table 2: CodeLlama-7B, 256 new tokens",
        "one GPU for the paper's eight; batches that do not fit say so",
        _OURS,
        _cases("7b-mha", (_K, 2 * _K, 4 * _K, 8 * _K, 16128), [32 << step for step in range(6)], 256),
        "thousand tokens/s on eight A100",
        _HYDRAGEN_2,
    ),
}
