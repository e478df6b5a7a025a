"""Metrics over pools of judged samples: pass@k, pass@top-m and other rankers, intervals over problems.

Plain functions of numbers, without torch. `PassAtTopK` is a metric of `evaluate`, whose import takes seconds, so it is
imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .estimates import bootstrap_interval, pass_at_k
from .pool import Pool, ast_key, build_pools, text_key
from .rankers import RANKERS, Ranker, pass_at_ranker, pass_at_votes
from .top_m import pass_at_first_m, pass_at_n, pass_at_top_m, powers_of_two

if TYPE_CHECKING:
    from .evaluate_metric import PassAtTopK

__all__ = [
    "RANKERS",
    "PassAtTopK",
    "Pool",
    "Ranker",
    "ast_key",
    "bootstrap_interval",
    "build_pools",
    "pass_at_first_m",
    "pass_at_k",
    "pass_at_n",
    "pass_at_ranker",
    "pass_at_top_m",
    "pass_at_votes",
    "powers_of_two",
    "text_key",
]


def __getattr__(name: str) -> Any:
    if name == "PassAtTopK":
        from .evaluate_metric import PassAtTopK

        return PassAtTopK
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
