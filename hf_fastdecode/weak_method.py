"""Methods that an instance may hold without a reference cycle through itself."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Final
from weakref import ref

STATE_ATTRIBUTE: Final = "_hf_fastdecode"
"""Attribute of an enabled model that holds the state of its overrides."""


class WeakMethod:
    """A function bound to an instance that it does not keep alive.

    A bound method among the instance's own attributes would be a reference cycle: the weights of a deleted model would
    wait for the garbage collector. A deep copy of the instance gets a method of its own; pickled, this is the method
    that the class has by this name.

    Args:
        function: Called with the instance first.
        instance: What it is bound to.
    """

    # The slots are not among what `functools.wraps` copies to a wrapper of this.
    __slots__ = ("__dict__", "__weakref__", "_function", "_instance")

    def __init__(self, function: Callable[..., Any], instance: object):
        functools.update_wrapper(self, function)
        self._function = function
        self._instance = ref(instance)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """That of bound methods, by which `isinstance` and so `inspect` know one."""
        return MethodType

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function."""
        return self._function

    @property
    def __self__(self) -> Any:
        """The instance; raises ReferenceError if it is gone."""
        if (instance := self._instance()) is None:
            raise _gone(self._function)
        return instance

    def __getattr__(self, name: str) -> Any:
        """The function's attributes, such as ``__code__``."""
        if name in WeakMethod.__slots__:  # of a copy that has not got them yet
            raise AttributeError(name)
        return getattr(self.__func__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if (instance := self._instance()) is None:
            raise _gone(self._function)
        return self._function(instance, *args, **kwargs)  # as torch.compile traces it

    def __eq__(self, other: object) -> bool:
        """As of bound methods: the same function of the same instance."""
        return type(other) is WeakMethod and (self.__func__, self._instance) == (other.__func__, other._instance)

    def __hash__(self) -> int:
        """Of the function: instances need not have one."""
        return hash(self.__func__)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakMethod:
        """Bound to the copy of the instance."""
        return type(self)(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self.__self__, self.__func__.__name__)


def _gone(function: Callable[..., Any]) -> ReferenceError:
    """The error of a method whose instance is gone."""
    name = getattr(function, "__name__", "this method")
    return ReferenceError(f"the model that {name} belongs to is gone; keep the model, not its {name} alone")
