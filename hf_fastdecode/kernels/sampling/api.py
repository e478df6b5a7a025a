"""`sample`: draws one token per row from logits, in one launch, with every setting on the device."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ..ahead import launch
from ..device import power_of_two
from ..failures import Kernel, launching
from ..limits import FLOATS, check_table
from .row_kernel import sample_rows

_FLOATS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}
_INTEGERS = {"top_k": 0, "seed": 0, "step": 0, "min_new_tokens": 0, "pad_token_id": 0, "begin_step": -1}
_BOUNDS = {
    "temperature": (lambda x: x > 0, "above 0; for greedy decoding create Settings(greedy=True)"),
    "top_p": (lambda x: 0 <= x <= 1, "within [0, 1]"),
    "min_p": (lambda x: 0 <= x <= 1, "within [0, 1]"),
    "typical_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "repetition_penalty": (lambda x: x > 0, "above 0"),
    "top_k": (lambda x: x >= 0, "at least 0, which turns it off"),
    "min_new_tokens": (lambda x: x >= 0, "at least 0"),
    "step": (lambda x: x >= 0, "at least 0"),
    "begin_step": (lambda x: x >= -1, "at least 0, or -1 for none"),
}


class Settings:
    """Sampling settings on the device, so that a captured graph serves other values.

    Each value is a 0-dimensional view on the device, to be read or changed in place on any stream that is ordered
    before the launch: ``temperature``, ``top_p``, ``min_p``, ``typical_p``, ``repetition_penalty`` (fp32), ``top_k``,
    ``seed``, ``step`` (tokens drawn so far; the caller counts), ``min_new_tokens``, ``pad_token_id`` and
    ``begin_step`` (int64).

    Args:
        device: Device of the logits.
        greedy: Take the largest processed logit; only penalty and suppression apply.
        top_k: Whether ``top_k`` may be other than 0. This flag and the following select another compilation.
        typical: Whether ``typical_p`` may be below 1.
        penalty: Whether ``repetition_penalty`` may be other than 1.
        eos_token_ids: Tokens not to be drawn while ``step < min_new_tokens``.
        suppressed: ``[2, vocabulary]`` int8 on the device, see `suppressed_tokens`: tokens not to be drawn at any
            step, and at step ``begin_step``. Settings with it are for logits of this vocabulary.
        values: Values by name, as for `update`; the others have no effect.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor
    repetition_penalty: Tensor
    top_k: Tensor
    seed: Tensor
    step: Tensor
    min_new_tokens: Tensor
    pad_token_id: Tensor
    begin_step: Tensor

    def __init__(
        self,
        device: torch.device | str,
        *,
        greedy: bool = False,
        top_k: bool = True,
        typical: bool = False,
        penalty: bool = False,
        eos_token_ids: list[int] | tuple[int, ...] = (),
        suppressed: Tensor | None = None,
        values: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.greedy = greedy
        self.features = {"top_k": top_k, "typical_p": typical, "repetition_penalty": penalty}
        self.features["min_new_tokens"] = bool(eos_token_ids)
        self.features["begin_step"] = suppressed is not None
        self.suppressed = suppressed
        self.eos_ids = _on(device, eos_token_ids or (-1,), torch.int64)
        self.eos_count = len(eos_token_ids)
        self._check(values)
        self.numbers = _on(device, (values.get(name, neutral) for name, neutral in _FLOATS.items()), torch.float32)
        self.integers = _on(device, (values.get(name, neutral) for name, neutral in _INTEGERS.items()), torch.int64)
        for names, storage in ((_FLOATS, self.numbers), (_INTEGERS, self.integers)):
            for index, name in enumerate(names):
                setattr(self, name, storage[index])

    @property
    def compiled_for(self) -> Hashable:
        """The settings that select a compilation."""
        return self.greedy, self.eos_count, *self.features.values()

    def update(self, **values: float | int) -> None:
        """Set values in place, by name.

        Raises:
            TypeError: A name is no setting.
            ValueError: A value is out of bounds, not an integer where it must be one, or needs a feature that these
                settings lack.
        """
        self._check(values)
        for name, value in values.items():
            getattr(self, name).fill_(value)

    def _check(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name not in _FLOATS and name not in _INTEGERS:
                raise TypeError(f"no setting is called {name!r}; there are {', '.join([*_FLOATS, *_INTEGERS])}")
            holds, bound = _BOUNDS.get(name, (lambda _: True, ""))
            if not holds(value):
                raise ValueError(f"{name} must be {bound}, got {value}")
            if name in _INTEGERS and value % 1 != 0:
                raise ValueError(f"{name} must be an integer, got {value}")
            neutral = _FLOATS.get(name, _INTEGERS.get(name))
            if not self.features.get(name, True) and value != neutral:
                raise ValueError(f"{name}={value} needs Settings created with that feature; here it must be {neutral}")


def _on(device: torch.device | str, values: Iterable[float], dtype: torch.dtype) -> Tensor:
    """Copy values to a device, without waiting for its queued work."""
    return torch.tensor(list(values), dtype=dtype, device="cpu").to(device, non_blocking=True)


class Form(NamedTuple):
    """Compile-time constants of the sampling kernel; see `row_kernel.py`."""

    vocab: int
    columns: int
    chunks: int  # padded to a power of two
    group: int  # chunks read at once
    tile: int
    plain: bool  # logits are compared before division by the temperature
    empty_bits: int  # trailing zero bits of a plain logit in fp32
    changed: bool  # by penalty or suppression, of end tokens or others
    greedy: bool
    top_k: bool
    typical: bool
    penalty: bool
    eos: int
    suppression: bool


@dataclass(frozen=True)
class Config:
    """Launch parameters; draws depend on ``columns``, and through the rounding of sums on the others."""

    columns: int  # columns of the table in which a row is read; a power of two, fastest from 256 per warp up
    group: int = 4  # chunks of the table read at once; a power of two
    tile: int = 128  # columns that top-k keeps in registers: up to this k it needs no further pass. A power of two.
    warps: int = 16  # warps per program


def choose_config(vocab: int) -> Config:
    """Launch parameters as measured on an H200; independent of the rows, so that draws are too."""
    if vocab >= 65536:
        return Config(4096)
    if vocab >= 16384:
        return Config(2048, warps=8)
    return Config(1024, warps=4)


def sample(
    logits: Tensor,
    row_ids: Tensor,
    settings: Settings,
    *,
    seen: Tensor | None = None,
    steps: Tensor | None = None,
    tokens: Tensor | None = None,
    logprobs: Tensor | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row after transformers' temperature, top-k, top-p, min-p and typical-p.

    Filters and their order are those of ``generate``: repetition penalty, suppression of tokens, temperature, top-k,
    top-p, min-p, typical-p, each on what the one before left. Ties are kept as there: top-k and typical-p keep all
    tokens that tie with the last; of tokens that tie at the edge of top-p, the last by index stay, as in a stable
    sort. A row's draw depends only on its logits, the settings, ``seed``, ``step`` and its row id; results are
    bitwise reproducible. Nothing synchronises with the host.

    ``-inf`` and NaN are never drawn. A row with no other logit yields token 0 and a log-probability of NaN; ``+inf``
    yields some token and NaN. Greedy takes the lowest index among equals, like ``torch.argmax``.

    Args:
        logits: ``[rows, vocabulary]`` fp32, bf16 or fp16, the last dimension contiguous; not changed.
        row_ids: ``[rows]`` int32. Rows with -1, or an id beyond ``seen``, are skipped: they get the pad token and a
            log-probability of 0.
        settings: Values and features, on the same device.
        seen: ``[row ids, ceil(vocabulary / 32)]`` int32, indexed by row id, for the repetition penalty: see
            `seen_tokens`. The drawn token is added.
        steps: ``[rows]`` int64: tokens drawn so far of each row, instead of ``settings.step``.
        tokens: ``[rows]`` int64 output, optional.
        logprobs: ``[rows]`` fp32 output, optional.
        config: Launch parameters.

    Returns:
        Tokens ``[rows]`` int64, and ``[rows]`` fp32 the natural log-probability of each under the raw logits, before
        any processing.
    """
    _check_logits(logits)
    rows, vocab = logits.shape
    config = config or choose_config(vocab)
    check_table("row_ids", row_ids, (rows,), torch.int32)
    check_table("steps", steps, (rows,), torch.int64)
    check_table("tokens", tokens, (rows,), torch.int64)
    check_table("logprobs", logprobs, (rows,), torch.float32)
    _check_settings(settings, seen, vocab)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if tokens is None else tokens
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device) if logprobs is None else logprobs
    if rows == 0:
        return tokens, logprobs
    form = _form(settings, config, vocab, logits.dtype)
    scratch = torch.empty(rows, config.tile, dtype=torch.int32, device=logits.device) if form.top_k else tokens
    marks = seen if seen is not None and form.penalty else None
    suppressed = row_ids if settings.suppressed is None else settings.suppressed
    with launching(Kernel.SAMPLING, logits.device):
        launch(
            sample_rows,
            (rows,),
            *(logits, row_ids, settings.numbers, settings.integers, settings.step if steps is None else steps),
            *(settings.eos_ids, suppressed, row_ids if marks is None else marks, scratch, tokens, logprobs),
            logits.stride(0),
            *((0, 0) if marks is None else (marks.stride(0), len(marks))),
            int(steps is not None),
            FORM=form,
            num_warps=config.warps,
            enable_fp_fusion=False,  # a value computed twice must have the same bits
        )
    return tokens, logprobs


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [rows, vocabulary], got shape {list(logits.shape)}")
    if logits.dtype not in FLOATS:
        raise ValueError(f"logits must be fp32, bf16 or fp16, got {logits.dtype}")
    if logits.stride(1) != 1:
        raise ValueError(f"logits must be contiguous along the vocabulary, got strides {logits.stride()}")


def _check_settings(settings: Settings, seen: Tensor | None, vocab: int) -> None:
    """Check the settings against the size of the vocabulary."""
    if settings.features["repetition_penalty"]:
        words = (vocab + 31) // 32
        if seen is None or seen.dtype != torch.int32 or seen.shape[1] != words or seen.stride(1) != 1:
            raise ValueError(f"the repetition penalty needs seen [row ids, {words}] int32: use seen_tokens(...)")
    suppressed = settings.suppressed
    if suppressed is not None and (suppressed.shape != (2, vocab) or not suppressed.is_contiguous()):
        raise ValueError(
            f"the settings suppress tokens of a vocabulary of {suppressed.shape[-1]}, and the logits have {vocab}: "
            "use suppressed_tokens(...) with that size"
        )


def _form(settings: Settings, config: Config, vocab: int, dtype: torch.dtype) -> Form:
    greedy, features = settings.greedy, settings.features
    penalty, typical = features["repetition_penalty"], features["typical_p"] and not greedy
    plain = dtype != torch.float32 and not penalty and not typical
    return Form(
        vocab=vocab,
        columns=config.columns,
        chunks=power_of_two(-(-vocab // config.columns)),
        group=config.group,
        tile=config.tile,
        plain=plain,
        empty_bits={torch.bfloat16: 16, torch.float16: 13}.get(dtype, 0) if plain else 0,
        changed=penalty or settings.eos_count > 0 or features["begin_step"],
        greedy=greedy,
        top_k=features["top_k"] and not greedy,
        typical=typical,
        penalty=penalty,
        eos=settings.eos_count,
        suppression=features["begin_step"],
    )


def seen_tokens(ids: Tensor, vocab: int, keep: Tensor | None = None) -> Tensor:
    """Bit set of each row's tokens, for the repetition penalty.

    Args:
        ids: ``[rows, length]`` tokens; those beyond the vocabulary are left out.
        vocab: Size of the vocabulary.
        keep: ``[rows, length]`` bool: tokens to take, e.g. all but padding.

    Returns:
        ``[rows, ceil(vocab / 32)]`` int32: bit ``t % 32`` of word ``t // 32`` is token ``t``.
    """
    words = (vocab + 31) // 32
    outside = ids >= vocab if keep is None else (ids >= vocab) | ~keep
    present = torch.zeros(len(ids), 32 * words + 1, dtype=torch.bool, device=ids.device)
    present.scatter_(1, ids.masked_fill(outside, 32 * words), True)
    bits = present[:, :-1].view(len(ids), words, 32)
    result = torch.zeros(len(ids), words, dtype=torch.int32, device=ids.device)
    for bit in range(32):
        result |= bits[:, :, bit].int() << bit
    return result


def suppressed_tokens(
    always: Tensor | None, at_begin: Tensor | None, vocab: int, device: torch.device | str
) -> Tensor:
    """Marks of tokens not to be drawn, for `Settings`; made without waiting for the device.

    Args:
        always: ``[any]``: tokens not to be drawn at any step; those beyond the vocabulary are left out.
        at_begin: The same, of one step.
        vocab: Size of the vocabulary.
        device: Device of the logits.

    Returns:
        ``[2, vocab]`` int8: 1 for tokens of `always`, and for tokens of either.
    """
    marks = torch.zeros(2, vocab + 1, dtype=torch.int8, device=device)  # the last for tokens beyond the vocabulary
    for ids, rows in ((always, marks), (at_begin, marks[1:])):
        if ids is not None:
            tokens = ids.to(device=device, dtype=torch.int64)  # an empty list became one of floats
            rows.index_fill_(1, tokens.where((tokens >= 0) & (tokens < vocab), vocab), 1)
    return marks[:, :vocab].contiguous()
