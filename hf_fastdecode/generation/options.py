"""Options of `hf_fastdecode.enable`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..attention.torch_operators import BACKEND_VARIABLE, BACKENDS, Backend, backend_of_environment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Mode = Literal["auto", "eager", "graph"]
"""Values of ``mode=``."""

Sampler = Literal["auto", "hf", "fast"]
"""Values of ``sampler=``."""

FuseProjections = Literal["auto", True, False]
"""Values of ``fuse_projections=``."""

LogProbs = Literal["auto", "trainer"]
"""Values of ``log_probs=``."""

CHOICES: dict[str, tuple[str | bool, ...]] = {
    "backend": BACKENDS,
    "mode": get_args(Mode),
    "sampler": get_args(Sampler),
    "fuse_projections": get_args(FuseProjections),
    "log_probs": get_args(LogProbs),
}
"""Options with a fixed set of values, by name."""

_REUSED_BYTES = 2 * 2**30

FEWEST_SAVED = 64
"""Tokens that sharing must save with ``min_saved_tokens="auto"``, also where time does not ask for more."""

TOKENS_OF_A_PASS = 2048
"""Tokens whose prefill takes about as long as the fixed cost of a pass."""

_STOCK_OPTIONS = ("mode='eager'", "sampler='hf'", "fuse_projections=False", "log_probs='trainer'")
"""Options that a stock call fulfils anyway."""

_INTEGERS: dict[str, tuple[int, object, str]] = {
    "min_shared_tokens": (1, ..., ""),
    "min_saved_tokens": (0, "auto", ', or "auto"'),
    "max_prefill_tokens": (1, ..., ""),
    "max_rows": (1, None, ", or None for no bound"),
}
"""Options that are integers: the least one, another value, and how errors name that."""

_SHORTEST_TIMEOUT = 3
"""Seconds within which a process that lives tells its peers so, with all its cores busy."""


@dataclass(frozen=True)
class Options:
    """Options of an enabled model; the fields are documented in `hf_fastdecode.enable`.

    Raises:
        ValueError: A field has an invalid value.
    """

    backend: Backend = "auto"
    mode: Mode = "auto"
    sampler: Sampler = "auto"
    fuse_projections: FuseProjections = "auto"
    min_shared_tokens: int = 32
    min_saved_tokens: int | Literal["auto"] = "auto"
    max_prefill_tokens: int = 16384
    max_rows: int | None = None
    reuse_prefix: bool | int = False
    share_forward: bool = True
    log_probs: LogProbs = "auto"
    sequence_parallel: Literal["auto", False] | ProcessGroup | DeviceMesh = False
    peer_timeout: float = 60

    @property
    def reused_bytes(self) -> int:
        """Maximum bytes of keys and values to keep for later calls."""
        return _REUSED_BYTES if self.reuse_prefix is True else int(self.reuse_prefix)

    @property
    def fewest_saved(self) -> int:
        """Least tokens that sharing must save, as far as that does not depend on the call; at least 1."""
        return FEWEST_SAVED if isinstance(self.min_saved_tokens, str) else max(1, self.min_saved_tokens)

    def worth_passes(self, passes: int) -> int:
        """Tokens that a common prefix must save if sharing it adds so many prefill passes; at least 1."""
        return passes * TOKENS_OF_A_PASS + 1 if isinstance(self.min_saved_tokens, str) else self.fewest_saved

    @property
    def forced(self) -> list[str]:
        """Options that a call fulfils or raises, not left at their default, formatted as ``name=value``."""
        forced = [f"{name}={getattr(self, name)!r}" for name in CHOICES if getattr(self, name) != "auto"]
        return forced if self.max_rows is None else [*forced, f"max_rows={self.max_rows}"]

    @property
    def unmet_by_stock(self) -> list[str]:
        """Options of `forced` that a call which runs stock does not fulfil."""
        return [option for option in self.forced if option not in _STOCK_OPTIONS]

    @property
    def needs_capture(self) -> str | None:
        """The option that requires captured steps, formatted as ``name=value``, or None."""
        if self.mode == "graph":
            return "mode='graph'"
        return "fuse_projections=True" if self.fuse_projections is True else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return self  # it may hold a process group

    def __post_init__(self) -> None:
        forced = backend_of_environment()
        if self.backend == "auto" and forced:
            if forced not in BACKENDS:
                raise ValueError(f"${BACKEND_VARIABLE} must be one of {', '.join(BACKENDS)}, got {forced!r}")
            object.__setattr__(self, "backend", forced)
        self._check_choices()
        if not isinstance(self.reuse_prefix, int) or self.reuse_prefix < 0:
            raise ValueError(
                "reuse_prefix must be True (2 GiB), False, or the most bytes of keys and values to keep, at least 0, "
                f"got {self.reuse_prefix!r}"
            )
        if not isinstance(self.share_forward, bool):
            raise ValueError(f"share_forward must be True or False, got {self.share_forward!r}")
        if not (self.sequence_parallel is False or self.sequence_parallel == "auto"):
            # Its import needs torch, and options are also read where its seconds would be lost.
            from ..parallel.ranks import require_sequence_group

            require_sequence_group(self.sequence_parallel)
        for name, (least, allowed, otherwise) in _INTEGERS.items():
            value = getattr(self, name)
            if value == allowed:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}{otherwise}, got {value!r}")
        seconds = self.peer_timeout
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds >= _SHORTEST_TIMEOUT:
            raise ValueError(f"peer_timeout must be a number of at least {_SHORTEST_TIMEOUT} seconds, got {seconds!r}")

    def _check_choices(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if (name, value) == ("mode", "compile"):
                raise ValueError(
                    "mode='compile' is gone: captured steps are as fast without compiling; use mode='auto', which "
                    "captures where that pays, or mode='graph'"
                )
            if value not in known or type(value) not in map(type, known):  # 1 is equal to True
                raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")
        if self.mode == "eager" and self.fuse_projections is True:
            raise ValueError(
                "fuse_projections=True cannot run with mode='eager', since only captured steps fuse; use mode='auto' "
                "or fuse_projections='auto'"
            )
