# mypy: ignore-errors
"""Kernels of RMSNorm, rotary embedding and gated activation. Sums are in fp32, roundings those of `api`'s forms."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Values of the enumerations in `api`.
ROUNDED = tl.constexpr(0)
PLUS_ONE = tl.constexpr(2)
SILU = tl.constexpr(0)
GELU = tl.constexpr(1)


@triton.jit
def follow_previous(PDL: tl.constexpr):
    """With programmatic dependent launch (PDL), wait for the previous kernel, and let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def normalized(values, factor, eps, COLUMNS: tl.constexpr, ROUNDING: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of fp32 rows ``[rows, columns]``, which are 0 beyond COLUMNS, by a weight ``[1, columns]`` in fp32."""
    mean = tl.sum(values * values, 1) / COLUMNS
    return weighted(values * tl.rsqrt(mean + eps)[:, None], factor, dtype, ROUNDING)


@triton.jit(do_not_specialize=["rows"])
def normalize(
    x,  # [rows, COLUMNS], contiguous
    addend,  # as x; not read without ADDS
    total,  # as x: x + addend, rounded; not written without ADDS
    weight,  # [COLUMNS]
    out,  # as x
    rows,
    eps,
    COLUMNS: tl.constexpr,
    ADDS: tl.constexpr,
    ROUNDING: tl.constexpr,  # of NormForm
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,  # it starts while the previous kernel ends (programmatic dependent launch)
):
    follow_previous(PDL)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_C)
    kept = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    values = tl.load(x + at, mask=kept, other=0.0).to(tl.float32)
    if ADDS:
        values = (values + tl.load(addend + at, mask=kept, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, values, mask=kept)
        values = values.to(tl.float32)
    factor = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, normalized(values, factor, eps, COLUMNS, ROUNDING, out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def normalize_backward(
    x,  # [rows, COLUMNS], contiguous
    grad,  # as x: of the result
    weight,  # [COLUMNS]
    grad_x,  # as x
    grad_weight,  # [programs, COLUMNS] fp32, of each program's rows; not written without OF_WEIGHT
    rows,
    eps,
    COLUMNS: tl.constexpr,
    OF_WEIGHT: tl.constexpr,
    ROUNDING: tl.constexpr,  # of NormForm
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,  # blocks of rows in flight
    PDL: tl.constexpr,  # as of `normalize`
):
    follow_previous(PDL)
    dtype: tl.constexpr = grad_x.dtype.element_ty
    column = tl.arange(0, BLOCK_C)
    factor = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    if ROUNDING == PLUS_ONE:
        factor = factor + 1.0
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    blocks = tl.cdiv(rows, BLOCK_R)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        row = block * BLOCK_R + tl.arange(0, BLOCK_R)
        kept = (row < rows)[:, None] & (column < COLUMNS)[None, :]
        at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        values = tl.load(x + at, mask=kept, other=0.0).to(tl.float32)
        given = tl.load(grad + at, mask=kept, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values, 1) / COLUMNS + eps)[:, None]
        values, scaled = values * inverse, given * factor
        if ROUNDING == ROUNDED:
            scaled = scaled.to(dtype).to(tl.float32)
        along = tl.sum(scaled * values, 1)[:, None] / COLUMNS
        tl.store(grad_x + at, (inverse * (scaled - along * values)).to(dtype), mask=kept)
        if OF_WEIGHT:
            if ROUNDING == ROUNDED:
                values = values.to(dtype).to(tl.float32)
            total += tl.where(kept, given * values, 0.0)
    if OF_WEIGHT:
        tl.store(grad_weight + tl.program_id(0) * COLUMNS + column, tl.sum(total, 0), mask=column < COLUMNS)


@triton.jit(do_not_specialize=["rows"])
def normalize_gated(
    x,  # [rows, COLUMNS], contiguous: rows of GROUPS groups
    gates,  # likewise, of strided rows of groups
    weight,  # [GROUPS, COLUMNS], contiguous
    out,  # as x
    rows,
    gate_stride,
    eps,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    AFTER: tl.constexpr,  # whether gates multiply normalized elements
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,  # as of `normalize`
):
    follow_previous(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    column = tl.arange(0, BLOCK_C)
    kept = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    at, group = row[:, None] * COLUMNS + column[None, :], row % GROUPS
    within = group[:, None] * COLUMNS + column[None, :]
    values = tl.load(x + at, mask=kept, other=0.0).to(tl.float32)
    opened = tl.load(gates + (row // GROUPS)[:, None] * gate_stride + within, mask=kept, other=0.0).to(tl.float32)
    opened = opened / (1.0 + tl.exp(-opened))
    if not AFTER:
        values = values * opened
    mean = tl.sum(values * values, 1) / COLUMNS
    values = (values * tl.rsqrt(mean + eps)[:, None]).to(dtype).to(tl.float32)
    values = values * tl.load(weight + within, mask=kept, other=0.0).to(tl.float32)
    if AFTER:
        values = values.to(dtype).to(tl.float32) * opened
    tl.store(out + at, values.to(dtype), mask=kept)


@triton.jit(do_not_specialize=["length"])
def rotate(
    queries,  # [batch, QUERY_HEADS, length, HEAD_DIM], contiguous along head_dim
    keys,  # likewise, of KEY_HEADS
    cos,  # [batch or 1, length, ROTARY], or with HALVES half of it; contiguous along the last axis
    sin,  # likewise, with the same strides
    rotated_queries,  # with the strides of queries
    rotated_keys,  # with the strides of keys
    length,
    query_batch_stride,
    query_head_stride,
    query_stride,
    key_batch_stride,
    key_head_stride,
    key_stride,
    angle_batch_stride,
    angle_stride,
    query_weight,  # [HEAD_DIM], as of `normalize`; not read without NORM
    key_weight,  # likewise
    normalized_queries,  # with the strides of queries; not written without NORM
    normalized_keys,  # likewise, of keys
    eps,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,  # the first elements of a head are rotated, the others copied
    HALVES: tl.constexpr,  # whether both halves of what is rotated have the same cos and sin
    ROUNDING: tl.constexpr,  # of RotaryForm
    BACKWARD: tl.constexpr,  # whether gradients of results are given
    NORM: tl.constexpr,  # of NormForm: heads are normalized first; None if not
    BLOCK_H: tl.constexpr,  # heads of a program
    PDL: tl.constexpr,  # as of `normalize`
):
    follow_previous(PDL)
    QUERY_BLOCKS: tl.constexpr = (QUERY_HEADS + BLOCK_H - 1) // BLOCK_H
    batch, token = (tl.program_id(0) // length).to(tl.int64), (tl.program_id(0) % length).to(tl.int64)
    angles = batch * angle_batch_stride + token * angle_stride
    query_norm, key_norm = (query_weight, normalized_queries, eps), (key_weight, normalized_keys, eps)
    block = tl.program_id(1)
    if block < QUERY_BLOCKS:
        at = batch * query_batch_stride + token * query_stride
        parts = (queries + at, rotated_queries + at, cos + angles, sin + angles)
        heads = (block * BLOCK_H + tl.arange(0, BLOCK_H), query_head_stride)
        rotate_heads(parts, heads, QUERY_HEADS, HEAD_DIM, ROTARY, HALVES, ROUNDING, BACKWARD, query_norm, at, NORM)
    else:
        at = batch * key_batch_stride + token * key_stride
        parts = (keys + at, rotated_keys + at, cos + angles, sin + angles)
        heads = ((block - QUERY_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H), key_head_stride)
        rotate_heads(parts, heads, KEY_HEADS, HEAD_DIM, ROTARY, HALVES, ROUNDING, BACKWARD, key_norm, at, NORM)


@triton.jit
def inverse_rms(x, heads, eps, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Of each head, summed as in `normalize`: whole rows, in blocks of the same shape, give the same bits."""
    head, head_stride = heads
    column = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    kept = (head < HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    at = head.to(tl.int64)[:, None] * head_stride + column[None, :]
    values = tl.load(x + at, mask=kept, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + eps)[:, None]


@triton.jit
def rotate_heads(
    parts,  # a token, where it is written, cos and sin
    heads,  # indices of heads, and the stride between them
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HALVES: tl.constexpr,
    ROUNDING: tl.constexpr,
    BACKWARD: tl.constexpr = False,
    norm=None,  # the weight, memory for normalized elements and eps; not read without NORM
    token=0,  # offset of the token in that memory
    NORM: tl.constexpr = None,
):
    x, out, cos, sin = parts
    head, head_stride = heads
    HALF: tl.constexpr = ROTARY // 2
    SECOND: tl.constexpr = 0 if HALVES else HALF
    here = (head < HEADS)[:, None]
    start = head.to(tl.int64)[:, None] * head_stride
    within = tl.arange(0, triton.next_power_of_2(HALF))
    rotated = within < HALF
    kept = here & rotated[None, :]
    at = start + within[None, :]
    if NORM is not None:
        weight, normalized, eps = norm
        norm = (weight, inverse_rms(x, heads, eps, HEADS, HEAD_DIM), normalized + token)
    first = load_normalized(x, at, kept, norm, within, rotated, NORM).to(tl.float32)
    second = load_normalized(x, at + HALF, kept, norm, HALF + within, rotated, NORM).to(tl.float32)
    first_cos = tl.load(cos + within, mask=rotated, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + within, mask=rotated, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + SECOND + within, mask=rotated, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + SECOND + within, mask=rotated, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:  # the transposed matrix
        first_sin, second_sin = -second_sin, -first_sin
    one, two = first * first_cos, -second * first_sin
    three, four = second * second_cos, first * second_sin
    if ROUNDING == ROUNDED:
        dtype: tl.constexpr = out.dtype.element_ty
        one, two = one.to(dtype).to(tl.float32), two.to(dtype).to(tl.float32)
        three, four = three.to(dtype).to(tl.float32), four.to(dtype).to(tl.float32)
    tl.store(out + at, (one + two).to(out.dtype.element_ty), mask=kept)
    tl.store(out + at + HALF, (three + four).to(out.dtype.element_ty), mask=kept)
    if HEAD_DIM > ROTARY:
        after = ROTARY + tl.arange(0, triton.next_power_of_2(HEAD_DIM - ROTARY))
        passed = here & (after < HEAD_DIM)[None, :]
        at = start + after[None, :]
        tl.store(out + at, load_normalized(x, at, passed, norm, after, after < HEAD_DIM, NORM), mask=passed)


@triton.jit
def load_normalized(x, at, kept, norm, column, in_weight, NORM: tl.constexpr):
    """Elements of heads, with NORM normalized and rounded as by `normalize`, and written."""
    values = tl.load(x + at, mask=kept, other=0.0)
    if NORM is not None:
        weight, inverse, normalized = norm
        dtype: tl.constexpr = values.dtype
        factor = tl.load(weight + column, mask=in_weight, other=0.0).to(tl.float32)[None, :]
        values = weighted(values.to(tl.float32) * inverse, factor, dtype, NORM)
        tl.store(normalized + at, values, mask=kept)
    return values


@triton.jit
def weighted(values, factor, dtype: tl.constexpr, ROUNDING: tl.constexpr):
    """Normalized numbers times a weight, both in fp32, rounded as a NormForm says."""
    if ROUNDING == ROUNDED:
        values = values.to(dtype).to(tl.float32)
    if ROUNDING == PLUS_ONE:
        factor = factor + 1.0
    return (factor * values).to(dtype)


@triton.jit
def gate(
    gates,  # [rows, COLUMNS], contiguous along columns
    ups,  # likewise
    out,  # [rows, COLUMNS], contiguous
    gate_stride,
    up_stride,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    kept = column < COLUMNS
    x = tl.load(gates + row * gate_stride + column, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_stride + column, mask=kept, other=0.0).to(tl.float32)
    share = activated(x, ACTIVATION).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * COLUMNS + column, (share * up).to(out.dtype.element_ty), mask=kept)


@triton.jit
def gate_backward(
    gates,  # as of `gate`
    ups,  # likewise
    grad,  # likewise: of the result
    grad_gates,  # [rows, COLUMNS], contiguous
    grad_ups,  # likewise
    gate_stride,
    up_stride,
    grad_stride,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    dtype: tl.constexpr = grad_gates.dtype.element_ty
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    kept = column < COLUMNS
    x = tl.load(gates + row * gate_stride + column, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_stride + column, mask=kept, other=0.0).to(tl.float32)
    given = tl.load(grad + row * grad_stride + column, mask=kept, other=0.0).to(tl.float32)
    of_share = (given * up).to(dtype).to(tl.float32)
    share = activated(x, ACTIVATION).to(dtype).to(tl.float32)
    tl.store(grad_gates + row * COLUMNS + column, (of_share * slope(x, ACTIVATION)).to(dtype), mask=kept)
    tl.store(grad_ups + row * COLUMNS + column, (given * share).to(dtype), mask=kept)


@triton.jit
def activated(gates, ACTIVATION: tl.constexpr):
    """The activation of gates, in fp32."""
    if ACTIVATION == SILU:
        result = gates / (1.0 + tl.exp(-gates))
    elif ACTIVATION == GELU:
        result = 0.5 * gates * (1.0 + tl.erf(gates * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gates + 0.044715 * gates * gates * gates)
        result = 0.5 * gates * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * inner)))
    return result


@triton.jit
def slope(gates, ACTIVATION: tl.constexpr):
    """The derivative of `activated`."""
    if ACTIVATION == SILU:
        share = 1.0 / (1.0 + tl.exp(-gates))
        result = share * (1.0 + gates * (1.0 - share))
    elif ACTIVATION == GELU:
        density = 0.3989422804014327 * tl.exp(-0.5 * gates * gates)
        result = 0.5 * (1.0 + tl.erf(gates * 0.7071067811865476)) + gates * density
    else:
        inner = 0.7978845608028654 * (gates + 0.044715 * gates * gates * gates)
        share, rest = 1.0 / (1.0 + tl.exp(-2.0 * inner)), 1.0 / (1.0 + tl.exp(2.0 * inner))
        of_inner = 0.7978845608028654 * (1.0 + 0.134145 * gates * gates)
        result = share + 2.0 * gates * share * rest * of_inner
    return result
