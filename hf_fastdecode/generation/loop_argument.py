"""Whether a model's `generate`, which others may have replaced or wrapped, takes a decoding loop as an argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, Final
from weakref import WeakKeyDictionary

from ..attention.own_code import own_code_of

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


def takes_loop(signature: inspect.Signature, given: int) -> bool:
    """Whether ``custom_generate`` is a parameter behind the `given` positional arguments."""
    names = list(signature.parameters)
    return "custom_generate" in names and given <= names.index("custom_generate")


def reads_its_cache(kind: type) -> bool:
    """Whether a class's own `generate` reads the tensors of each row in the cache that transformers' returns."""
    return _of_transformers(kind) == "WhisperGenerationMixin.generate"


def _of_transformers(kind: type) -> str | None:
    """The qualified name of a class's `generate`, if it is of one of transformers' models."""
    method = getattr(kind, "generate", None)
    of_models = getattr(method, "__module__", "").startswith("transformers.models.")
    return getattr(method, "__qualname__", None) if of_models else None


def wrappers_pass_loop_on(function: Callable[..., Any]) -> bool:
    """Whether wrappers take ``custom_generate``, or any argument: they may take fewer than what they wrap."""
    inner: Callable[..., Any] | None = function
    while inner is not None:
        if isinstance(inner, partial):
            inner = inner.func
            continue
        if not _takes_or_passes_on(inner):
            return False
        inner = getattr(inner, "__wrapped__", None)
    return True


def _takes_or_passes_on(function: Callable[..., Any]) -> bool:
    code = function.__code__ if isinstance(function, FunctionType) else None
    if code is not None and (code.co_flags & inspect.CO_VARKEYWORDS) and not hasattr(function, "__signature__"):
        return True
    signature = inspect.signature(function, follow_wrapped=False)
    return "custom_generate" in signature.parameters or takes_any(signature)


def takes_any(signature: inspect.Signature) -> bool:
    """Whether any named argument is taken."""
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())


def hands_generate_on(kind: type, arguments: Mapping[str, Any]) -> bool:
    """Whether a class of transformers has a `generate` of its own that hands a call on, see `OwnCode`."""
    own, name = own_code_of(kind), _of_transformers(kind)
    if name in _HAND_LOOP_ON:
        return True
    return own is not None and name is not None and own.hands_generate_on(arguments)


def name_of(function: Callable[..., Any]) -> str:
    """What messages call a function."""
    return getattr(function, "__qualname__", type(function).__qualname__)
