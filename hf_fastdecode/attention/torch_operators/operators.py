"""Dense attention with log-sum-exp by PyTorch's fused operators, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..kv import Partial, empty_partial, merge
from . import BACKEND_VARIABLE, TORCH_BACKENDS, backend_of_environment

# Packed queries from which cuDNN is faster than flash over a long context, on an H200:
#   32 KV heads: 512; 8 KV heads: between 512 and 4096; 1 KV head: more than 8192
# With fewer queries flash is faster, because it splits the keys. 1024 is a compromise for 8 to 32 KV heads. cuDNN also
# plans each new shape for up to a second. Nodes keep their shape; suffixes change theirs at every step, but pack the
# queries of one row only, too few for the threshold.
_CUDNN_MIN_QUERIES = 1024
_CUDNN_MIN_KEYS = 1024


class BackendError(ValueError):
    """A forced backend cannot compute the request."""


def cannot_run(backend: str, reason: str) -> BackendError:
    """The error for a forced backend, with the remedy."""
    by_variable = backend_of_environment() == backend
    remedy = f"'plain', or 'auto' with ${BACKEND_VARIABLE} unset" if by_variable else "'auto' or 'plain'"
    return BackendError(f"backend={backend!r} cannot run: {reason}; use backend={remedy}")


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Boolean ``[length, length]``: query ``j`` sees keys ``0..j``."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def plain_partial(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    visible: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> Partial:
    """Attention by two matrix products with sums in at least fp32: any shapes, masks and soft-capping.

    Args:
        query: ``[..., queries, head_dim]``.
        keys: ``[..., length, head_dim]``.
        values: ``[..., length, value_dim]``.
        visible: Boolean, broadcastable to ``[..., queries, length]``: visible keys; all when None.
        softcap: When given, scores become ``softcap * tanh(scores / softcap)``.
        bias: Added to the scaled scores, broadcastable to ``[..., queries, length]``; not with a soft cap.
    """
    if not keys.shape[-2]:
        batch = torch.broadcast_shapes(query.shape[:-2], keys.shape[:-2])
        compute = torch.promote_types(query.dtype, torch.float32)
        return empty_partial((*batch, query.shape[-2], values.shape[-1]), query.device, compute)
    scores = product(query, keys.mT)  # [..., queries, length]
    if scores.requires_grad or values.requires_grad:
        return _differentiable(scores, values, scale, visible, softcap, bias)
    # In place: a prefill's scores are far larger than what else it reads and writes.
    if softcap is None:
        scores.mul_(scale)
    else:
        scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores.add_(bias)
    if visible is not None:
        scores.masked_fill_(~visible, -torch.inf)
    row_max = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    weights = scores.sub_(row_max).exp_()
    row_sum = weights.sum(-1, keepdim=True)
    out = product(weights.to(values.dtype) if _multiplies_half(values) else weights, values)
    # A row that sees no key has weights of 0, and keeps them.
    return Partial(
        out.div_(row_sum.clamp_min(torch.finfo(scores.dtype).tiny)), row_max.add_(row_sum.log()).squeeze(-1)
    )


def _differentiable(
    scores: Tensor, values: Tensor, scale: float, visible: Tensor | None, softcap: float | None, bias: Tensor | None
) -> Partial:
    """`plain_partial` from its products ``query @ keys.mT`` on, for gradients."""
    scores = scores * scale if softcap is None else softcap * torch.tanh(scores * (scale / softcap))
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1))
    return Partial(weights @ values.to(weights.dtype), lse)


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` in at least fp32. Half precision on a GPU is multiplied as it is and summed in fp32."""
    if left.dtype == right.dtype and _multiplies_half(left) and _multiplies_half(right):
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        one, two = (part.expand(*batch, -1, -1).reshape(prod(batch), *part.shape[-2:]) for part in (left, right))
        return torch.bmm(one, two, out_dtype=torch.float32).view(*batch, left.shape[-2], right.shape[-1])
    compute = torch.promote_types(left.dtype, torch.float32)
    return left.to(compute) @ right.to(compute)


def _multiplies_half(x: Tensor) -> bool:
    """Whether half precision is multiplied as it is: on CUDA, without a gradient."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and not x.requires_grad


def _fused(operator: str, query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """Attention by a fused operator of PyTorch that returns the log-sum-exp."""
    aten, inputs = torch.ops.aten, (query, keys, values)
    if operator == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, causal, scale=scale)
        return Partial(out.to(lse.dtype), lse)
    if operator == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal, scale=scale)
    elif operator == "cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*inputs, None, True, 0.0, causal, scale=scale)
        lse = lse.view(out.shape[:-1])
    else:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(*inputs, None, True, 0.0, causal, scale=scale)
        lse = lse[..., : query.shape[-2]]  # the operator pads queries to a multiple of 32
    return Partial(out.float(), lse)


class _Inputs(NamedTuple):
    """The properties of a dense attention's tensors on which the choice of its operator depends."""

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    needs_gradient: bool
    is_large: bool

    def refusal(self, operator: str) -> str | None:
        """Why an operator does not support them; None when it does."""
        half = self.dtype in (torch.float16, torch.bfloat16)
        if operator == "plain":
            return None
        if self.needs_gradient:
            return "torch.no_grad() is off and a gradient is needed, but its log-sum-exp, which merges parts, has none"
        if (self.device == "cpu") != (operator == "cpu") or self.device not in ("cpu", "cuda"):
            return f"it does not run on device {self.device!r}"
        if self.head_dim != self.value_dim:
            return f"it needs one head_dim for keys and values, got {self.head_dim} and {self.value_dim}"
        if operator in ("flash", "cudnn"):
            bound = 256 if operator == "flash" else 128
            if not half:
                return f"it takes float16 and bfloat16, got {self.dtype}"
            if self.head_dim > bound or self.head_dim % 8:
                return f"it takes head_dim up to {bound} in multiples of 8, got {self.head_dim}"
        if operator == "efficient" and (self.dtype == torch.float64 or self.head_dim % (8 if half else 4)):
            return f"it takes fp32 and half precision and an aligned head_dim, got {self.dtype} and {self.head_dim}"
        return None


@lru_cache(1024)
def _choose(backend: str, inputs: _Inputs) -> str:
    if backend not in TORCH_BACKENDS:
        raise BackendError(f"backend must be one of {', '.join(TORCH_BACKENDS)}, got {backend!r}")
    if backend != "auto":
        if reason := inputs.refusal(backend):
            raise cannot_run(backend, reason)
        return backend
    candidates = ["cudnn"] * inputs.is_large + ["cpu", "flash", "efficient"]
    return next((name for name in candidates if inputs.refusal(name) is None), "plain")


def choose_operator(backend: str, query: Tensor, keys: Tensor, values: Tensor) -> str:
    """The name of the operator for dense attention over these tensors; BackendError if a forced one cannot run."""
    differentiable = query.requires_grad or keys.requires_grad or values.requires_grad
    is_large = keys.shape[-2] >= _CUDNN_MIN_KEYS and query.shape[-2] >= _CUDNN_MIN_QUERIES
    widths = query.shape[-1], values.shape[-1]
    needs_gradient = differentiable and torch.is_grad_enabled()
    return _choose(backend, _Inputs(query.device.type, query.dtype, *widths, needs_gradient, is_large))


def biases_at(biases: Tensor, distances: Tensor) -> Tensor:
    """Biases of pairs of tokens: ``[heads, ...]``; distances, int64 ``[...]``, below 0 are of keys that are hidden."""
    return biases[:, distances.clamp(0, biases.shape[1] - 1)]


@dataclass(frozen=True)
class DenseAttention:
    """Dense attention with fixed score options, see `Scoring`, and backend, one of `TORCH_BACKENDS`."""

    scale: float
    softcap: float | None = None
    backend: str = "auto"
    window: int | None = None
    distances: Tensor | None = None

    def partial(self, query: Tensor, keys: Tensor, values: Tensor, *, causal: bool = False) -> Partial:
        """Attention of packed queries ``[batch, heads, queries, head_dim]`` over all keys, with the log-sum-exp.

        With `causal`, query ``j`` sees keys ``0..j``; it needs as many keys as queries, and no soft cap.
        """
        if self.softcap is not None:
            self.raise_if_forced("a soft cap")
            return plain_partial(query, keys, values, self.scale, softcap=self.softcap)
        operator = choose_operator(self.backend, query, keys, values)
        # On empty keys, fused operators crash (CPU) or return a log-sum-exp of +inf (flash).
        if keys.shape[-2] == 0 or query.shape[-2] == 0:
            dtype = torch.promote_types(query.dtype, torch.float32)
            return empty_partial((*query.shape[:-1], values.shape[-1]), query.device, dtype)
        if operator == "plain":
            visible = causal_mask(query.shape[-2], query.device) if causal else None
            return plain_partial(query, keys, values, self.scale, visible=visible)
        return _fused(operator, query, keys, values, self.scale, causal)

    def partial_at(self, query: Tensor, keys: Tensor, values: Tensor, positions: Tensor | None) -> Partial:
        """`partial` of queries at these positions among the keys, ``[batch, queries]`` int64 on the CPU.

        Within the window, keys that no query sees are not read, and keys that all queries see need no mask. Positions
        are None where there is neither a window nor a bias.
        """
        if positions is None or not positions.numel():
            return self.partial(query, keys, values)
        if self.window is None:
            return plain_partial(query, keys, values, self.scale, bias=self.bias(positions, keys))
        oldest, count = positions - self.window + 1, keys.shape[2]
        first_seen_by_any, first_seen_by_all = (min(max(0, int(bound)), count) for bound in oldest.aminmax())
        part = self.partial(query, keys[:, :, first_seen_by_all:], values[:, :, first_seen_by_all:])
        if first_seen_by_any == first_seen_by_all:
            return part
        position = torch.arange(first_seen_by_any, first_seen_by_all, device=query.device)
        visible = position >= oldest.to(query.device)[..., None]
        edge = keys[:, :, first_seen_by_any:first_seen_by_all], values[:, :, first_seen_by_any:first_seen_by_all]
        return merge(part, plain_partial(query, *edge, self.scale, visible=visible[:, None], softcap=self.softcap))

    def bias(self, positions: Tensor | None, keys: Tensor) -> Tensor | None:
        """Bias of scores by distance, ``[batch, heads, queries, length]``; hidden keys get any bias."""
        if self.distances is None or positions is None:
            return None
        distances = positions.to(keys.device)[..., None] - torch.arange(keys.shape[2], device=keys.device)
        return biases_at(self.distances, distances).transpose(0, 1)

    def raise_if_forced(self, what: str) -> None:
        """Raise if a fused operator is forced: none computes `what` with a log-sum-exp."""
        if self.backend not in ("auto", "plain"):
            raise cannot_run(self.backend, f"it does not compute {what}")


def with_sinks(part: Partial, sinks: Tensor) -> Partial:
    """Merge attention sinks: one more key per query, of value 0 and score `sinks` (broadcast to ``lse``)."""
    return merge(part, Partial(part.out.new_zeros(()), sinks.to(part.lse.dtype)))
