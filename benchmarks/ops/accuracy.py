"""The check before the timing: a way's error against the fp64 oracle, beside PyTorch's own attention's error.

The rule is the one of the tests: at most twice the error of PyTorch's own attention in the same dtype, in the largest
and in the mean error, on some rows and KV heads, which the oracle can afford.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.kv import ForestKV, Segment

from .inputs import OpInputs

BOUND = 2.0
"""Times PyTorch's own error that a way may err."""

_ROWS = 32  # of 1,024 with four query heads to a KV head, one of each tile of 128 packed queries


@dataclass(frozen=True)
class Oracle:
    """What a few rows and query heads of a case should be, and what PyTorch makes of them.

    Attributes:
        rows, heads: Indices of those checked.
        out: ``[rows, heads, 1, head_dim]`` fp64: the reference.
        unit: Relative error that no way can avoid: one unit in the last place, and what a log-sum-exp of this size
            loses as an exponent in fp32, twice.
        fused: The same in the case's dtype by `scaled_dot_product_attention`: the yardstick.
        eager: The same with scores stored in that dtype, as transformers' eager attention does: the yardstick of ways
            that store them too.
    """

    rows: Tensor
    heads: Tensor
    out: Tensor
    unit: float
    fused: Tensor
    eager: Tensor

    def error(self, actual: Tensor, yardstick: str = "fused") -> float:
        """How many times PyTorch's error `actual` ``[all rows, all heads, 1, head_dim]`` errs; inf when not finite.

        The errors are the largest one and the Frobenius norm. PyTorch's count at least as half of `unit`, and a
        quarter, so that a case in which it is right to the last bit does not forbid rounding.
        """
        if not bool(torch.isfinite(actual).all()):
            return torch.inf
        theirs = (self.fused if yardstick == "fused" else self.eager).double() - self.out
        ours = actual[self.rows][:, self.heads].to(self.fused.dtype).double() - self.out
        largest = ours.abs().max() / torch.maximum(theirs.abs().max(), self.unit / 2 * self.out.abs().max())
        norm = ours.norm() / torch.maximum(theirs.norm(), self.unit / 4 * self.out.norm())
        return float(torch.maximum(largest, norm))


def make_oracle(inputs: OpInputs) -> Oracle:
    """The oracle on up to 32 rows, evenly spread, and two KV heads."""
    case, device = inputs.case, inputs.query.device
    rows = sorted({index * (case.rows - 1) // (_ROWS - 1) for index in range(_ROWS)})
    kv_heads = sorted({0, case.kv_heads - 1})
    group = case.heads // case.kv_heads
    heads = [head * group + each for head in kv_heads for each in range(group)]
    row_index, head_index = torch.tensor(rows, device=device), torch.tensor(heads, device=device)
    kv_index = torch.tensor(kv_heads, device=device)
    own = [part[row_index][:, kv_index] for part in inputs.suffix]
    nodes = [part[kv_index] for part in inputs.segment]
    kv = ForestKV(inputs.forest.select_rows(rows), [Segment(*nodes)], Segment(*own), case.suffix)
    query = inputs.query[row_index][:, head_index]
    out, lse = reference.forest_attention(query, kv, inputs.scale)
    unit = torch.finfo(query.dtype).eps + 2 * torch.finfo(torch.float32).eps * float(lse.abs().max())
    yardsticks = [_by_pytorch(query, kv, row, inputs.scale) for row in range(len(rows))]
    return Oracle(
        row_index,
        head_index,
        out,
        unit,
        torch.stack([fused for fused, _ in yardsticks]),
        torch.stack([eager for _, eager in yardsticks]),
    )


def _by_pytorch(query: Tensor, kv: ForestKV, row: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one row over a copy of all its keys, by the fused operator and by two products."""
    group = query.shape[1] // kv.suffix.keys.shape[1]
    parts = [kv.node(span) for span in kv.forest.paths[row]] + [Segment(kv.suffix.keys[row], kv.suffix.values[row])]
    keys = torch.cat([part.keys for part in parts], 1).repeat_interleave(group, 0)
    values = torch.cat([part.values for part in parts], 1).repeat_interleave(group, 0)
    fused = F.scaled_dot_product_attention(query[row][None], keys[None], values[None], scale=scale)[0]
    scores = query[row] @ keys.mT * scale  # [heads, 1, tokens]
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return fused, weights @ values
