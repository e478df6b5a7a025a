"""The options of `hf_fastdecode.enable`."""

from __future__ import annotations

from dataclasses import dataclass

from ..attention.backends import ALL_BACKENDS, BACKEND_VARIABLE, backend_of_environment

MODES = ("auto", "eager", "graph", "compile")
"""What ``mode=`` takes."""

SAMPLERS = ("auto", "hf", "fast")
"""What ``sampler=`` takes."""

CHOICES = {"backend": ALL_BACKENDS, "mode": MODES, "sampler": SAMPLERS}
"""Options that take one of some words, by name."""

_REUSED_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Options:
    """How an enabled model generates; the fields are the keyword arguments of `hf_fastdecode.enable`, explained there.

    Raises:
        ValueError: A field is out of its bounds.
    """

    backend: str = "auto"
    mode: str = "auto"
    sampler: str = "auto"
    min_shared_tokens: int = 32
    min_saved_tokens: int = 64
    max_prefill_tokens: int = 16384
    reuse_prefix: bool | int = False

    @property
    def reused_bytes(self) -> int:
        """Most bytes of keys and values to keep for later calls."""
        return _REUSED_BYTES if self.reuse_prefix is True else int(self.reuse_prefix)

    @property
    def forced(self) -> list[str]:
        """Those that were not left to ``auto``, as they were written."""
        return [f"{name}={getattr(self, name)!r}" for name in CHOICES if getattr(self, name) != "auto"]

    def __post_init__(self) -> None:
        forced = backend_of_environment()
        if self.backend == "auto" and forced:
            if forced not in ALL_BACKENDS:
                raise ValueError(f"${BACKEND_VARIABLE} must be one of {', '.join(ALL_BACKENDS)}, got {forced!r}")
            object.__setattr__(self, "backend", forced)
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if not isinstance(self.reuse_prefix, int) or self.reuse_prefix < 0:
            raise ValueError(
                f"reuse_prefix must be True, False, or the most bytes to keep, at least 0, got {self.reuse_prefix!r}"
            )
        for name, least in (("min_shared_tokens", 1), ("min_saved_tokens", 0), ("max_prefill_tokens", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
