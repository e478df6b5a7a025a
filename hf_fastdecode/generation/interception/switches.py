"""Switches that put methods and calls on one instance, and take them off again.

`WrappedMethods` lasts from `enable` to `disable`, and is removable even after other code has overridden the same
methods; whether a `generate` that others have replaced or wrapped takes a decoding loop, its signature tells.
`replaced_calls` last for the time of forward passes, in any number of threads; so do `Overrides` of attention code,
and PyTorch's own `F.linear`.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property, partial
from itertools import count
from types import FunctionType
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..._compat import COMPILED_CALL, LINEAR, setting, uncompiled_call
from ...attention.overrides import Method, lengths_of_pass, overrides_of, own_code_of
from ...errors import Unsupported
from ...hook_roles import defining_module
from ...instance_methods import STATE_ATTRIBUTE, Change, Switch, WeakMethod
from ..foreign_code import is_capturable, is_of_transformers

# Originals of our overrides that could not be removed, because other code had wrapped them.
_BURIED_ATTRIBUTE = "_hf_fastdecode_buried"

Wrapper = Callable[..., Any]
"""Called as ``override(state, instance, *args, **kwargs)``."""

_REPLICATE: Final = "_replicate_for_data_parallel"

_LASTING = frozenset({"forward", "generate"})
"""Overrides that `left_out` keeps: passes over a given cache and calls within a call need them."""

_left_out: ContextVar[object] = ContextVar("hf_fastdecode_left_out", default=None)

_keys = count()
_OURS: WeakKeyDictionary[Callable[..., Any], int] = WeakKeyDictionary()


class WrappedMethods:
    """Overrides of an instance's methods, and the originals."""

    def __init__(self, instance: object, wrappers: Mapping[str, Wrapper]):
        self._wrappers = {**wrappers, _REPLICATE: _replicated}
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
                others = [one for one in own.parameters.values() if one.name != first.name]  # their wrapper wraps ours
                method.__signature__ = own.replace(parameters=[first, *others])  # type: ignore[attr-defined]
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


def _replicated(state: Any, instance: Any) -> Any:
    """A replica of `torch.nn.DataParallel` without overrides: a copy's are bound to the instance on its own device."""
    replica = state.methods.original(instance, _REPLICATE)()
    state.methods.uninstall(replica)
    return replica


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
    """Method that calls `wrapper` while the state has this key, and then `original`, for wrappers of other code."""
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


def left_out(instance: object | None) -> AbstractContextManager[None]:
    """Context in which overrides of an instance that only prepare a call forward to the originals, in this thread.

    None ends that for a call within the context.
    """
    return setting(_left_out, instance)


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


replaced_calls = Switch(replaces=False)
"""Calls of modules in the place of theirs; the user's own, such as a compiled call, stay."""

_linear = Switch(replaces=True)


def linear_of_torch() -> AbstractContextManager[None]:
    """Context of a pass in which DeepSpeed's `F.linear` is PyTorch's, unless gradients are recorded.

    ZeRO-3 replaces it in all of the process, also for models that it does not divide, by a function with a backward
    pass of its own, whose products cannot run together.
    """
    other = _linear.otherwise(functional, "linear")  # not that of another thread's pass
    if defining_module(other) != "deepspeed.runtime.zero.linear":
        return nullcontext()

    def linear(*args: Any, **kwargs: Any) -> Tensor:
        return (other if torch.is_grad_enabled() else LINEAR)(*args, **kwargs)

    return _linear.on([Change(functional, "linear", linear)])


_KNOWN = ("transformers.", "hf_fastdecode.")
"""Packages of classes that change nothing of a base's attention, or attend to a shared-context cache."""


class Found(NamedTuple):
    """An overridden method: the number of its module among the model's, and its name."""

    number: int
    name: str
    method: Method


def find_overrides(modules: Sequence[nn.Module], *, in_captures: bool = False) -> list[Found]:
    """The methods of a model's modules that are overridden, in all passes or in captured ones alone.

    Raises Unsupported for a class derived from one with overrides: what it changes, they would leave out.
    """
    kinds = {kind: overrides_of(kind, in_captures=in_captures) for kind in set(map(type, modules))}
    for kind in kinds:
        base = next((base for base in kind.__mro__[1:] if overrides_of(base, in_captures=in_captures)), None)
        if base is not None and not kind.__module__.startswith(_KNOWN):
            raise Unsupported(
                f"{kind.__name__} derives from {base.__name__}, whose attention has code of its own here, which would "
                "leave out what it changes"
            )
    return [
        Found(number, name, method)
        for number, module in enumerate(modules)
        for name, method in kinds[type(module)].items()
    ]


class Overrides:
    """Overrides of the attention code of these modules, and the context in which they run."""

    def __init__(self, modules: Sequence[nn.Module], found: Sequence[Found]):
        self._modules, self.found = modules, found

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which passes over a shared-context cache, of this thread, run them.

        Raises `Unsupported` if a module has a hook or a method of its own, or a compiled call, which would not run.
        """
        for one in self.found:
            _require_plain(self._modules[one.number], one.name)
        with replaced_calls.on(self._calls):
            yield

    @cached_property
    def _calls(self) -> list[Change]:
        return [_replacement(self._modules[one.number], one.name, one.method) for one in self.found]


def _require_plain(module: nn.Module, name: str) -> None:
    """Check that nothing of the user's runs in the method's calls."""
    kind, own = type(module), vars(module)
    hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
    replaced = own_method(module, "forward") is not None or {"_hf_hook", "_call_impl"} & own.keys()
    state = own.get(STATE_ATTRIBUTE)  # of a decoder, whose override may have replaced one
    if replaced or (state is not None and state.methods.wraps("forward")) or not all(map(is_capturable, hooks)):
        raise Unsupported(
            f"{kind.__name__} has a hook or a forward of its own, which would not run", "remove it for the call"
        )
    if replaced_calls.otherwise(module, _attribute(name)) is not None:
        what = "compiled call" if name == "forward" else f"{name} of its own"
        raise Unsupported(f"{kind.__name__} has a {what}, which would not run")
    if name != "forward" and not is_of_transformers(getattr(kind, name)):  # `check_code` has seen the classes' forward
        raise Unsupported(f"{kind.__name__}.{name} is not transformers' own, and would not run")


def _attribute(name: str) -> str:
    return COMPILED_CALL if name == "forward" else name


def _replacement(module: nn.Module, name: str, method: Method) -> Change:
    """The call of an override; passes of other threads run the module's own method."""
    own: Callable[..., Any] = uncompiled_call if name == "forward" else getattr(type(module), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (own if lengths_of_pass() is None else method)(module, *args, **kwargs)

    return Change(module, _attribute(name), call)


_HAND_LOOP_ON: Final = frozenset(
    {
        "WhisperGenerationMixin.generate",
        *(f"SeamlessM4T{version}For{task}ToText.generate" for version in ("", "v2") for task in ("Text", "Speech")),
    }
)
"""A `generate` of transformers' classes that calls transformers' with what else it is given, once or several times."""

_signatures: WeakKeyDictionary[Callable[..., Any], inspect.Signature] = WeakKeyDictionary()
"""Signatures of methods of classes, less their instance."""


def signature_of(method: Callable[..., Any]) -> inspect.Signature:
    """A method's signature, which is made once for a class where its instance is bound by a partial."""
    of_class = method.func if isinstance(method, partial) and len(method.args) == 1 and not method.keywords else None
    if not isinstance(of_class, FunctionType):
        return inspect.signature(method)
    if (found := _signatures.get(of_class)) is None:
        found = _signatures[of_class] = inspect.signature(method)
    return found


class OwnGenerate:
    """A model's own `generate`, of its class or put on the instance by others, as it takes a decoding loop."""

    def __init__(self, methods: WrappedMethods, model: object):
        self.method, self._kind = methods.original(model, "generate"), type(model)
        self._replaced = methods.wraps("generate")

    def hands_on(self, arguments: Mapping[str, Any]) -> bool:
        """Whether it hands on what else it is given, so that it may take ``custom_generate`` among any arguments."""
        own, name = own_code_of(self._kind), _of_transformers(self._kind)
        hands = own is not None and name is not None and own.hands_generate_on(arguments)
        return self._replaced or name in _HAND_LOOP_ON or hands

    def takes_loop(self, given: int, arguments: Mapping[str, Any]) -> bool:
        """Whether it, and what it wraps, take a ``custom_generate`` after so many positional arguments of these."""
        if arguments.get("custom_generate") is not None:
            return False
        parameters = signature_of(self.method).parameters
        takes = "custom_generate" in parameters and given <= list(parameters).index("custom_generate")
        takes |= self.hands_on(arguments) and _takes_any(parameters)
        inner: Callable[..., Any] | None = self.method
        while takes and inner is not None:  # a wrapper may take fewer arguments than what it wraps
            if isinstance(inner, partial):
                inner = inner.func
            else:
                takes = _takes_or_passes_on(inner)
                inner = getattr(inner, "__wrapped__", None)
        return takes

    def why_not(self, loop: object = None) -> str:
        """Why it could not be given a loop, beside the caller's own, if any."""
        if loop is not None:
            return "custom_generate decodes by itself"
        if not self.hands_on({}):
            return "the model's class has a generate of its own"
        return (
            f"{self} replaces generate and has no **kwargs to pass custom_generate on with; wrap generate after enable"
        )

    def __str__(self) -> str:
        return getattr(self.method, "__qualname__", type(self.method).__qualname__)


def _takes_or_passes_on(function: Callable[..., Any]) -> bool:
    code = function.__code__ if isinstance(function, FunctionType) else None
    if code is not None and (code.co_flags & inspect.CO_VARKEYWORDS) and not hasattr(function, "__signature__"):
        return True
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    return "custom_generate" in parameters or _takes_any(parameters)


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def reads_its_cache(kind: type) -> bool:
    """Whether a class's own `generate` reads the tensors of each row in the cache that transformers' returns."""
    return _of_transformers(kind) == "WhisperGenerationMixin.generate"


def _of_transformers(kind: type) -> str | None:
    """The qualified name of a class's `generate`, if it is of one of transformers' models."""
    method = getattr(kind, "generate", None)
    of_models = getattr(method, "__module__", "").startswith("transformers.models.")
    return getattr(method, "__qualname__", None) if of_models else None
