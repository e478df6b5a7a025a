"""`FusedModules`: the modules of a model that kernels can compute, and the context in which they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..._compat import COMPILED_CALL, global_forward_hooks
from ...attention.overrides import overrides_of
from ...instance_methods import Change
from ...kernels.device import triton_is_installed
from ..interception.switches import replaced_calls
from .delta_nets import DELTA_NETS
from .experts import EXPERTS, ROUTERS
from .gated import GATED
from .latents import LATENTS
from .norms import GATED_NORMS, NORMS
from .rotary import ROTARY
from .shared_experts import SHARED_EXPERTS
from .states import STATES
from .trial import FusedKind, form_and_casts, fused_here, is_plain, unless_cast
from .vision import PATCHES, SPLITS

_OF_LAYERS = (NORMS, GATED_NORMS, GATED, LATENTS, ROTARY, SHARED_EXPERTS, EXPERTS, ROUTERS, DELTA_NETS, STATES)
_KINDS = (*_OF_LAYERS, PATCHES, SPLITS)

# What trials found, by kind; a model's own, since its code may read its config.
_found: WeakKeyDictionary[nn.Module, dict[Hashable, Any]] = WeakKeyDictionary()


def runs_kernels(model: PreTrainedModel) -> bool:
    """Whether a model's modules may run as kernels: not on other devices, or in other dtypes."""
    return model.dtype in (torch.float16, torch.bfloat16) and model.device.type == "cuda"


class FusedModules:
    """Modules of a model that run as kernels, each tried once per kind.

    Args:
        model: The model; modules with hooks, a `forward` of their own or a compiled one keep their code.
        modules: Its modules, where the caller has them already.
        found: What was `found` for the same modules, which have not changed since.
    """

    def __init__(
        self, model: nn.Module, modules: Iterable[nn.Module] | None = None, found: Sequence[Found] | None = None
    ):
        self._every = list(model.modules() if modules is None else modules)
        if found is None:
            known = _found.setdefault(model, {})
            none = not triton_is_installed() or _all_have_hooks()
            found = [] if none else list(_find(self._every, known))
        self.found = found

    @property
    def modules(self) -> list[nn.Module]:
        return [self._every[one.number] for one in self.found]

    @cached_property
    def _calls(self) -> list[Change]:
        calls = []
        for module, one in zip(self.modules, self.found, strict=True):
            call = one.kind.replacement(module, one.form)
            calls.append(Change(module, COMPILED_CALL, unless_cast(module, call) if one.casts else call))
        return calls

    @property
    def has_experts(self) -> bool:
        """Whether mixtures of experts are among them, whose routers look for the largest numbers of short rows."""
        return any(one.kind is EXPERTS for one in self.found)

    def __str__(self) -> str:
        counts = Counter(one.kind.what for one in self.found if one.kind.what)
        return ", ".join(f"{count} {what}" for what, count in counts.items())

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which this thread's passes run these modules as kernels, unless all modules have a hook."""
        if _all_have_hooks():
            yield
            return
        with replaced_calls.on(self._calls), fused_here():
            yield


class Found(NamedTuple):
    """A module that runs as a kernel: its number among the model's, its kind, its form, and whether autocast casts."""

    number: int
    kind: FusedKind
    form: Any
    casts: bool


def _find(modules: Iterable[nn.Module], known: dict[Hashable, Any]) -> Iterator[Found]:
    kinds: dict[type[nn.Module], list[FusedKind]] = {}  # not kept: a class may get another `forward`
    for number, module in enumerate(modules):
        if (of_class := kinds.get(type(module))) is None:
            stands_in = "forward" in overrides_of(type(module))
            of_class = kinds[type(module)] = [of for of in _KINDS if not stands_in and of.may_be(type(module))]
        for of in of_class:
            if (key := of.key(module)) is None or not is_plain(module):
                continue
            if key not in known:
                known[key] = form_and_casts(of, module)
            form, casts = known[key]
            if form is not None:
                yield Found(number, of, form, casts)
                break


def _all_have_hooks() -> bool:
    """Whether each call of any module runs a hook, trials' included."""
    return next(global_forward_hooks(), None) is not None
