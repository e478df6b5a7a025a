"""Switches that put methods and calls on one instance, and take them off again.

`WrappedMethods` lasts from `enable` to `disable`, and is removable even after other code has overridden the same
methods. `replaced_calls` last for the time of forward passes, in any number of threads.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from ...instance_methods import STATE_ATTRIBUTE, WeakMethod

# Originals of our overrides that could not be removed, because other code had wrapped them.
_BURIED_ATTRIBUTE = "_hf_fastdecode_buried"

Wrapper = Callable[..., Any]
"""Called as ``override(state, instance, *args, **kwargs)``."""

_LASTING = frozenset({"forward", "generate"})
"""Overrides that `left_out` keeps: passes over a given cache and calls within a call need them."""

_left_out: ContextVar[object] = ContextVar("hf_fastdecode_left_out", default=None)

_keys = count()
_OURS: WeakKeyDictionary[Callable[..., Any], int] = WeakKeyDictionary()


class WrappedMethods:
    """Overrides of an instance's methods, and the originals."""

    def __init__(self, instance: object, wrappers: Mapping[str, Wrapper]):
        self._wrappers = wrappers
        self.key = next(_keys)  # shared by copies of the instance
        # Existing instance-level methods, e.g. accelerate's forward.
        self._saved = {name: own for name in wrappers if (own := own_method(instance, name)) is not None}

    def install(self, instance: object, state: object) -> None:
        """Install the overrides; `state` holds this object as its ``methods``."""
        vars(instance)[STATE_ATTRIBUTE] = state
        for name, wrapper in self._wrappers.items():
            # A method is rebound by deepcopy of the instance; a closure would not be.
            method = _wrapped(wrapper, name, self.key, _of_class(type(instance), name))
            if name in self._saved:  # transformers inspects forward's signature
                own = inspect.signature(self._saved[name])
                first = inspect.Parameter("_instance", inspect.Parameter.POSITIONAL_ONLY)
                rest = [
                    parameter for name, parameter in own.parameters.items() if name != first.name
                ]  # their wrapper wraps ours
                method.__signature__ = own.replace(parameters=[first, *rest])  # type: ignore[attr-defined]
            vars(instance)[name] = WeakMethod(method, instance)

    def uninstall(self, instance: object) -> None:
        """Restore the originals. Overrides installed later by other code stay."""
        state = vars(instance).get(STATE_ATTRIBUTE)
        if state is None or state.methods is not self:
            return
        buried = {}
        for name in self._wrappers:
            saved = self._saved.get(name)
            if _key_of(vars(instance).get(name)) != self.key:
                if saved is not None:  # their wrapper may call ours, which then forwards to this
                    buried[self.key, name] = saved
            elif saved is not None:
                vars(instance)[name] = saved
            else:
                del vars(instance)[name]
        if buried:
            vars(instance).setdefault(_BURIED_ATTRIBUTE, {}).update(buried)
        del vars(instance)[STATE_ATTRIBUTE]

    def wraps(self, name: str) -> bool:
        """Whether the original is of the instance, put there by other code, and not of its class."""
        return name in self._saved

    def original(self, instance: object, name: str) -> Callable[..., Any]:
        """The original method, bound to the instance."""
        return self._saved[name] if name in self._saved else partial(_of_class(type(instance), name), instance)


def _of_class(kind: type, name: str) -> Callable[..., Any]:
    """A method as the class has it, called with the instance first, also where it is static."""
    function: Callable[..., Any] = getattr(kind, name)
    for base in kind.__mro__:  # in a third of the time of `inspect.getattr_static`, in each pass
        if name in vars(base):
            if not isinstance(vars(base)[name], staticmethod):
                return function
            break

    @functools.wraps(function)
    def of_instance(_: object, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return of_instance


def _wrapped(wrapper: Wrapper, name: str, key: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Method that calls `wrapper` while the state has this key, with the signature of `original` for generate.

    Once uninstalled, it forwards to the original, since other code's wrappers may still call it.
    """

    lasts = name in _LASTING

    @functools.wraps(original)
    def method(self: object, *args: Any, **kwargs: Any) -> Any:
        state = vars(self).get(STATE_ATTRIBUTE)
        if state is not None and state.methods.key == key:
            if not lasts and _left_out.get() is self:
                return state.methods.original(self, name)(*args, **kwargs)
            return wrapper(state, self, *args, **kwargs)
        if (saved := vars(self).get(_BURIED_ATTRIBUTE, {}).get((key, name))) is not None:
            return saved(*args, **kwargs)
        return original(self, *args, **kwargs)

    method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # asked for several times per call
    _OURS[method] = key
    return method


@contextmanager
def left_out(instance: object | None) -> Iterator[None]:
    """Context in which overrides of an instance that only prepare a call forward to the originals, in this thread.

    None ends that for a call within the context.
    """
    token = _left_out.set(instance)
    try:
        yield
    finally:
        _left_out.reset(token)


def _key_of(method: object) -> int | None:
    function = getattr(method, "__func__", None)
    return _OURS.get(function) if isinstance(function, types.FunctionType) else None


def own_method(instance: object, name: str) -> Callable[..., Any] | None:
    """Instance-level override of a class method by other code, or None.

    Skips our own overrides, which other code may put back after they were removed, and the class's own method bound to
    the instance, which our overrides unpickle to.
    """
    own = vars(instance).get(name)
    if isinstance(own, types.MethodType) and own.__func__ is getattr(type(instance), name):
        return None
    while (key := _key_of(own)) is not None:
        own = vars(instance).get(_BURIED_ATTRIBUTE, {}).get((key, name))
    return own


class ReplacedCall(NamedTuple):
    """A module's attribute, which only replaced calls set, and what is called in its place."""

    module: nn.Module
    attribute: str
    call: Callable[..., Any]


class _Switch:
    """Puts calls on modules for the time of some passes, which may overlap in several threads.

    The first pass to enter sets a module's attribute, the last to leave removes it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: dict[tuple[int, str], int] = {}

    def enter(self, calls: Iterable[ReplacedCall]) -> None:
        with self._lock:
            for module, attribute, call in calls:
                key = id(module), attribute
                count = self._entries.get(key, 0)
                if count == 0 and vars(module).get(attribute) is not None:
                    continue  # the user's own, such as a compiled call
                self._entries[key] = count + 1
                vars(module)[attribute] = call

    def leave(self, calls: Iterable[ReplacedCall]) -> None:
        with self._lock:
            for module, attribute, _ in calls:
                key = id(module), attribute
                count = self._entries.pop(key, 0)
                if count > 1:
                    self._entries[key] = count - 1
                elif count == 1:
                    vars(module).pop(attribute, None)

    def is_taken(self, module: nn.Module, attribute: str) -> bool:
        """Whether the attribute is the user's own, such as a compiled call, which `enter` leaves in place."""
        with self._lock:
            return vars(module).get(attribute) is not None and (id(module), attribute) not in self._entries


replaced_calls = _Switch()
