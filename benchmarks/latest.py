"""What is expensive to make is kept until another is asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from hf_fastdecode.measurement.calls import collect

T = TypeVar("T")


class Latest(Generic[T]):
    """The value of the latest key. It is dropped before another one is made, beside which it may not fit."""

    value: T

    def __init__(self) -> None:
        self.key: Hashable = None  # None while there is no value

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        if self.key != key:
            self.drop()
            self.value = make()
            self.key = key
        return self.value

    def drop(self) -> None:
        if self.key is not None:
            self.key = None
            del self.value
        collect()
