"""Processes that tests start have one thread each: by more, sums may be rounded otherwise."""

from ...settings import one_thread  # noqa: F401
