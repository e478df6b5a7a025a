"""Methods that an instance may hold without a reference cycle through itself."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
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
    __slots__ = ("__dict__", "__func__", "__weakref__", "_instance", "_signature")

    def __init__(self, function: Callable[..., Any], instance: object):
        functools.update_wrapper(self, function)
        self.__func__ = function
        self._instance = ref(instance)
        self._signature: inspect.Signature | None = None

    @property
    def __self__(self) -> Any:
        """The instance.

        Raises:
            ReferenceError: It is gone.
        """
        instance = self._instance()
        if instance is None:
            name = getattr(self.__func__, "__name__", "this method")
            raise ReferenceError(f"the model that {name} belongs to is gone; keep the model, not its {name} alone")
        return instance

    @property
    def __signature__(self) -> inspect.Signature:
        """The function's, less the instance; made once, since transformers asks for it several times per call."""
        if self._signature is None:
            whole = inspect.signature(self.__func__)
            self._signature = whole.replace(parameters=list(whole.parameters.values())[1:])
        return self._signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.__func__(self.__self__, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        """As of bound methods: the same function of the same instance."""
        return isinstance(other, WeakMethod) and (self.__func__, self._instance) == (other.__func__, other._instance)

    def __hash__(self) -> int:
        """Of the function: instances need not have one."""
        return hash(self.__func__)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakMethod:
        """Bound to the copy of the instance."""
        return type(self)(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self.__self__, self.__func__.__name__)
