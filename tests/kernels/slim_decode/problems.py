"""Slim decode problems: inputs in poisoned storage, the fp64 oracle, and PyTorch's own answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_fastdecode.conversion.fit.cached_numbers import EIGHT_BITS, load, store, views
from hf_fastdecode.kernels.slim_decode.api import (
    ClusterConfig,
    RotaryTables,
    Scales,
    SlimPartial,
    TwoLaunchConfig,
    slim_decode,
)

from ...attention.forests import DTYPE_NAMES, assert_error_rule


@dataclass(frozen=True)
class Case:
    """A step: per row, `lengths` filled slots and `starts` slots of padding before; `rotary` dims of a head rotate."""

    lengths: tuple[int, ...] = (150,)
    starts: tuple[int, ...] | None = None
    heads: int = 4
    head_dim: int = 64
    rank: int = 0
    rotary: int = 64
    dtype: torch.dtype = torch.float16  # of 8 bits: as `eight_bits.store` lays them out
    magnitudes: bool = False  # of heads and tokens: from 1e-3 to 1e3 times those of others
    row_ratio: float = 1.0  # of keys and coordinates over those of the row before
    offset: bool = True
    tables_of_rows: bool = False
    consecutive: bool = False  # positions, as clusters take them; else random angles

    def __str__(self) -> str:
        parts = ["m" + "+".join(map(str, self.lengths))]
        parts += ["padded"] if self.starts else []
        parts += [f"h{self.heads}", f"d{self.head_dim}", f"r{self.rank}", f"rope{self.rotary}"]
        return "-".join([*parts, DTYPE_NAMES[self.dtype]])


@dataclass
class Problem:
    """Arguments of `slim_decode`; slots that no row has filled are NaN.

    `dequantised` are keys and V-coordinates as PyTorch's operators read them from 8 bits.
    """

    query: Tensor
    keys: Tensor
    coordinates: Tensor
    lengths: Tensor
    options: dict[str, Any]
    dequantised: tuple[Tensor, Tensor] | None = None

    def run(self, config: TwoLaunchConfig | ClusterConfig | None = None, **options: Any) -> SlimPartial:
        return slim_decode(self.query, self.keys, self.coordinates, self.lengths, config, **self.options, **options)

    def answer(self, dtype: torch.dtype, operands: torch.dtype | None = None) -> SlimPartial:
        """In PyTorch's operators in one dtype, with weights and what they average rounded to another if given.

        The oracle in fp64; in fp32, what slim layers compute without the kernel.
        """
        heads, _, head_dim = self.query.shape[1:]
        device = self.keys.device
        slot = torch.arange(self.keys.shape[1], device=device)
        starts = self.options["starts"]
        seen = slot < self.lengths[:, None]
        if starts is not None:
            seen &= slot >= starts[:, None]
        parts = self.dequantised or (self.keys, self.coordinates)
        stored, coordinates = (part.masked_fill(~seen[..., None], 0).to(dtype) for part in parts)
        offset = self.options["key_offset"]
        keys = (stored if offset is None else stored + offset.to(dtype)).unflatten(-1, (heads, head_dim))
        if self.options["rotary"] is not None:
            cos, sin = (table.to(dtype)[:, :, None] for table in self.options["rotary"][:2])
            low, high, rest = keys.tensor_split((cos.shape[-1], 2 * cos.shape[-1]), -1)
            keys = torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)
        scores = self.query.to(dtype) @ keys.permute(0, 2, 3, 1) * self.options["scale"]  # [rows, heads, 1, slots]
        scores = scores[:, :, 0].masked_fill(~seen[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None].nan_to_num(neginf=0)).exp()
        if operands is not None:
            weights, stored, coordinates = (part.to(operands).to(dtype) for part in (weights, stored, coordinates))
        return SlimPartial(weights @ stored, weights @ coordinates, lse)

    def check_repeats(
        self, config: TwoLaunchConfig | ClusterConfig | None, *, repeats: int = 1, parts: int = 2
    ) -> None:
        """Hold a result against the oracle, and repeats against its bits."""
        found = self.run(config)
        self.check(found, parts=parts)
        for _ in range(repeats):
            assert all(torch.equal(*pair) for pair in zip(found, self.run(config)))

    def check_magnitude(self, config: TwoLaunchConfig | ClusterConfig, magnitude: float) -> None:
        """Hold a result over 8 bits against that of scales times a magnitude, outside the range of fp16."""
        expected = self.run(config)
        for scales in self.options["scales"]:
            stored = scales.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
            scales.copy_((stored.float() * magnitude).bfloat16().view(torch.uint8))
        self.query /= magnitude
        for part, wanted in zip(self.run(config)[:2], expected[:2]):
            torch.testing.assert_close(part / magnitude, wanted, rtol=0.02, atol=0.02)

    def check(self, found: SlimPartial, *, parts: int = 2) -> None:
        """Hold a result against the oracle: at most twice the error of PyTorch's operators."""
        dtype = torch.float16 if self.dequantised else self.keys.dtype  # of the products' operands
        # Two parts of fp16 are as precise as fp32; bf16, and one part, have errors of weights as fused attention has.
        rounded = dtype if dtype == torch.bfloat16 or parts == 1 else None
        oracle, yardstick = self.answer(torch.float64), self.answer(torch.float32, rounded)
        empty = oracle.lse == -torch.inf
        assert (found.lse[empty] == -torch.inf).all()
        assert not found.keys[empty].any()
        assert not found.coordinates[empty].any()
        if empty.all():
            return
        for name in SlimPartial._fields:
            ours, theirs, exact = (getattr(part, name)[~empty] for part in (found, yardstick, oracle))
            assert ours.dtype == torch.float32
            if exact.numel():
                assert_error_rule(ours, theirs, exact, oracle.lse[~empty])


def make_problem(case: Case, device: str = "cpu", *, seed: int = 0, extra: int = 3) -> Problem:
    """Random inputs of a case, in storage with `extra` slots."""
    generator = torch.Generator().manual_seed(seed)
    rows, slots, columns = len(case.lengths), max(case.lengths) + extra, case.heads * case.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    wide = normal(rows, slots, columns + case.rank + 8)  # keys and coordinates with strides of their own
    slot = torch.arange(slots)
    filled = slot < torch.tensor(case.lengths)[:, None]
    if case.starts is not None:
        filled &= slot >= torch.tensor(case.starts)[:, None]
    if case.magnitudes:
        wide[..., :columns].unflatten(-1, (case.heads, -1)).mul_(10 ** (3 * normal(rows, slots, case.heads, 1)))
    wide *= case.row_ratio ** torch.arange(rows)[:, None, None]
    keys, coordinates, scales, dequantised = wide[..., :columns], wide[..., columns:][..., : case.rank], None, None
    if case.dtype in EIGHT_BITS:
        parts = [store(part, case.dtype, case.head_dim) for part in (keys, coordinates)]
        dequantised = tuple(load(part, case.dtype, case.head_dim).to(device) for part in parts)
        widths = [part.shape[-1] for part in parts]
        odd = -sum(widths) % 16 if case.consecutive else 7  # bytes behind a token, which clusters copy by 16
        stored = torch.cat([*parts, torch.empty(rows, slots, odd, dtype=torch.uint8)], -1)
        stored[~filled] = 255  # NaN as a scale, and in fp8
        whole = stored.to(device).split([*widths, odd], -1)
        (keys, of_keys), (coordinates, of_coordinates) = (views(x, case.dtype, case.head_dim) for x in whole[:2])
        scales = Scales(of_keys, of_coordinates)
    else:
        wide[~filled] = torch.nan
        wide = wide.to(case.dtype).to(device)
        keys, coordinates = wide[..., :columns], wide[..., columns : columns + case.rank]
    rotary = None
    if case.rotary:
        of_rows = rows if case.tables_of_rows else 1
        if case.consecutive:
            frequencies = 1000.0 ** -(torch.arange(case.rotary // 2, device=device) / (case.rotary // 2))
            positions = torch.arange(slots, device=device) + 1000 * torch.arange(of_rows, device=device)[:, None]
            rotary = RotaryTables.of(frequencies, positions)
        else:
            angles = 9 * normal(of_rows, slots, case.rotary // 2)
            rotary = RotaryTables(angles.cos().to(device), angles.sin().to(device))

    def numbers(values: tuple[int, ...] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    return Problem(
        normal(rows, case.heads, 1, case.head_dim).to(device),
        keys,
        coordinates,
        numbers(case.lengths),
        {
            "scale": case.head_dim**-0.5,
            "key_offset": normal(columns).to(device) if case.offset else None,
            "rotary": rotary,
            "starts": numbers(case.starts),
            "scales": scales,
        },
        dequantised,
    )
