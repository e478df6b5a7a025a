# mypy: ignore-errors
"""Slim decode in two launches that read the keys once each: scores, and averages of the cached keys.

Averages ``P K`` have all columns of the cached keys for each head, ``heads * e`` sums, more than a multiprocessor
holds. So a *group* of programs shares the columns: a program owns some heads and their columns. It computes the scores
of its heads in one launch, and the averages of all heads over its columns in the other. As many bytes are read as with
keys and values. ``cuda/cluster.cu`` reads the keys once, on GPUs with thread block clusters.

Groups take equal shares of the tiles of all rows (LeanAttention, section 4), computed on the device from the lengths.
A *piece* is what a group has of one row; it writes an fp32 partial. A third launch merges the pieces of a row, in
order, so that results are bitwise reproducible.
"""

import triton
import triton.language as tl

from ..forest_decode.node_kernel import LN2, LOWEST

# The two launches of a step.
SCORES = tl.constexpr(0)
AVERAGES = tl.constexpr(1)


@triton.jit
def first_token(starts, row, valid, STARTS: tl.constexpr):
    return tl.load(starts + row, mask=valid, other=0) if STARTS else row * 0


@triton.jit
def row_tiles(starts, lengths, rows, BLOCK_T: tl.constexpr, BLOCK_ROWS: tl.constexpr, STARTS: tl.constexpr):
    """Tiles of each row, and the first tile of each among those of all rows."""
    row = tl.arange(0, BLOCK_ROWS)
    length = tl.load(lengths + row, mask=row < rows, other=0)
    tokens = tl.maximum(length - first_token(starts, row, row < rows, STARTS), 0)
    tiles = (tokens + BLOCK_T - 1) // BLOCK_T
    return tiles, tl.cumsum(tiles, 0) - tiles


@triton.jit
def share_start(group, total, groups, WIDE: tl.constexpr = True):
    """First tile of a group among those of all rows; without `WIDE` no product of both may exceed 31 bits."""
    if WIDE:
        group = group.to(tl.int64)
    return (group * total // groups).to(tl.int32)


@triton.jit
def pair_columns(pair, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, ALIGNED: tl.constexpr):
    """Columns of a head that RoPE mixes ("rotate half"), and pairs of those that it leaves."""
    low = pair
    high = pair + HEAD_DIM // 2
    if ROTARY != 0 and ROTARY != HEAD_DIM:
        unrotated = pair >= ROTARY // 2
        low = pair + tl.where(unrotated, ROTARY // 2, 0)
        high = pair + tl.where(unrotated, HEAD_DIM // 2, ROTARY // 2)
        if ALIGNED:  # both parts begin at multiples of 8
            low = tl.max_contiguous(tl.multiple_of(low, 8), 8)
            high = tl.max_contiguous(tl.multiple_of(high, 8), 8)
    return low, high


@triton.jit
def rotated_scores(low, high, cosines, sines, queries, ROTARY: tl.constexpr):
    """Products ``[T, heads]`` of rotated keys and queries.

    ``q R k`` of a pair is ``cos (q1 k1 + q2 k2) + sin (q2 k1 - q1 k2)``; `along` and `across` are what the key offset
    adds to the brackets.
    """
    query_low, query_high, along, across = queries
    low, high = low.to(tl.float32), high.to(tl.float32)
    products = along + query_low * low + query_high * high
    if ROTARY:
        products = cosines * products + sines * (across + query_high * low - query_low * high)
    return tl.sum(products, 2)


@triton.jit
def store_averages(out, acc, row_sum, column, mask, heads, head_stride):
    """Store normalised averages, ``[H, columns]``."""
    averages = acc * (1.0 / row_sum)[:, None]
    tl.store(out + heads.to(tl.int64)[:, None] * head_stride + column[None, :], averages, mask=mask)


@triton.jit
def slim_partials(
    query,  # [rows, heads, head_dim]
    keys,  # [rows, slots, e]; of 8 bits as int8
    coordinates,  # [rows, slots, r]
    key_scales,  # [rows, slots, 2 * heads] uint8 with the strides of the keys, with SCALED
    coordinate_scales,  # [rows, slots, 2 * groups of r] uint8 with the strides of the V-coordinates, with SCALED
    key_offset,  # [e] fp32, with OFFSET
    cos,  # [rows or 1, slots, rotary / 2] fp32, with ROTARY; likewise sin
    sin,
    starts,  # [rows] int32, with STARTS: the first valid slot
    lengths,  # [rows] int32: filled slots
    scores,  # [tiles, BLOCK_H, BLOCK_T] fp32
    part_out,  # [groups + rows - 1, heads, e + r] fp32
    part_lse,  # [groups + rows - 1, heads] fp32, base 2
    rows,
    groups,
    scale_log2,
    query_row_stride,
    query_head_stride,
    key_row_stride,  # in units of KEY_UNIT
    key_stride,
    coordinate_row_stride,  # in units of COORDINATE_UNIT
    coordinate_stride,
    table_row_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    RANK: tl.constexpr,
    OFFSET: tl.constexpr,
    STARTS: tl.constexpr,
    MEMBERS: tl.constexpr,  # programs per group
    OWN: tl.constexpr,  # heads per program, a power of 2
    HALF: tl.constexpr,  # half of head_dim, padded to a power of 2
    BLOCK_H: tl.constexpr,  # heads, padded
    BLOCK_R: tl.constexpr,  # V-coordinates per program
    BLOCK_T: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    SHIFT: tl.constexpr,  # weights are scaled by 2 ** SHIFT, away from fp16's subnormals
    PHASE: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,  # 8 bits with scales
    FP8: tl.constexpr,  # of float8_e4m3fn
    KEY_UNIT: tl.constexpr,  # divides the strides of the keys, so that the compiler knows the alignment of loads
    COORDINATE_UNIT: tl.constexpr,
    SHARED_SCALE: tl.constexpr,  # coordinates of a program in blocks with one scale
):
    member = tl.program_id(0) % MEMBERS
    group = tl.program_id(0) // MEMBERS
    WIDTH: tl.constexpr = HEADS * HEAD_DIM + RANK
    COLUMNS: tl.constexpr = OWN * HALF
    EXACT: tl.constexpr = MEMBERS * OWN == HEADS and HALF * 2 == HEAD_DIM
    ALIGNED: tl.constexpr = ROTARY % 16 == 0 and HEAD_DIM % 16 == 0

    tiles, tile_starts = row_tiles(starts, lengths, rows, BLOCK_T, BLOCK_ROWS, STARTS)
    total = tl.sum(tiles, 0)
    share = share_start(group, total, groups)
    share_end = share_start(group + 1, total, groups)
    all_rows = tl.arange(0, BLOCK_ROWS)
    first_row = tl.sum(((tile_starts + tiles <= share) & (all_rows < rows)).to(tl.int32), 0)
    end_row = tl.sum(((tile_starts < share_end) & (all_rows < rows)).to(tl.int32), 0)

    own_head = member * OWN + tl.arange(0, OWN)
    pair = tl.arange(0, HALF)
    low, high = pair_columns(pair, HEAD_DIM, ROTARY, ALIGNED)
    low_column = (own_head * HEAD_DIM)[:, None] + low[None, :]  # [OWN, HALF]
    high_column = (own_head * HEAD_DIM)[:, None] + high[None, :]
    in_column = (own_head < HEADS)[:, None] & (pair < HEAD_DIM // 2)[None, :]
    rotary_pair = pair < ROTARY // 2
    all_heads = tl.arange(0, BLOCK_H)
    token_in_tile = tl.arange(0, BLOCK_T)
    of_all_heads = all_heads[:, None] * BLOCK_T + token_in_tile[None, :]
    of_own_heads = own_head[None, :] * BLOCK_T + token_in_tile[:, None]
    if RANK:
        coordinate = member * BLOCK_R + tl.arange(0, BLOCK_R)
        BLOCKS: tl.constexpr = BLOCK_R // SHARED_SCALE
        in_block = member * BLOCK_R + tl.arange(0, BLOCKS) * SHARED_SCALE  # first coordinate of each block

    for row in range(first_row, end_row):
        row_start = tl.sum(tl.where(all_rows == row, tile_starts, 0), 0)
        row_count = tl.sum(tl.where(all_rows == row, tiles, 0), 0)
        begin = tl.maximum(share - row_start, 0)
        end = tl.minimum(share_end - row_start, row_count)
        if begin < end:
            row64 = tl.cast(row, tl.int64)
            first = first_token(starts, row, True, STARTS)
            length = tl.load(lengths + row)
            row_at = row64 * key_row_stride * KEY_UNIT
            row_keys = keys + row_at
            row_coordinates_at = row64 * coordinate_row_stride * COORDINATE_UNIT
            limit = tl.minimum(length, first + end * BLOCK_T)
            if SCALED:
                token = first + begin * BLOCK_T + token_in_tile
                row_scales = key_scales + row_at
                stride = key_stride * KEY_UNIT
                scale_low, scale_high = load_scale_bytes(row_scales, token, limit, stride, own_head, own_head < HEADS)
                if RANK and PHASE == AVERAGES:
                    row_scales_r = coordinate_scales + row_coordinates_at
                    stride_r = coordinate_stride * COORDINATE_UNIT
                    scale_low_r, scale_high_r = load_scale_bytes(
                        row_scales_r, token, limit, stride_r, in_block // HEAD_DIM, in_block < RANK
                    )
            if PHASE == SCORES:
                row_query = query + row64 * query_row_stride + (own_head * query_head_stride)[:, None]
                query_low = tl.load(row_query + low[None, :], mask=in_column, other=0.0).to(tl.float32) * scale_log2
                query_high = tl.load(row_query + high[None, :], mask=in_column, other=0.0).to(tl.float32) * scale_log2
                along = tl.zeros([OWN, HALF], tl.float32)
                across = tl.zeros([OWN, HALF], tl.float32)
                if OFFSET:
                    offset_low = tl.load(key_offset + low_column, mask=in_column, other=0.0)
                    offset_high = tl.load(key_offset + high_column, mask=in_column, other=0.0)
                    along = query_low * offset_low + query_high * offset_high
                    across = query_high * offset_low - query_low * offset_high
            if PHASE == AVERAGES:
                row_max = tl.full([BLOCK_H], LOWEST, tl.float32)
                row_sum = tl.zeros([BLOCK_H], tl.float32)
                acc_low = tl.zeros([BLOCK_H, COLUMNS], tl.float32)
                acc_high = tl.zeros([BLOCK_H, COLUMNS], tl.float32)
                if RANK:
                    acc_r = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
            for tile in tl.range(begin, end, num_stages=STAGES):
                token = first + tile * BLOCK_T + token_in_tile
                here = token < limit
                valid_keys = here[:, None, None] if EXACT else here[:, None, None] & in_column[None, :, :]
                at = token.to(tl.int64)[:, None, None] * (key_stride * KEY_UNIT)
                tile_low = tl.load(row_keys + at + low_column[None, :, :], mask=valid_keys, other=0.0)
                tile_high = tl.load(row_keys + at + high_column[None, :, :], mask=valid_keys, other=0.0)
                if SCALED:
                    scales = joined_bytes(scale_low, scale_high)  # [T, OWN]
                    scale_low, scale_high = load_scale_bytes(
                        row_scales, token + BLOCK_T, limit, stride, own_head, own_head < HEADS
                    )
                    if PHASE == AVERAGES:
                        unit, inverse = tile_unit(scales)
                        scales *= inverse
                    tile_low = plain_numbers(tile_low, FP8) * scales[:, :, None]
                    tile_high = plain_numbers(tile_high, FP8) * scales[:, :, None]
                if PHASE == SCORES:
                    if ROTARY:
                        table_at = (
                            row64 * table_row_stride + token.to(tl.int64)[:, None] * (ROTARY // 2) + pair[None, :]
                        )
                        in_table = here[:, None] if ROTARY == 2 * HALF else here[:, None] & rotary_pair[None, :]
                        cosines = tl.load(cos + table_at, mask=in_table, other=1.0)[:, None, :]
                        sines = tl.load(sin + table_at, mask=in_table, other=0.0)[:, None, :]
                    else:
                        cosines, sines = 1.0, 0.0
                    queries = (query_low[None, :, :], query_high[None, :, :], along[None, :, :], across[None, :, :])
                    products = rotated_scores(tile_low, tile_high, cosines, sines, queries, ROTARY)
                    products = tl.where(here[:, None], products, -float("inf"))
                    offset = (row_start + tile).to(tl.int64) * (BLOCK_H * BLOCK_T)
                    sent = (own_head < HEADS)[None, :] & (token_in_tile >= 0)[:, None]
                    tl.store(scores + offset + of_own_heads, products, mask=sent)
                else:
                    offset = (row_start + tile).to(tl.int64) * (BLOCK_H * BLOCK_T)
                    valid = (all_heads < HEADS)[:, None] & (token_in_tile >= 0)[None, :]
                    found = tl.load(scores + offset + of_all_heads, mask=valid, other=-float("inf"))
                    new_row_max = tl.maximum(row_max, tl.max(found, 1))
                    weights = tl.exp2(found - (new_row_max - SHIFT)[:, None])
                    rescale = tl.exp2(row_max - new_row_max)
                    row_sum = row_sum * rescale + tl.sum(weights, 1)
                    row_max = new_row_max
                    columns_low = tl.reshape(tile_low, [BLOCK_T, COLUMNS])
                    columns_high = tl.reshape(tile_high, [BLOCK_T, COLUMNS])
                    if SCALED:
                        acc_low = add_scaled_tile(acc_low, rescale, weights, columns_low, unit, PARTS)
                        acc_high = add_scaled_tile(acc_high, rescale, weights, columns_high, unit, PARTS)
                    else:
                        acc_low = add_tile(acc_low, rescale, weights, columns_low, PARTS, WIDE)
                        acc_high = add_tile(acc_high, rescale, weights, columns_high, PARTS, WIDE)
                    if RANK:
                        at = row_coordinates_at + token.to(tl.int64)[:, None] * (coordinate_stride * COORDINATE_UNIT)
                        valid_keys = here[:, None] & (coordinate < RANK)[None, :]
                        tile_r = tl.load(coordinates + at + coordinate[None, :], mask=valid_keys, other=0.0)
                        if SCALED:
                            scales = joined_bytes(scale_low_r, scale_high_r)  # [T, BLOCKS]
                            scale_low_r, scale_high_r = load_scale_bytes(
                                row_scales_r, token + BLOCK_T, limit, stride_r, in_block // HEAD_DIM, in_block < RANK
                            )
                            unit, inverse = tile_unit(scales)
                            tile_r = plain_numbers(tile_r, FP8)
                            tile_r = scale_blocks(tile_r, scales * inverse, BLOCK_T, BLOCKS, SHARED_SCALE)
                            acc_r = add_scaled_tile(acc_r, rescale, weights, tile_r, unit, PARTS)
                        else:
                            acc_r = add_tile(acc_r, rescale, weights, tile_r, PARTS, WIDE)

            if PHASE == AVERAGES:
                piece = tl.cast(group + row, tl.int64)
                out = part_out + piece * (HEADS * WIDTH)
                in_heads = (all_heads < HEADS)[:, None]
                row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # of heads that are padding
                own = tl.arange(0, COLUMNS)
                head, pair_of_column = member * OWN + own // HALF, own % HALF
                low_own, high_own = pair_columns(pair_of_column, HEAD_DIM, ROTARY, False)
                kept = in_heads & ((head < HEADS) & (pair_of_column < HEAD_DIM // 2))[None, :]
                store_averages(out, acc_low, row_sum, head * HEAD_DIM + low_own, kept, all_heads, WIDTH)
                store_averages(out, acc_high, row_sum, head * HEAD_DIM + high_own, kept, all_heads, WIDTH)
                if RANK:
                    kept = in_heads & (coordinate < RANK)[None, :]
                    column = HEADS * HEAD_DIM + coordinate
                    store_averages(out, acc_r, row_sum, column, kept, all_heads, WIDTH)
                if member == 0:
                    lse = row_max + tl.log2(row_sum) - SHIFT
                    tl.store(part_lse + piece * HEADS + all_heads, lse, mask=all_heads < HEADS)


@triton.jit
def load_scale_bytes(scales, token, limit, stride, group, valid):
    """Load scales ``[T, groups]`` of tokens below a limit in two bytes, since they may begin at odd addresses.

    Triton prefetches no loads this small, so kernels load them a tile ahead.
    """
    at = scales + token.to(tl.int64)[:, None] * stride + 2 * group[None, :]
    mask = (token < limit)[:, None] & valid[None, :]
    return tl.load(at, mask=mask, other=0), tl.load(at + 1, mask=mask, other=0)


@triton.jit
def joined_bytes(low, high):
    """Scales in fp32 from the bytes of bf16."""
    return ((low.to(tl.int32) << 16) | (high.to(tl.int32) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def plain_numbers(values, FP8: tl.constexpr):
    """Convert loaded int8, or bytes of float8_e4m3fn, to fp32 before their scales."""
    if FP8:
        values = values.to(tl.float8e4nv, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def tile_unit(scales):
    """Power of 2 near the largest scale ``[T, groups]`` of a tile, and its inverse.

    Elements over the unit are below 1,024 and fit in fp16, which has less range than the scales.
    """
    exponent = tl.max(tl.max(scales, 1), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)  # whose inverse is a normal number too
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_blocks(values, scales, T: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply elements ``[T, BLOCKS * COLUMNS]`` by the scales ``[T, BLOCKS]`` of each block of columns."""
    values = tl.reshape(values, [T, BLOCKS, COLUMNS]) * scales[:, :, None]
    return tl.reshape(values, [T, BLOCKS * COLUMNS])


@triton.jit
def add_tile(acc, rescale, weights, tile, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """``acc * rescale + weights @ tile``; weights ``[H, T]`` fp32 are multiplied in PARTS parts of the tile's dtype.

    The product of a tile is added outside the matrix unit, whose accumulators truncate: errors of a column are
    magnified by the matrix from keys to values, unlike errors of a weight, which all columns share.
    """
    element = tile.dtype
    wide: tl.constexpr = tl.float32 if WIDE else element
    coarse = weights.to(element)
    part = tl.zeros(acc.shape, tl.float32)
    if PARTS == 2:
        fine = (weights - coarse.to(tl.float32)).to(element)
        part = tl.dot(fine.to(wide), tile.to(wide), part, input_precision="ieee")
    part = tl.dot(coarse.to(wide), tile.to(wide), part, input_precision="ieee")
    return tl.fma(acc, tl.broadcast_to(rescale[:, None], acc.shape), part)


@triton.jit
def add_scaled_tile(acc, rescale, weights, tile, unit, PARTS: tl.constexpr):
    """``acc * rescale + weights @ tile * unit`` for a tile in fp32 that was dequantised, over its unit.

    An element of 8 bits times its scale has up to 15 bits, and fp16 has 11. Two PARTS of fp16 hold both operands; the
    product of the fine parts is below the precision of fp32. One part rounds both to fp16.
    """
    coarse = tile.to(tl.float16)
    coarse_weights = weights.to(tl.float16)
    part = tl.zeros(acc.shape, tl.float32)
    if PARTS == 2:
        fine = (tile - coarse.to(tl.float32)).to(tl.float16)
        fine_weights = (weights - coarse_weights.to(tl.float32)).to(tl.float16)
        part = tl.dot(fine_weights, coarse, part, input_precision="ieee")
        part = tl.dot(coarse_weights, fine, part, input_precision="ieee")
    part = tl.dot(coarse_weights, coarse, part, input_precision="ieee")
    return tl.fma(acc, tl.broadcast_to(rescale[:, None], acc.shape), part * unit)


@triton.jit
def merge_pieces(
    part_out,  # arguments as in the kernels that wrote them, with the same tiles and groups
    part_lse,
    starts,
    lengths,
    out_keys,  # [rows, heads, e] fp32
    out_coordinates,  # [rows, heads, r] fp32
    out_lse,  # [rows, heads] fp32, natural logarithm
    rows,
    groups,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,  # e
    RANK: tl.constexpr,
    STARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns per program
    MERGE: tl.constexpr,  # pieces loaded at once
    WIDE: tl.constexpr,  # tiles times groups may exceed 31 bits; divisions of 64 bits take most of the time
):
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    block = tl.program_id(1)
    tiles, tile_starts = row_tiles(starts, lengths, rows, BLOCK_T, BLOCK_ROWS, STARTS)
    total = tl.sum(tiles, 0)
    all_rows = tl.arange(0, BLOCK_ROWS)
    begin = tl.sum(tl.where(all_rows == row, tile_starts, 0), 0)
    if WIDE:
        begin = begin.to(tl.int64)
    end = begin + tl.sum(tl.where(all_rows == row, tiles, 0), 0)
    # The last group that starts at or before a tile has it.
    some = tl.maximum(total, 1)
    first = ((begin + 1) * groups - 1) // some
    count = tl.where(end > begin, (end * groups - 1) // some - first + 1, 0).to(tl.int32)
    first = first.to(tl.int32)

    KEY_BLOCKS: tl.constexpr = (KEYS + BLOCK - 1) // BLOCK
    of_keys = block < KEY_BLOCKS
    column = tl.where(of_keys, block, block - KEY_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    kept = column < tl.where(of_keys, KEYS, RANK)
    row_max = tl.full([1], LOWEST, tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, MERGE):
        for index in tl.static_range(MERGE):  # independent loads
            group = first + start + index
            # A group without a tile, of more groups than tiles, has written no piece.
            stop = share_start(group + 1, total, groups, WIDE)
            has = (start + index < count) & (share_start(group, total, groups, WIDE) < stop)
            piece = tl.cast(group + row, tl.int64) * HEADS + head
            lse = tl.load(part_lse + piece + tl.arange(0, 1), mask=has, other=-float("inf"))
            at = piece * (KEYS + RANK) + tl.where(of_keys, 0, KEYS) + column
            part = tl.load(part_out + at, mask=kept & has, other=0.0)
            new_row_max = tl.maximum(row_max, lse)
            rescale = tl.exp2(row_max - new_row_max)
            weight = tl.exp2(lse - new_row_max)
            acc = acc * rescale + part * weight
            row_sum = row_sum * rescale + weight
            row_max = new_row_max
    result = acc * (1.0 / tl.where(row_sum > 0, row_sum, 1.0))
    at = (row * HEADS + head).to(tl.int64)
    if of_keys:
        tl.store(out_keys + at * KEYS + column, result, mask=kept)
    else:
        tl.store(out_coordinates + at * RANK + column, result, mask=kept)
    if block == 0:
        lse = tl.where(row_sum > 0, (row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0))) * LN2, -float("inf"))
        tl.store(out_lse + at + tl.arange(0, 1), lse)
