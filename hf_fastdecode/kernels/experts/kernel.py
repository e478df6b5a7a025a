# mypy: ignore-errors
"""Kernels of experts: routers, pairs of a row and an expert in the order of experts, products with weights, their sum.

An item is up to BLOCK_M pairs of one expert. Grids depend on the number of pairs alone, so that they can be captured:
programs of items that are left over end at once. Each pair's elements are computed and added up in a fixed order.
Experts of all rows, whose products have the shape of the others', are further items that need no list.

A router's kernel computes the scores of experts for a few rows, the largest of each row, and their shares, in one
launch. Each program multiplies a part of the width; the last to arrive adds all parts up, in their order, and chooses.
"""

import triton
import triton.language as tl

from ..pointwise.kernel import SILU, activated, follow_previous

LEAST = tl.constexpr(-(1 << 63))  # of 64-bit integers


@triton.jit(do_not_specialize=["pairs", "most_items"])
def list_pairs(
    chosen,  # [pairs] integers, the expert of each pair; pairs of others than the EXPERTS are left out
    order,  # [pairs] int32: pairs, those of an expert one after another
    items,  # [most_items, 3] int32: an expert, and the first and last position of its pairs in the order
    pairs,
    most_items,
    EXPERTS: tl.constexpr,
    BLOCK_P: tl.constexpr,  # at least pairs
    BLOCK_Q: tl.constexpr,  # pairs whose position a program finds
    BLOCK_E: tl.constexpr,  # at least EXPERTS
    BLOCK_I: tl.constexpr,  # at least most_items
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,  # it starts while the previous kernel ends (programmatic dependent launch)
):
    follow_previous(PDL)
    pair, own_pair = tl.arange(0, BLOCK_P), tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    expert = expert_of(chosen, pair, pairs, EXPERTS)
    own_expert = expert_of(chosen, own_pair, pairs, EXPERTS)
    earlier = (expert[None, :] == own_expert[:, None]) & (pair[None, :] < own_pair[:, None])
    before = (expert[None, :] < own_expert[:, None]) | earlier
    tl.store(order + tl.sum(before.to(tl.int32), 1), own_pair, mask=own_pair < pairs)
    if tl.program_id(0) == 0:
        number = tl.arange(0, BLOCK_E)
        count = tl.histogram(expert, BLOCK_E, mask=expert < EXPERTS)
        first = tl.cumsum(count, 0) - count
        blocks = (count + BLOCK_M - 1) // BLOCK_M
        item = tl.cumsum(blocks, 0) - blocks
        for block in tl.range(0, tl.max(blocks, 0)):
            at, here = items + 3 * (item + block), block < blocks
            begin = first + block * BLOCK_M
            tl.store(at, number, mask=here)
            tl.store(at + 1, begin, mask=here)
            tl.store(at + 2, tl.minimum(begin + BLOCK_M, first + count), mask=here)
        spare = tl.arange(0, BLOCK_I)
        left = (spare >= tl.sum(blocks, 0)) & (spare < most_items)
        tl.store(items + 3 * spare + 1, 0, mask=left)
        tl.store(items + 3 * spare + 2, 0, mask=left)


@triton.jit
def expert_of(chosen, pair, pairs, EXPERTS: tl.constexpr):
    """Expert id; EXPERTS if invalid, EXPERTS + 1 past the last pair."""
    expert = tl.load(chosen + pair, mask=pair < pairs, other=0).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS)
    return tl.where(pair < pairs, expert, EXPERTS + 1)


@triton.jit
def opened(gates, ups, alpha, limit, offset, ACTIVATION: tl.constexpr):
    """See `config.Gate`, of fp32 elements."""
    gates = tl.minimum(gates, limit, propagate_nan=tl.PropagateNan.ALL)
    ups = tl.maximum(ups, -limit, propagate_nan=tl.PropagateNan.ALL)
    ups = tl.minimum(ups, limit, propagate_nan=tl.PropagateNan.ALL) + offset
    if ACTIVATION == SILU:
        gates = gates / (1.0 + tl.exp(-alpha * gates))
    else:
        gates = activated(gates, ACTIVATION)
    return gates * ups


@triton.jit(do_not_specialize=["rows", "pairs", "listed"])
def products(
    x,  # [pairs // PAIRS_PER_ROW, WIDTH], contiguous
    weight,  # [experts, COLUMNS, WIDTH], or where TRANSPOSED [experts, WIDTH, COLUMNS]; contiguous
    bias,  # [experts, COLUMNS]; not read without BIAS
    out,  # GATED: [pairs, COLUMNS // 2] in the dtype of x; else [pairs, COLUMNS] fp32
    order,  # as `list_pairs` writes it
    items,  # likewise
    shared,  # of experts of all rows: [SHARED * COLUMNS // 2, WIDTH] if GATED, else [COLUMNS, SHARED * WIDTH]
    distance,  # elements from there to the weights of what gates open; read if GATED
    rows,  # pairs of each shared expert, which follow all others, expert by expert
    pairs,  # of other experts
    listed,  # items of other experts, which those of shared ones follow
    alpha,  # as in `config.Gate`; not read without GATED
    limit,
    offset,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    SHARED: tl.constexpr,  # experts of all rows
    TRANSPOSED: tl.constexpr,
    GATED: tl.constexpr,  # columns are gates and what these open, all gates first or INTERLEAVED
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a divisor of WIDTH
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_N // 2
    INNER: tl.constexpr = COLUMNS // 2
    block, item = tl.program_id(0), tl.program_id(1)
    follow_previous(PDL)
    at_item = items + 3 * (tl.minimum(item, listed - 1) if SHARED else item)
    expert = tl.load(at_item).to(tl.int64)
    begin, end = tl.load(at_item + 1), tl.load(at_item + 2)
    weight += expert * WIDTH * COLUMNS
    if SHARED:
        blocks = tl.cdiv(rows, BLOCK_M)
        which, first_row = (item - listed) // blocks, (item - listed) % blocks * BLOCK_M
        of_all, first = item >= listed, pairs + which * rows
        begin = tl.where(of_all, first + first_row, begin)
        end = tl.where(of_all, first + tl.minimum(first_row + BLOCK_M, rows), end)
        shared += which.to(tl.int64) * (INNER * WIDTH if GATED else WIDTH)
        weight = tl.multiple_of(tl.where(of_all, shared, weight), 16)
    if begin < end:
        slot = begin + tl.arange(0, BLOCK_M)
        there = slot < end
        if SHARED:
            pair = tl.where(of_all, slot, tl.load(order + slot, mask=there & (item < listed), other=0))
            row = tl.where(of_all, slot - first, pair // PAIRS_PER_ROW) if GATED else pair
        else:
            pair = tl.load(order + slot, mask=there, other=0)
            row = pair // PAIRS_PER_ROW
        number, within = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        if GATED and not INTERLEAVED:
            inner = block * HALF + number % HALF
            column, kept = inner + number // HALF * INNER, inner < INNER
        else:
            column = block * BLOCK_N + number
            kept = column < COLUMNS
        if TRANSPOSED:
            column = tl.max_contiguous(tl.multiple_of(column, 16), 16)
            at = column[:, None] + within[None, :] * COLUMNS
        elif SHARED and GATED:
            up = tl.multiple_of(tl.where(of_all, distance.to(tl.int64), INNER * WIDTH), 16)
            at = (inner * WIDTH + number // HALF * up)[:, None] + within[None, :]
        elif SHARED:
            stride = tl.multiple_of(tl.where(of_all, SHARED * WIDTH, WIDTH), 16)
            at = column[:, None] * stride + within[None, :]
        else:
            at = column[:, None] * WIDTH + within[None, :]
        here = row[None, :] * WIDTH + within[:, None]
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
            numbers = tl.load(x + here + start, mask=there[None, :], other=0.0)
            further = start * COLUMNS if TRANSPOSED else start
            weights = tl.load(weight + at + further, mask=kept[:, None], other=0.0, eviction_policy="evict_first")
            total = tl.dot(weights, numbers, total)
        if BIAS:
            total += tl.load(bias + expert * COLUMNS + column, mask=kept, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if INTERLEAVED:
                gates, ups = tl.split(tl.permute(tl.reshape(total, (HALF, 2, BLOCK_M)), (0, 2, 1)))
            else:
                gates, ups = tl.split(tl.permute(tl.reshape(total, (2, HALF, BLOCK_M)), (1, 2, 0)))
            inner = block * HALF + tl.arange(0, HALF)
            to = pair[None, :] * INNER + inner[:, None]
            result = opened(gates, ups, alpha, limit, offset, ACTIVATION).to(out.dtype.element_ty)
            tl.store(out + to, result, mask=there[None, :] & (inner < INNER)[:, None])
        else:
            to = pair[None, :] * COLUMNS + column[:, None]
            tl.store(out + to, total, mask=there[None, :] & kept[:, None])


@triton.jit
def add_up(
    products,  # [pairs, COLUMNS] fp32, and those of SHARED experts of all rows, expert by expert
    chosen,  # [pairs], as of `list_pairs`: what is left out there is not read here
    shares,  # [pairs]
    out,  # [pairs // PAIRS_PER_ROW, COLUMNS]
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_P: tl.constexpr,  # at least PAIRS_PER_ROW
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column, index = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P)
    pair, kept = row * PAIRS_PER_ROW + index, column < COLUMNS
    follow_previous(PDL)
    expert = tl.load(chosen + pair, mask=index < PAIRS_PER_ROW, other=-1)
    there = (expert >= 0) & (expert < EXPERTS)
    share = tl.load(shares + pair, mask=there, other=0.0).to(tl.float32)
    at = pair[:, None] * COLUMNS + column[None, :]
    numbers = tl.load(products + at, mask=there[:, None] & kept[None, :], other=0.0)
    result = tl.sum(numbers * share[:, None], 0)
    rows = tl.num_programs(0)
    for number in tl.static_range(SHARED):
        at = (rows * (PAIRS_PER_ROW + number) + row) * COLUMNS + column
        result += tl.load(products + at, mask=kept, other=0.0)
    tl.store(out + row * COLUMNS + column, result.to(out.dtype.element_ty), mask=kept)


@triton.jit
def open_sorted(
    gate_up,  # [pairs, 2 * INNER], of pairs in the order of experts
    bias,  # [experts, 2 * INNER]; not read without BIAS
    chosen,  # [pairs] integers, in the order of experts
    order,  # [pairs] int64: number of each pair
    positions,  # [pairs] int32: position in the order of experts of each pair, written here
    out,  # [pairs, INNER]
    alpha,  # as in `config.Gate`
    limit,
    offset,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    slot, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if block == 0:
        tl.store(positions + tl.load(order + slot), slot.to(tl.int32))
    column = block * BLOCK_C + tl.arange(0, BLOCK_C)
    if INTERLEAVED:
        both = 2 * block * BLOCK_C + tl.arange(0, 2 * BLOCK_C)
        numbers = tl.load(gate_up + slot * (2 * INNER) + both, mask=both < 2 * INNER, other=0.0).to(tl.float32)
        if BIAS:
            of_expert = bias + tl.load(chosen + slot).to(tl.int64) * (2 * INNER)
            numbers += tl.load(of_expert + both, mask=both < 2 * INNER, other=0.0).to(tl.float32)
        gates, ups = tl.split(tl.reshape(numbers, (BLOCK_C, 2)))
    else:
        at, kept = gate_up + slot * (2 * INNER) + column, column < INNER
        gates = tl.load(at, mask=kept, other=0.0).to(tl.float32)
        ups = tl.load(at + INNER, mask=kept, other=0.0).to(tl.float32)
        if BIAS:
            of_expert = bias + tl.load(chosen + slot).to(tl.int64) * (2 * INNER) + column
            gates += tl.load(of_expert, mask=kept, other=0.0).to(tl.float32)
            ups += tl.load(of_expert + INNER, mask=kept, other=0.0).to(tl.float32)
    result = opened(gates, ups, alpha, limit, offset, ACTIVATION)
    tl.store(out + slot * INNER + column, result.to(out.dtype.element_ty), mask=column < INNER)


@triton.jit
def add_up_sorted(
    products,  # [pairs, COLUMNS], of pairs in the order of experts
    bias,  # [experts, COLUMNS]; not read without BIAS
    chosen,  # [pairs] integers
    positions,  # [pairs] int32, as `open_sorted` writes them
    shares,  # [pairs]
    out,  # [pairs // PAIRS_PER_ROW, COLUMNS]
    COLUMNS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    kept = column < COLUMNS
    total = tl.zeros((BLOCK_C,), tl.float32)
    for index in tl.static_range(PAIRS_PER_ROW):
        pair = row * PAIRS_PER_ROW + index
        at = tl.load(positions + pair).to(tl.int64) * COLUMNS + column
        numbers = tl.load(products + at, mask=kept, other=0.0).to(tl.float32)
        if BIAS:
            of_expert = bias + tl.load(chosen + pair).to(tl.int64) * COLUMNS + column
            numbers += tl.load(of_expert, mask=kept, other=0.0).to(tl.float32)
        total += numbers * tl.load(shares + pair).to(tl.float32)
    tl.store(out + row * COLUMNS + column, total.to(out.dtype.element_ty), mask=kept)


@triton.jit
def ordered(bits):
    """Bits of fp32 elements as integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def largest(
    scores,  # [rows, COLUMNS], contiguous
    values,  # [rows, COUNT]: the largest of each row, in falling order
    columns,  # [rows, COUNT] int64: where they are; of equal ones the first comes first
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,  # at least COLUMNS
    PDL: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    follow_previous(PDL)
    # An element's bits, as an integer of the same order, before its column, counted from the last: no two are equal,
    # and NaN is larger than any other.
    score = tl.load(scores + row * COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    key = ordered(score.to(tl.int32, bitcast=True)).to(tl.int64) * (1 << 32) + (BLOCK - 1 - column)
    key = tl.where(column < COLUMNS, key, LEAST)
    for slot in tl.static_range(COUNT):
        most = tl.max(key, 0)
        value = ordered((most >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        tl.store(values + row * COUNT + slot, value.to(values.dtype.element_ty))
        tl.store(columns + row * COUNT + slot, BLOCK - 1 - (most & 0xFFFFFFFF))
        key = tl.where(key == most, LEAST, key)


@triton.jit
def in_kept_groups(score, expert, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TWO: tl.constexpr):
    """Scores ``[rows, experts]`` of the groups whose largest, or whose TWO largest, are most; of equal ones the first.

    Others are 0, or with TWO -inf.
    """
    group = (expert // (EXPERTS // GROUPS))[None, :]
    left = tl.where((expert < EXPERTS)[None, :], score, float("-inf"))
    if TWO:
        own = left
        for number in tl.static_range(GROUPS):
            inside = tl.where(group == number, own, float("-inf"))
            most = tl.max(inside, 1)[:, None]
            first = tl.min(tl.where(inside == most, expert[None, :], EXPERTS), 1)[:, None]
            second = tl.max(tl.where(expert[None, :] == first, float("-inf"), inside), 1)[:, None]
            left = tl.where(group == number, most + second, left)
    kept = expert[None, :] < 0
    for _ in tl.static_range(KEPT):
        most = tl.max(left, 1)[:, None]
        first = tl.min(tl.where(left == most, group, GROUPS), 1)[:, None]
        kept = kept | (group == first)
        left = tl.where(group == first, float("-inf"), left)
    return tl.where(kept, score, float("-inf") if TWO else 0.0)


@triton.jit
def slices(matrix, row, there, start, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, SLICE: tl.constexpr):
    """Of rows of a contiguous matrix, BLOCK_K elements from `start`: a tuple of slices ``[rows, SLICE]``."""
    found = ()
    for first in tl.static_range(0, BLOCK_K, SLICE):
        column = start + first + tl.arange(0, SLICE)
        kept = there[:, None] & (column < WIDTH)[None, :]
        found += (tl.load(matrix + row[:, None] * WIDTH + column[None, :], mask=kept, other=0.0),)
    return found


@triton.jit(do_not_specialize=["rows"])
def route(
    x,  # [rows, WIDTH], contiguous
    weight,  # [EXPERTS, WIDTH], contiguous, in the dtype of x or in fp32
    bias,  # [EXPERTS], in fp32 if CORRECTED; not read without BIAS
    scores,  # [rows, EXPERTS], in the dtype of x or in fp32
    shares,  # [rows, COUNT]
    chosen,  # [rows, COUNT] int64
    partials,  # [blocks, parts, BLOCK_M, BLOCK_E] fp32
    arrived,  # [blocks] int32: parts that have arrived, 0 before and after
    rows,
    scale,  # factor of the shares
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNT: tl.constexpr,
    BIAS: tl.constexpr,
    FIRST: tl.constexpr,  # the softmax is of all scores; else of the largest
    CORRECTED: tl.constexpr,  # scores are sigmoids, to which biases are added for the choice alone
    NORMED: tl.constexpr,  # shares are divided by their sum
    GROUPS: tl.constexpr,  # as of `config.Routing`
    KEPT: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a block
    BLOCK_E: tl.constexpr,  # at least EXPERTS
    BLOCK_K: tl.constexpr,  # elements of a part
    SLICE: tl.constexpr,  # elements whose products a matrix unit adds up: BLOCK_K, or fewer for scores in fp32
    BLOCK_T: tl.constexpr,  # at least COUNT
    PARTS: tl.constexpr,
    PDL: tl.constexpr,  # it starts while the previous kernel ends (programmatic dependent launch)
):
    part, block = tl.program_id(0), tl.program_id(1)
    of_block, expert = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    row, start = block * BLOCK_M + of_block, part * BLOCK_K
    there, kept = row < rows, expert < EXPERTS
    partials += block * PARTS * BLOCK_M * BLOCK_E
    arrived += block
    weights = slices(weight, expert, kept, start, WIDTH, BLOCK_K, SLICE)
    follow_previous(PDL)
    numbers = slices(x, row, there, start, WIDTH, BLOCK_K, SLICE)
    # Scores in fp32 are to be as near fp64 as PyTorch's products in fp32, but matrix units cut sums off: there they
    # add up few products, which are exact, and weights in fp32 are multiplied without them.
    if SLICE < BLOCK_K:
        total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
        for index in tl.static_range(BLOCK_K // SLICE):
            product = tl.dot(numbers[index], tl.trans(weights[index]))
            total = tl.fma(total, 1.0, product)  # Triton would make a sum the product's accumulator
    elif scores.dtype.element_ty == tl.float32:
        wide = tl.trans(numbers[0]).to(tl.float32)
        total = tl.trans(tl.dot(weights[0].to(tl.float32), wide, input_precision="ieee"))
    else:
        total = tl.trans(tl.dot(weights[0], tl.trans(numbers[0])))
    mine = of_block[:, None] * BLOCK_E + expert[None, :]
    tl.store(partials + part * BLOCK_M * BLOCK_E + mine, total)
    tl.debug_barrier()  # all threads have written, before one of them says so
    if tl.atomic_add(arrived, 1, sem="acq_rel") == PARTS - 1:
        tl.store(arrived, 0)
        total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
        for other in tl.static_range(PARTS):
            total += tl.load(partials + other * BLOCK_M * BLOCK_E + mine, cache_modifier=".cg")
        if BIAS and not CORRECTED:
            total += tl.load(bias + expert, mask=kept, other=0.0).to(tl.float32)[None, :]
        rounded = total.to(scores.dtype.element_ty)
        tl.store(scores + row[:, None] * EXPERTS + expert[None, :], rounded, mask=there[:, None] & kept[None, :])
        score = rounded.to(tl.float32)
        if CORRECTED:
            score = 1.0 / (1.0 + tl.exp(-score))
        elif FIRST:
            score = tl.where(kept[None, :], score, float("-inf"))
            score = tl.exp(score - tl.max(score, 1)[:, None])
            score = score / tl.sum(score, 1)[:, None]
        chooses = score
        if CORRECTED:
            chooses = score + tl.load(bias + expert, mask=kept, other=0.0)[None, :]
        if GROUPS > 1:
            chooses = in_kept_groups(chooses, expert, EXPERTS, GROUPS, KEPT, CORRECTED)
        # As in `largest`.
        key = ordered(chooses.to(tl.int32, bitcast=True)).to(tl.int64) * (1 << 32) + (BLOCK_E - 1 - expert)[None, :]
        key = tl.where(kept[None, :], key, LEAST)
        slot = tl.arange(0, BLOCK_T)
        values = tl.full((BLOCK_M, BLOCK_T), float("-inf"), tl.float32)
        columns = tl.zeros((BLOCK_M, BLOCK_T), tl.int64)
        for number in tl.static_range(COUNT):
            most = tl.max(key, 1)
            column = BLOCK_E - 1 - (most & 0xFFFFFFFF)
            if CORRECTED:
                value = tl.sum(tl.where(expert[None, :] == column[:, None], score, 0.0), 1)
            else:
                value = ordered((most >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
            values = tl.where((slot == number)[None, :], value[:, None], values)
            columns = tl.where((slot == number)[None, :], column[:, None], columns)
            key = tl.where(key == most[:, None], LEAST, key)
        if not FIRST:
            values = tl.exp(values - tl.max(values, 1)[:, None])
            values = values / tl.sum(values, 1)[:, None]
        if NORMED:
            values = values / (tl.sum(tl.where((slot < COUNT)[None, :], values, 0.0), 1)[:, None] + 1e-20)
        values = values * scale
        to = row[:, None] * COUNT + slot[None, :]
        written = there[:, None] & (slot < COUNT)[None, :]
        tl.store(shares + to, values.to(shares.dtype.element_ty), mask=written)
        tl.store(chosen + to, columns, mask=written)
