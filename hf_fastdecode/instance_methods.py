"""Attributes and methods of an instance: set for some passes, without a reference cycle, or of its class alone."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from types import MethodType
from typing import Any, Final, NamedTuple, TypeGuard
from weakref import ref

from torch import nn

STATE_ATTRIBUTE: Final = "_hf_fastdecode"
"""Attribute of an enabled model that holds the state of its overrides."""


class WeakMethod:
    """A function bound to an instance that it does not keep alive.

    A bound method among the instance's attributes would be a reference cycle: the weights of a deleted model would
    wait for the garbage collector. A deep copy of the instance gets a new method; pickled, this is the method
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
        if (instance := self._instance()) is None:
            raise _gone(self._function)
        return self._function(instance, *args, **kwargs)  # as torch.compile traces it

    def __eq__(self, other: object) -> bool:
        """Equality of bound methods: the same function of the same instance."""
        return type(other) is WeakMethod and (self.__func__, self._instance) == (other.__func__, other._instance)

    def __hash__(self) -> int:
        """The function's hash: instances need not be hashable."""
        return hash(self.__func__)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakMethod:
        """Bound to the copy of the instance."""
        return type(self)(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self.__self__, self.__func__.__name__)


def _gone(function: Callable[..., Any]) -> ReferenceError:
    name = getattr(function, "__name__", "this method")
    return ReferenceError(f"the model that {name} belongs to is gone; keep the model, not its {name} alone")


class Change(NamedTuple):
    """An instance's attribute and its new value."""

    owner: object
    attribute: str
    value: Any


class Switch:
    """Sets attributes of instances for the time of some passes, which may overlap in several threads.

    The first pass to enter sets an attribute, the last to leave restores what was there.

    Args:
        replaces: Whether attributes that have a value are set too, which are otherwise left as they are.
    """

    def __init__(self, *, replaces: bool):
        self._replaces, self._lock = replaces, Lock()
        self._entries: dict[tuple[int, str], tuple[dict[str, Any], int]] = {}  # what was there, and passes

    @contextmanager
    def on(self, changes: Sequence[Change]) -> Iterator[None]:
        """Context of a pass in which these attributes have these values."""
        with self._lock:
            for owner, attribute, value in changes:
                attributes, key = vars(owner), (id(owner), attribute)
                if (entry := self._entries.get(key)) is None:
                    if not self._replaces and attributes.get(attribute) is not None:
                        continue
                    entry = {attribute: attributes[attribute]} if attribute in attributes else {}, 0
                self._entries[key] = entry[0], entry[1] + 1
                attributes[attribute] = value
        try:
            yield
        finally:
            with self._lock:
                for owner, attribute, _ in changes:
                    before, count = self._entries.pop((id(owner), attribute), ({}, 0))
                    if count > 1:
                        self._entries[id(owner), attribute] = before, count - 1
                    elif before:  # in its place among the attributes
                        vars(owner).update(before)
                    elif count:
                        vars(owner).pop(attribute, None)

    def otherwise(self, owner: object, attribute: str) -> Any:
        """The attribute's value while no pass sets it, None if there is none."""
        with self._lock:
            before, count = self._entries.get((id(owner), attribute), ({}, 0))
            return (before if count else vars(owner)).get(attribute)


def is_unchanged(module: nn.Module) -> bool:
    """Whether a call of the module is a call of its class's `forward`, without hooks."""
    named = vars(module)
    if named["_forward_hooks"] or named["_forward_pre_hooks"] or "_hf_hook" in named or "_call_impl" in named:
        return False
    forward = named.get("forward")
    return forward is None or (isinstance(forward, types.MethodType) and forward.__func__ is type(module).forward)


def is_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a call of the module is `F.linear` and no more; other libraries replace `nn.Linear.forward` too."""
    if type(module) is not nn.Linear or not is_unchanged(module):
        return False
    return getattr(nn.Linear.forward, "__globals__", None) is vars(nn.modules.linear)
