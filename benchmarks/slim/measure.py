"""Slim attention measured: the kernel over a slim cache, beside attention over keys and values of the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_fastdecode.conversion.fit.cached_numbers import EIGHT_BITS, load, store, stored_bytes, views
from hf_fastdecode.kernels.failures import Kernel, forget
from hf_fastdecode.kernels.slim_decode.inputs import RotaryTables, Scales, refusal
from hf_fastdecode.measurement.rows import NotAvailableError, status_of

from ..latest import Latest
from ..ops.cases import NodeSpec, OpCase
from ..ops.inputs import sets_needed
from ..ops.measure import OpBench, time_if_right
from .cases import SlimCase

if TYPE_CHECKING:  # its import needs Triton
    from hf_fastdecode.kernels.slim_decode.api import ClusterConfig, TwoLaunchConfig

Config = TypeVar("Config", bound="TwoLaunchConfig | ClusterConfig")

_COLUMNS = (
    *("status", "variant", "us_p20", "us_p50", "us_p80", "over_floor", "bandwidth_share", "tb_per_s", "bytes"),
    *("floor_us", "copy_tb_per_s", "error_ratio"),
)
_CHUNK = 4096  # tokens that the oracle has in fp64 at once


class SlimInputs(NamedTuple):
    """One set of inputs."""

    query: Tensor  # [rows, heads, 1, head_dim] fp32, rotated
    keys: Tensor  # [rows, context, e]
    coordinates: Tensor  # [rows, context, r]
    scales: Scales | None = None  # of 8 bits, views of the tensors that hold the elements

    def tokens(self, start: int) -> tuple[Tensor, Tensor]:
        """Keys and V-coordinates of the last row in fp64, up to `_CHUNK` tokens of them."""
        parts = []
        for index, part in enumerate((self.keys, self.coordinates)):
            numbers = part[-1, start : start + _CHUNK]
            if self.scales is not None:
                scales = self.scales[index][-1, start : start + _CHUNK]
                stored = torch.cat([numbers.view(torch.uint8), scales], -1)
                head_dim = self.query.shape[3]
                room = stored_bytes(part.shape[2], part.dtype, head_dim) - stored.shape[-1]
                numbers = load(functional.pad(stored, (0, room)), part.dtype, head_dim)
            parts.append(numbers.double())
        return parts[0], parts[1]


class SlimBench:
    """Measures slim attention on one device; with `check`, a way is timed only if its error is within the rule."""

    def __init__(self, device: torch.device, *, check: bool = True):
        self.device, self.check = device, check
        self._ops = OpBench(device, check=check)
        self._sets: Latest[list[SlimInputs]] = Latest()

    @torch.no_grad()
    def measure(self, case: SlimCase, way: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``us_p20``, ``us_p50``, ``us_p80``: microseconds of a call with a cold L2 cache. ``bytes``: what it must move
        at least. ``floor_us``: what that takes at the measured bandwidth; ``over_floor``: the time over it;
        ``bandwidth_share``: the floor over the time. ``error_ratio``: times PyTorch's own error. ``variant``: what
        ran, for slim ways the launch parameters; those that differ may follow a way's name, as in
        ``slim-k:tile=32,stages=4``. A measurement whose ``status`` is not ``ok`` has no times; the status says why.
        """
        size = case.bytes(way, getattr(torch, case.cache_dtype(way)).itemsize)
        result: dict[str, Any] = dict.fromkeys(_COLUMNS) | {"status": "ok", "bytes": size}
        try:
            bandwidth = self._ops.ceilings.bytes_per_s
            result |= {"floor_us": 1e6 * size / bandwidth, "copy_tb_per_s": bandwidth / 1e12}
            result |= self._slim(case, way) if way.startswith("slim") else self._with_values(case, way)
        except Exception as error:  # a row says what failed, and the others are measured
            self._sets.drop()
            forget(Kernel.SLIM)
            forget(Kernel.CLUSTER)
            return result | {"status": status_of(error)}
        if (us := result["us_p50"]) is not None:
            over_floor = us / result["floor_us"]
            result |= {"over_floor": over_floor, "bandwidth_share": 1 / over_floor, "tb_per_s": size / us / 1e6}
        return result

    def _with_values(self, case: SlimCase, way: str) -> dict[str, Any]:
        self._sets.drop()
        shape: dict[str, Any] = {"heads": case.heads, "kv_heads": case.heads, "head_dim": case.head_dim}
        name = case.columns()["case"]
        own = OpCase(name, case.rows, (), case.context, **shape, dtype=case.dtype)
        if way == "forest-prompt":
            nodes = tuple(NodeSpec(case.context - 1, row, 1) for row in range(case.rows))
            own = replace(own, nodes=nodes, suffix=1)
        row = self._ops.measure(own, "hydragen" if way == "flash" else "ours")  # which is flash alone without nodes
        return {name: row[name] for name in ("status", "variant", "us_p20", "us_p50", "us_p80", "error_ratio")}

    def _slim(self, case: SlimCase, way: str) -> dict[str, Any]:
        inputs = self._inputs(case, way)
        if reason := refusal(*inputs[0][:3]):
            raise NotAvailableError(reason)
        from hf_fastdecode.kernels.device import shared_memory
        from hf_fastdecode.kernels.slim_decode.api import SlimPartial, choose_config, slim_decode
        from hf_fastdecode.kernels.slim_decode.config import choose_two_launch_config

        name, _, changes = way.partition(":")
        frequencies = 10_000.0 ** -(torch.arange(0, case.head_dim, 2, device=self.device) / case.head_dim)
        rotary = RotaryTables.of(frequencies, torch.arange(case.context, device=self.device)[None])
        dtype, shape = inputs[0].keys.dtype, (case.heads, case.head_dim, case.rank(way))
        if name.endswith("two-launches"):
            memory = shared_memory(self.device)
            config: TwoLaunchConfig | ClusterConfig = choose_two_launch_config(*shape, dtype, shared_memory=memory)
        else:
            config = choose_config(*shape, dtype, self.device, rotary=rotary)
        config = parse_config(changes, config)
        lengths = torch.full((case.rows,), case.context, dtype=torch.int32, device=self.device)
        scale = case.head_dim**-0.5

        def call(given: SlimInputs) -> Callable[[], SlimPartial]:
            parts, scales = given[:3], given.scales
            return lambda: slim_decode(*parts, lengths, config, scale=scale, rotary=rotary, scales=scales)

        oracle = _Oracle(inputs[0], rotary, scale, getattr(torch, case.dtype)) if self.check else None

        def error_of(output: SlimPartial) -> float | None:
            return None if oracle is None else oracle.error(*output[:2])

        found = time_if_right([call(given) for given in inputs], self.device, error_of)
        return {"variant": config_text(config)} | found

    def _inputs(self, case: SlimCase, way: str) -> list[SlimInputs]:
        """Sets of inputs, together larger than the L2 cache; kept until another size or dtype asks."""
        dtype: torch.dtype = getattr(torch, case.cache_dtype(way))
        widths = case.columns_of_keys, case.rank(way)

        def make() -> list[SlimInputs]:
            self._ops.inputs.drop()  # keys and values, which would not fit beside these
            generator = torch.Generator(self.device).manual_seed(0)

            def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
                return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)

            def one_set() -> SlimInputs:
                query = normal(case.rows, case.heads, 1, case.head_dim, dtype=torch.float32)
                if dtype not in EIGHT_BITS:
                    keys, coordinates = (normal(case.rows, case.context, width) for width in widths)
                    return SlimInputs(query, keys, coordinates)
                stored = (_in_8_bits(case, width, dtype, normal) for width in widths)
                (keys, key_scales), (coordinates, scales) = (views(part, dtype, case.head_dim) for part in stored)
                return SlimInputs(query, keys, coordinates, Scales(key_scales, scales))

            return [one_set() for _ in range(sets_needed(case.bytes(way, dtype.itemsize), self.device))]

        return self._sets.of((case, widths, dtype), make)


def _in_8_bits(case: SlimCase, width: int, dtype: torch.dtype, normal: Callable[..., Tensor]) -> Tensor:
    """A cache as slim layers store it, made of few tokens at once: in fp32 it may not fit."""
    size = stored_bytes(width, dtype, case.head_dim)
    stored: Tensor = normal(0, dtype=torch.float32).new_empty(case.rows, case.context, size, dtype=torch.uint8)
    for row in stored:
        for part in row.split(_CHUNK):
            part.copy_(store(normal(len(part), width, dtype=torch.float32), dtype, case.head_dim))
    return stored


class _Oracle:
    """Averages of the last row and two heads in fp64, and the same with fused attention's rounding as the yardstick.

    The yardstick rounds weights to the model's dtype, as fused attention does, and nothing else.
    """

    def __init__(self, inputs: SlimInputs, rotary: RotaryTables, scale: float, dtype: torch.dtype):
        heads, _, head_dim = inputs.query.shape[1:]
        self.heads = [0, heads - 1]
        query = inputs.query[-1, self.heads, 0].double()
        width = inputs.keys.shape[2] + inputs.coordinates.shape[2]
        chunks = range(0, inputs.keys.shape[1], _CHUNK)
        scores = []
        for start in chunks:
            own = inputs.tokens(start)[0].unflatten(-1, (heads, head_dim))[:, self.heads]
            cos, sin = (table[0, start : start + _CHUNK].double()[:, None] for table in rotary[:2])
            low, high = own.chunk(2, -1)
            rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)  # [tokens, 2, head_dim]
            scores.append(torch.einsum("hd,thd->ht", query, rotated) * scale)
        weights = torch.softmax(torch.cat(scores, 1), -1)
        largest = weights.amax(1, keepdim=True)
        rounded = (weights / largest).to(dtype).double() * largest
        both = torch.cat([weights, rounded])  # [4, tokens]
        averages = both.new_zeros(len(both), width)
        for start in chunks:
            averages += both[:, start : start + _CHUNK] @ torch.cat(inputs.tokens(start), -1)
        self.exact, self.fused = averages.chunk(2)

    def error(self, keys: Tensor, coordinates: Tensor) -> float:
        """Error of averages, of all rows and heads, over the yardstick's; inf when any is not finite."""
        if not bool(torch.isfinite(keys).all()) or not bool(torch.isfinite(coordinates).all()):
            return torch.inf
        ours = torch.cat([keys, coordinates], -1)[-1, self.heads].double() - self.exact
        theirs = self.fused - self.exact
        return float(torch.maximum(ours.norm() / theirs.norm(), ours.abs().max() / theirs.abs().max()))


def config_text(config: TwoLaunchConfig | ClusterConfig) -> str:
    """A configuration as `parse_config` reads it."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return ",".join(f"{name}={value}" for name, value in values.items() if value is not None)


def parse_config(text: str, base: Config) -> Config:
    """Change fields of `base`, as in ``own_heads=8,block_t=16``.

    Raises:
        ValueError: A field is unknown, or its value is not a whole number.
    """
    changes: dict[str, int] = {}
    names = [field.name for field in fields(base)]
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in names or not value.isdecimal():
            raise ValueError(f"a launch configuration is NAME=NUMBER,..., with names {', '.join(names)}: {part!r}")
        changes[name] = int(value)
    return replace(base, **changes)  # type: ignore[arg-type]
