"""The context of one `generate` call: what grouping, planning, prefill and decoding of its prompts all need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel

from .._compat import CACHE, untested_transformers
from ..attention.torch_operators.operators import BackendError
from ..cache.shared import SharedContextCache
from ..errors import PeerFailedError, Unsupported
from ..parallel.ranks import Ranks
from .fingerprint import Fingerprint
from .inputs.encoded import PromptNames, prompt_names
from .inputs.given import GivenInputs
from .inputs.items import counting_tokens
from .inputs.rows import InputRows
from .model_state import ModelState
from .options import Options
from .report import CallReport
from .structure import Structure

Entered = TypeVar("Entered")


class Positions(NamedTuple):
    """Positions of a batch of prompts.

    Attributes:
        ids: ``[rows or 1, width]``, or ``[planes, rows or 1, width]`` where planes differ; None for those of the mask.
        planes: Number of planes that the model takes; 0 for positions without planes.
    """

    ids: Tensor | None
    planes: int = 0

    @property
    def shape(self) -> list[int]:
        """Shape of the positions as the model takes them."""
        reduced_to_one = self.planes and not self.differ
        return [] if self.ids is None else [*([self.planes] if reduced_to_one else []), *self.ids.shape]

    @property
    def differ(self) -> bool:
        """Whether planes differ, so that tokens have no single position."""
        return self.ids is not None and self.ids.dim() == 3

    @property
    def after(self) -> Tensor | None:
        """``[rows or 1]``: the position of the token after each prompt; None where planes differ there too.

        Of four planes the first is that of text, by which only packed training rows are told apart.
        """
        if self.ids is None:
            return None
        last = self.ids[..., -1]
        if self.differ:
            last = last[1:] if len(last) == 4 else last
            if not bool((last == last[0]).all()):
                return None
            last = last[0]
        return last + 1


def reduced(position_ids: Tensor | None, attention_mask: Tensor | None) -> Positions:
    """Reduce planes of positions ``[planes, rows or 1, width]`` to one where all are equal, as for text alone.

    Positions of padding, by the mask ``[rows, width]``, are not compared.
    """
    if position_ids is None or position_ids.dim() != 3:
        return Positions(position_ids)
    first = position_ids[0]
    equal = position_ids == first
    rows, width = position_ids.shape[1:]
    if attention_mask is not None and attention_mask.shape[-1] == width and rows in (1, len(attention_mask)):
        equal = equal | (attention_mask == 0)
    return Positions(first if bool(equal.all()) else position_ids, len(position_ids))


class CallScope:
    """What is held until a `generate` call ends, by code that runs in it."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._thread: int | None = get_ident()  # None after the call

    @property
    def is_open(self) -> bool:
        """Whether the call is in progress in this thread."""
        return self._thread == get_ident()

    def enter(self, context: AbstractContextManager[Entered]) -> Entered:
        """Enter a context, which the call's end leaves, and return what it yields."""
        return self._held.enter_context(context)

    def callback(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function at the call's end, before contexts that were entered earlier are left."""
        self._held.callback(function, *arguments)

    def let_go(self) -> None:
        """Leave what was entered, as at the call's end, though the call goes on."""
        self._held.close()

    def close(self) -> None:
        """End the call."""
        self._thread = None
        self.let_go()


@dataclass
class CallContext:
    """One `generate` call of an enabled model.

    Attributes:
        options: Its options at the start of the call, unaffected by a concurrent `enable`.
        config: The call's generation config, with lengths prepared.
        arguments: Model arguments, as `generate` prepared them.
        given: The caller's `SharedContextCache`, if not empty; every prompt begins with a prefix that it holds.
        must_share: Whether the caller passed a `SharedContextCache`, empty or not, so that stock is no fallback.
        report: The call's report, which is written here and never read.
        mode: How decode steps run: ``eager`` or ``graph``.
        runs_stock: Whether the call turned out to be unsupported.
        scope: Ends with the call; None if its `generate` is not known.
        inputs: Images, videos or audio that the prompts come with.
        places_given: Whether the caller gave positions, which the model makes otherwise.
        fingerprint: That the prefix store compared the model with in this call; None if it did not.
        stock_cache: Makes the cache that stock would begin with.
        loop_is_users: Whether a ``custom_generate`` of the user's decodes, which may keep the cache.
    """

    model: PreTrainedModel
    state: ModelState
    config: GenerationConfig
    arguments: dict[str, Any]
    report: CallReport
    structure: Structure
    mode: str = "eager"
    runs_stock: bool = False
    scope: CallScope | None = None
    inputs: GivenInputs | None = None
    places_given: bool = False
    fingerprint: Fingerprint | None = None
    stock_cache: Callable[[], Cache | None] = lambda: None
    loop_is_users: bool = False
    options: Options = field(init=False)
    given: SharedContextCache | None = field(init=False)
    must_share: bool = field(init=False)
    max_prefill_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        cache = self.arguments.get(CACHE)
        self.options, limit = self.state.options, self.state.options.max_prefill_tokens
        self.must_share = isinstance(cache, SharedContextCache)
        self.given = cache if isinstance(cache, SharedContextCache) and not cache.is_empty else None
        self.max_prefill_tokens = min(self.config.prefill_chunk_size or limit, limit)

    @cached_property
    def positions(self) -> Positions:
        """Positions of the prompts, as `generate` was given or prepared them."""
        return reduced(self.arguments.get(self.names.positions), self.mask)

    @cached_property
    def names(self) -> PromptNames:
        """The names of the prompts among `arguments`."""
        return prompt_names(self.model)

    @property
    def mask(self) -> Tensor | None:
        """The attention mask of the prompts ``[rows, width]``, if there is one."""
        mask: Tensor | None = self.arguments.get(self.names.mask)
        return mask

    @cached_property
    def input_rows(self) -> InputRows | None:
        """Which of the inputs belong to which row; None of text alone."""
        if self.inputs is None:
            return None
        count_tokens = counting_tokens(self.model, self.structure, self.arguments)
        return InputRows(self.inputs, self.model.config, count_tokens)

    @property
    def ranks(self) -> Ranks:
        """The processes that compute the model together."""
        return self.structure.ranks

    @property
    def returns_cache(self) -> bool:
        """Whether the caller gets the cache, and may keep it."""
        return bool(self.config.return_dict_in_generate)

    @property
    def may_keep_cache(self) -> bool:
        """Whether the call's cache may outlive it: the caller or a loop of the user's gets it."""
        return self.returns_cache or self.loop_is_users

    def set_mode(self, mode: str, reason: str) -> None:
        """Set how decode steps run, and why."""
        self.mode = self.report.mode = mode
        self.report.mode_reason = reason

    @contextmanager
    def or_stock(self) -> Iterator[None]:
        """Context that ends early, with `runs_stock` set, where the call is `Unsupported`.

        With a transformers release that is newer than tested, errors are taken for its changes, so that calls go on.
        Raises ValueError where the call must share.
        """
        try:
            yield
            return
        except Unsupported as error:  # the error itself would keep its frames' tensors alive during the stock call
            what, remedy, of_prompts = error.what, error.remedy, error.of_prompts
        except (BackendError, PeerFailedError, torch.OutOfMemoryError):  # no changes of transformers
            raise
        except Exception as error:
            newer = untested_transformers()
            if newer is None or self.must_share or not self.ranks.alone:
                raise
            what = f"it failed with transformers {newer}, newer than tested ({type(error).__name__}: {error})"
            remedy, of_prompts = None, False
        self.refuse(Unsupported(what, remedy, of_prompts=of_prompts))

    def refuse(self, error: Unsupported) -> None:
        """Report that the call runs stock, and log each reason once.

        Raises ValueError if the call must share, unless its prompts alone are why it does not.
        """
        if self.must_share and not error.of_prompts:
            remedy = error.remedy or f"leave {CACHE} out"
            raise ValueError(f"this call cannot use a SharedContextCache: {error.what}; {remedy}") from None
        reason = f"{error}; the given cache is not used" if self.must_share else str(error)
        if unused := self.options.unmet_by_stock:
            reason = f"{reason}; {', '.join(unused)} not used"
        self.runs_stock = True
        self.report.path, self.report.reason = "stock", reason
        self.state.log_once(f"this generate call runs stock transformers: {reason}")
