"""Methods of one instance, wrapped, and taken off again whatever others have put there since."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

STATE_ATTRIBUTE = "_hf_fastdecode"
"""Where an instance keeps the state that its wrapped methods work with."""

# What lay beneath methods of ours that could not be taken off, because others had wrapped them.
_BURIED_ATTRIBUTE = "_hf_fastdecode_buried"

Wrapper = Callable[..., Any]
"""Called with the state, the instance and the method's arguments."""

_keys = count()
_OURS: WeakKeyDictionary[Callable[..., Any], int] = WeakKeyDictionary()


class WrappedMethods:
    """Wrappers of an instance's methods, and what is beneath them.

    Args:
        instance: Whose methods.
        wrappers: By name.
    """

    def __init__(self, instance: object, wrappers: Mapping[str, Wrapper]):
        self._wrappers = wrappers
        self.key = next(_keys)  # a copy of the instance has the same methods, so the same key
        # An instance may carry its own versions already (accelerate puts a forward there).
        self._saved = {name: own for name in wrappers if (own := own_method(instance, name)) is not None}

    def install(self, instance: object, state: object) -> None:
        """Wrap the methods; `state` has these as its ``methods``."""
        vars(instance)[STATE_ATTRIBUTE] = state
        for name, wrapper in self._wrappers.items():
            # A bound method follows a deep copy of the instance, a closure over it would not.
            method = _wrapped(wrapper, name, self.key, getattr(type(instance), name))
            if name in self._saved:  # transformers reads a forward's parameters to know what it takes
                own = inspect.signature(self._saved[name])
                first = inspect.Parameter("_instance", inspect.Parameter.POSITIONAL_ONLY)
                rest = [
                    parameter for name, parameter in own.parameters.items() if name != first.name
                ]  # theirs wraps ours
                method.__signature__ = own.replace(parameters=[first, *rest])  # type: ignore[attr-defined]
            vars(instance)[name] = types.MethodType(method, instance)

    def uninstall(self, instance: object) -> None:
        """Put back what was there. A method that someone put there since is theirs, and stays."""
        state = vars(instance).get(STATE_ATTRIBUTE)
        if state is None or state.methods is not self:
            return
        buried = {}
        for name in self._wrappers:
            saved = self._saved.get(name)
            if _key_of(vars(instance).get(name)) != self.key:
                if saved is not None:  # theirs may call ours, which then passes the call on
                    buried[self.key, name] = saved
            elif saved is not None:
                vars(instance)[name] = saved
            else:
                del vars(instance)[name]
        if buried:
            vars(instance).setdefault(_BURIED_ATTRIBUTE, {}).update(buried)
        del vars(instance)[STATE_ATTRIBUTE]

    def original(self, instance: object, name: str) -> Callable[..., Any]:
        """The method beneath ours."""
        return self._saved[name] if name in self._saved else partial(getattr(type(instance), name), instance)


def _wrapped(wrapper: Wrapper, name: str, key: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls `wrapper` while the state has this key, with the signature of `original`: generate reads it.

    Without that state it is beneath what others put on the instance, and passes calls on to what was beneath itself.
    """

    @functools.wraps(original)
    def method(self: object, *args: Any, **kwargs: Any) -> Any:
        state = vars(self).get(STATE_ATTRIBUTE)
        if state is not None and state.methods.key == key:
            return wrapper(state, self, *args, **kwargs)
        if (saved := vars(self).get(_BURIED_ATTRIBUTE, {}).get((key, name))) is not None:
            return saved(*args, **kwargs)
        return original(self, *args, **kwargs)

    _OURS[method] = key
    return method


def _key_of(method: object) -> int | None:
    """The key of one of our bound methods; None for others."""
    function = getattr(method, "__func__", None)
    return _OURS.get(function) if isinstance(function, types.FunctionType) else None


def own_method(instance: object, name: str) -> Callable[..., Any] | None:
    """What the instance carries for a method of its class.

    But for ours, which others may put back after they were taken off, and but for the class's own, bound: ours are
    unpickled as those.
    """
    own = vars(instance).get(name)
    if isinstance(own, types.MethodType) and own.__func__ is getattr(type(instance), name):
        return None
    while (key := _key_of(own)) is not None:
        own = vars(instance).get(_BURIED_ATTRIBUTE, {}).get((key, name))
    return own
