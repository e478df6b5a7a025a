# mypy: ignore-errors
"""Sampling kernel: one program per row, one pass over its logits, further passes only where a draw may be rejected.

A row is read as a table of chunks times columns: token ``chunk * columns + column``. A pass leaves the mass of every
column in registers, so that a draw needs no further pass: first a column by its mass, then one of its few tokens,
which are read again.

Top-p and typical-p draw by rejection, like FlashInfer's sampling kernels: a token is drawn from all that are left,
and a pass sums the mass ranked before it, which decides whether the filter keeps it. If not, the filter keeps nothing
ranked after it either, and the next draw is from the column masses of that pass. A filter that keeps the mass p takes
1 + ln(1/p) such passes on average, 1.05 for p = 0.95, and none where the first pass proves that the token is kept.

Top-k compares column maxima: the best k columns hold the best k tokens. These columns, the *tile*, fit in registers,
where all filters after top-k run.

Tokens rank by value, then by index, as in a stable sort.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _uniforms(seed, step, row_id, turn):
    """Two uniform numbers in [0, 1) of 53 bits, by Philox from the arguments alone."""
    low = (step & 0xFFFFFFFF).to(tl.uint32)
    high = ((step >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(seed, row_id.to(tl.uint32), turn.to(tl.uint32), low, high)
    first = a.to(tl.float64) * 2.3283064365386963e-10 + (b >> 11).to(tl.float64) * 1.1102230246251565e-16
    second = c.to(tl.float64) * 2.3283064365386963e-10 + (d >> 11).to(tl.float64) * 1.1102230246251565e-16
    return first, second


@triton.jit
def _sample_index(mass, uniform, SIZE: tl.constexpr):
    """Inverse CDF: the first index where cumulative mass exceeds ``uniform`` times the total; never one of mass 0."""
    reach = tl.cumsum(mass.to(tl.float64), 0)
    positions = tl.arange(0, SIZE)
    target = tl.max(reach, 0) * uniform
    # If rounding leaves no index beyond the target, take the last one with mass.
    preference = tl.where(reach > target, positions, 2 * SIZE - positions)
    found = tl.min(tl.where(mass > 0, preference, 2 * SIZE), 0)
    return tl.where(found < SIZE, found, 2 * SIZE - found) % SIZE


@triton.jit
def _draw(source, scale, mass, tile_columns, bounds, uniforms, TILED: tl.constexpr, FORM: tl.constexpr):
    """Draw one of the tokens left, given their column masses; returns the token, its value and its raw logit."""
    VOCAB: tl.constexpr = FORM.vocab
    COLUMNS: tl.constexpr = FORM.columns
    CHUNKS: tl.constexpr = FORM.chunks
    WIDTH: tl.constexpr = FORM.tile
    if TILED:
        column = tl.load(tile_columns + _sample_index(mass, uniforms[0], WIDTH))
    else:
        column = _sample_index(mass, uniforms[0], COLUMNS)
    chunk = tl.arange(0, CHUNKS)
    token = chunk * COLUMNS + column
    raw, value = read(source, token, token < VOCAB, FORM)
    order, weight = order_and_mass(value, scale, FORM)
    left = is_left(order, weight, token, bounds, FORM) & (token < VOCAB)
    # Relative to the column's max, because all masses may underflow relative to the row's.
    high = tl.max(tl.where(left, value, LOW), 0)
    drawn = _sample_index(tl.where(left, tl.exp2((value - high) * scale[1]), 0.0), uniforms[1], CHUNKS)
    value_drawn = tl.max(tl.where(chunk == drawn, value, -float("inf")), 0)
    raw_drawn = tl.max(tl.where(chunk == drawn, raw, -float("inf")), 0)
    return drawn * COLUMNS + column, value_drawn, raw_drawn


@triton.jit
def _key(x, FORM: tl.constexpr):
    """Integer key in the order of floats, without the trailing zero bits of 16-bit logits; -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> FORM.empty_bits


@triton.jit
def _from_key(key, FORM: tl.constexpr):
    """The smallest float of a key."""
    bits = key << FORM.empty_bits
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Mean, rounded down, without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _threshold(source, scale, tile, bounds, low, goal, SUMMAND: tl.constexpr, TILED: tl.constexpr, FORM: tl.constexpr):
    """Bisection for the largest float such that the tokens left at or above it reach ``goal`` in mass or number.

    The search starts at the key ``low``. A count that is hit exactly ends it at a float that separates as well.
    """
    _, _, least, peak, centre, spread = bounds
    high = _key(peak, FORM) + 1
    reached = goal - 1.0
    middle = _middle(low, high)
    while (middle > low) & ((SUMMAND != COUNT) | (reached != goal)):
        trial = (_from_key(middle, FORM), -1, least, peak, centre, spread)
        reached = row_total(source, scale, tile, trial, SUMMAND, TILED, FORM)
        low = tl.where(reached >= goal, middle, low)
        high = tl.where(reached >= goal, high, middle)
        middle = _middle(low, high)
    return _from_key(low, FORM)


@triton.jit
def _top_p_pivot(source, scale, tile, bounds, goal, TILED: tl.constexpr, FORM: tl.constexpr):
    """The pivot of top-p: the tokens before it are the fewest that reach the mass ``goal``."""
    VOCAB: tl.constexpr = FORM.vocab
    _, _, least, peak, centre, spread = bounds
    lowest = _key(tl.maximum(bounds[0], LOWEST), FORM)
    pivot = tl.maximum(_threshold(source, scale, tile, bounds, lowest, goal, MASS, TILED, FORM), bounds[0])
    above = (pivot, VOCAB, least, peak, centre, spread)
    with_ties = (pivot, tl.where(pivot > bounds[0], -1, bounds[1]), least, peak, centre, spread)
    count_above = row_total(source, scale, tile, above, COUNT, TILED, FORM)
    mass_above = row_total(source, scale, tile, above, MASS, TILED, FORM)
    ties = row_total(source, scale, tile, with_ties, COUNT, TILED, FORM) - count_above
    tie_mass = row_total(source, scale, tile, with_ties, MASS, TILED, FORM) - mass_above
    keep = tl.clamp(tl.ceil((goal - mass_above) / (tie_mass / ties)), 1.0, ties)
    low = with_ties[1] + 0
    high = VOCAB + 0 * low
    # Of ties, the last by index are kept: find the index that `keep` of them exceed.
    while (high - low > 1) & (keep < ties):
        middle = low + (high - low) // 2
        trial = (pivot, middle, least, peak, centre, spread)
        beyond = row_total(source, scale, tile, trial, COUNT, TILED, FORM) - count_above
        low = tl.where(beyond > keep, middle, low)
        high = tl.where(beyond > keep, high, middle)
    return pivot, tl.where(keep < ties, high, low)


@triton.jit
def _draw_until_kept(
    source, scale, tile, tile_columns, mass, column_max, bounds, shares, key, TILED: tl.constexpr, FORM: tl.constexpr
):
    """Draw until the filters keep the token; returns the token and its raw logit.

    ``mass`` is per column; no token of a column has a value above its ``column_max``.
    """
    top_p, min_p, typical_p = shares
    seed, step, row_id = key
    pivot, pivot_token, least, peak, centre, spread = bounds
    if FORM.typical:
        if top_p < 1.0:
            whole_mass = row_total(source, scale, tile, bounds, MASS, TILED, FORM)
            pivot, pivot_token = _top_p_pivot(source, scale, tile, bounds, top_p * whole_mass, TILED, FORM)
        least = tl.maximum(least, min_p)
        bounds = (pivot, pivot_token, least, peak, centre, spread)
        mass = column_totals(source, scale, tile, bounds, MASS, TILED, FORM)
        moment = row_total(source, scale, tile, bounds, MOMENT, TILED, FORM)
        centre = moment / tl.sum(mass, 0)  # the entropy, less the surprise of the most likely token
        bounds = (pivot, pivot_token, least, peak, centre, spread)
        goal = typical_p * tl.sum(mass, 0)
        selective = typical_p < 1.0
    else:
        goal = top_p * tl.sum(mass, 0)
        selective = top_p < 1.0
    uniforms = _uniforms(seed, step, row_id, tl.full([], 0, tl.int32))
    token, value, raw = _draw(source, scale, mass, tile_columns, bounds, uniforms, TILED, FORM)
    order, weight = order_and_mass(value, scale, FORM)
    below_min_p = weight < min_p
    undecided = below_min_p | selective
    if not TILED and not FORM.typical:
        # Columns whose max ranks after the token hold nothing ranked before it.
        before = tl.sum(tl.where(column_max >= value, mass, 0.0), 0) - weight
        undecided = below_min_p | (selective & (before > goal * 0.99999))
    turn = tl.full([], 1, tl.int32)
    while undecided:
        if FORM.typical:
            spread = tl.abs((peak - order) - centre)
        else:
            least = tl.where(below_min_p, min_p, least)
            pivot = tl.where(below_min_p, pivot, order)
            pivot_token = tl.where(below_min_p, pivot_token, token)
        bounds = (pivot, pivot_token, least, peak, centre, spread)
        mass = column_totals(source, scale, tile, bounds, MASS, TILED, FORM)
        before = tl.sum(mass, 0)
        # NaN and an empty set end the loop; the bound on turns keeps rounding from hanging the device. A filter that
        # keeps a mass of 1e-30 takes 70 turns on average.
        undecided = (below_min_p | (before >= goal)) & (before > 0) & (turn < 1000)
        if undecided:
            uniforms = _uniforms(seed, step, row_id, turn)
            token, value, raw = _draw(source, scale, mass, tile_columns, bounds, uniforms, TILED, FORM)
            order, weight = order_and_mass(value, scale, FORM)
            below_min_p = weight < min_p
            undecided = below_min_p | selective
            turn += 1
    return token, raw


@triton.jit
def _best_columns(column_max, top_k, tile_columns, FORM: tl.constexpr):
    """Select the best columns, at least ``top_k`` of them unless there are fewer; returns their number.

    They are written to ``tile_columns``, in ascending order, if the tile holds them. Also returns a lower bound on the
    key of the ``top_k``-th value.
    """
    COLUMNS: tl.constexpr = FORM.columns
    WIDTH: tl.constexpr = FORM.tile
    keys = _key(column_max, FORM)
    low = tl.min(keys, 0)
    high = tl.max(keys, 0) + 1
    count = tl.full([], COLUMNS, tl.int32)
    middle = _middle(low, high)
    while (count > WIDTH) & (middle > low) & (top_k <= WIDTH):
        reached = tl.sum((keys >= middle).to(tl.int32), 0)
        count = tl.where(reached >= top_k, reached, count)
        low = tl.where(reached >= top_k, middle, low)
        high = tl.where(reached >= top_k, high, middle)
        middle = _middle(low, high)
    if count <= WIDTH:
        chosen = (keys >= low).to(tl.int32)
        tl.store(tile_columns + tl.cumsum(chosen, 0) - 1, tl.arange(0, COLUMNS), mask=chosen > 0)
        tl.debug_barrier()
    return count, low


@triton.jit(do_not_specialize=["seen_rows", "step_stride"])
def sample_rows(
    logits,  # [rows, vocab]
    row_ids,  # [rows] int32: -1 to skip the row
    numbers,  # [5] fp32: temperature, top_p, min_p, typical_p, repetition penalty
    integers,  # [6] int64: top_k, seed, step, min_new_tokens, pad token, begin step
    steps,  # int64: tokens drawn so far, of every row (step_stride 0) or of each (1)
    eos_ids,  # [eos] int64
    suppressed,  # [2, vocab] int8: not 0 for tokens never drawn, and for those not drawn at the begin step
    seen,  # [row ids, words] int32: bit t % 32 of word t // 32 is set when the row has token t
    scratch,  # [rows, tile] int32
    tokens,  # [rows] int64
    logprobs,  # [rows] fp32
    row_stride,
    seen_stride,
    seen_rows,
    step_stride,
    FORM: tl.constexpr,
):
    VOCAB: tl.constexpr = FORM.vocab
    COLUMNS: tl.constexpr = FORM.columns
    CHUNKS: tl.constexpr = FORM.chunks
    WIDTH: tl.constexpr = FORM.tile
    row = tl.program_id(0)
    row_id = tl.load(row_ids + row)
    skipped = row_id < 0
    if FORM.penalty:
        skipped |= row_id >= seen_rows  # out of bounds of `seen`
    if skipped:
        tl.store(tokens + row, tl.load(integers + 4))
        tl.store(logprobs + row, 0.0)
    else:
        temperature = tl.load(numbers)
        top_p = tl.load(numbers + 1)
        min_p = tl.load(numbers + 2)
        typical_p = tl.load(numbers + 3)
        penalty = tl.load(numbers + 4)
        top_k = tl.load(integers)
        seed = tl.load(integers + 1)
        step = tl.load(steps + row * step_stride)
        early = step < tl.load(integers + 3)
        barred = suppressed
        if FORM.suppression:
            barred += tl.where(step == tl.load(integers + 5), VOCAB, 0)
        inverse_temperature = 1.0 / temperature
        factor = inverse_temperature * LOG2E
        marks = seen + row_id.to(tl.int64) * seen_stride
        source = (logits + row.to(tl.int64) * row_stride, marks, eos_ids, early, barred, penalty, 1.0 / penalty)

        column_max, mass, raw_column_max, raw_mass, best_chunk = scan(source, factor, FORM)
        row_max = tl.max(column_max, 0)
        raw_row_max = tl.max(raw_column_max, 0)
        normaliser = raw_row_max + tl.log2(tl.sum(raw_mass * tl.exp2((raw_column_max - raw_row_max) * LOG2E), 0)) * LN2

        if FORM.greedy:
            choice = tl.where(column_max == row_max, best_chunk * COLUMNS + tl.arange(0, COLUMNS), 2147483647)
            token = tl.min(choice, 0)
            raw = tl.load(logits + row.to(tl.int64) * row_stride + token).to(tl.float32)
        else:
            scale = (row_max, factor, inverse_temperature)
            mass *= tl.exp2((column_max - row_max) * factor)
            peak = order_and_mass(row_max, scale, FORM)[0]
            infinity = tl.full([], float("inf"), tl.float32)
            zero = tl.full([], 0.0, tl.float32)
            bounds = (-infinity, VOCAB, zero, peak, zero, infinity)
            shares = (top_p, min_p, typical_p)
            key = (seed, step, row_id)
            tile_columns = scratch + row.to(tl.int64) * WIDTH
            count = tl.full([], COLUMNS, tl.int32)
            floor = _key(tl.full([], LOWEST, tl.float32), FORM)
            low = floor
            if FORM.top_k and top_k > 0:
                column_order = order_and_mass(column_max, scale, FORM)[0]
                count, low = _best_columns(column_order, top_k, tile_columns, FORM)
            if FORM.top_k and (top_k > 0) & (count <= WIDTH):
                place = tl.arange(0, WIDTH)
                columns = tl.load(tile_columns + place, mask=place < count, other=0)
                tile_token = tl.arange(0, CHUNKS)[:, None] * COLUMNS + columns[None, :]
                valid = (tile_token < VOCAB) & (place < count)[None, :]
                tile_value = read(source, tile_token, valid, FORM)[1]
                tile_order, tile_weight = order_and_mass(tile_value, scale, FORM)
                tile = (tl.where(valid, tile_order, -infinity), tl.where(valid, tile_weight, 0.0), tile_token)
                at = _threshold(source, scale, tile, bounds, low, top_k.to(tl.float32), COUNT, True, FORM)
                tile_bounds = (at, -1, zero, peak, zero, infinity)
                tile_mass = column_totals(source, scale, tile, tile_bounds, MASS, True, FORM)
                token, raw = _draw_until_kept(
                    source, scale, tile, tile_columns, tile_mass, column_max, tile_bounds, shares, key, True, FORM
                )
            else:
                if FORM.top_k and top_k > 0:
                    pivot = _threshold(source, scale, None, bounds, floor, top_k.to(tl.float32), COUNT, False, FORM)
                    bounds = (pivot, -1, zero, peak, zero, infinity)
                    mass = column_totals(source, scale, None, bounds, MASS, False, FORM)
                token, raw = _draw_until_kept(
                    source, scale, None, tile_columns, mass, column_max, bounds, shares, key, False, FORM
                )

        # Where no token is left: token 0, with a log-probability of NaN.
        token = tl.where(row_max > NO_TOKEN, token, 0)
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(logprobs + row, tl.where(row_max > NO_TOKEN, raw - normaliser, float("nan")))
        if FORM.penalty:
            word = marks + token // 32
            tl.store(word, tl.load(word) | (1 << (token % 32)))


LOG2E = tl.constexpr(1.4426950408889634)
LOW = tl.constexpr(-1.0e38)  # replaces -inf and NaN: finite, because -inf - (-inf) is NaN
NO_TOKEN = tl.constexpr(-1.0e30)  # a row max below this means that no token is left
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite fp32

MASS = tl.constexpr(0)
COUNT = tl.constexpr(1)
MOMENT = tl.constexpr(2)


@triton.jit
def read(source, token, valid, FORM: tl.constexpr):
    """Raw logits, and logits after penalty and suppression, in fp32."""
    logits, seen, eos_ids, early, suppressed, penalty, inverse_penalty = source
    if valid is None:
        given = tl.load(logits + token).to(tl.float32)
    else:
        given = tl.load(logits + token, mask=valid, other=-float("inf")).to(tl.float32)
    raw = tl.where(given > LOW, given, LOW)  # not tl.maximum, whose NaN result depends on Triton's version
    value = raw
    if FORM.penalty:
        if valid is None:
            word = tl.load(seen + token // 32)
        else:
            word = tl.load(seen + token // 32, mask=valid, other=0)
        penalised = tl.where(raw < 0, raw * penalty, raw * inverse_penalty)
        value = tl.where(((word >> (token % 32)) & 1) != 0, penalised, value)
    if FORM.eos > 0:
        eos: tl.constexpr = FORM.eos
        for index in tl.static_range(eos):
            value = tl.where((token == tl.load(eos_ids + index)) & early, LOW, value)
    if FORM.suppression:
        if valid is None:
            mark = tl.load(suppressed + token)
        else:
            mark = tl.load(suppressed + token, mask=valid, other=0)
        value = tl.where(mark != 0, LOW, value)
    return raw, value


@triton.jit
def order_and_mass(value, scale, FORM: tl.constexpr):
    """The value that orders tokens, and the mass ``exp(value - row_max)`` at the temperature.

    16-bit logits keep their order and their ties when divided by the temperature; others may not.
    """
    row_max, factor, inverse_temperature = scale
    order = value if FORM.plain else value * inverse_temperature
    return order, tl.exp2((value - row_max) * factor)


@triton.jit
def is_left(order, weight, token, bounds, FORM: tl.constexpr):
    """Mask of the tokens that all filters keep: before the pivot, heavy enough, and typical enough."""
    pivot, pivot_token, least, peak, centre, spread = bounds
    left = ((order > pivot) | ((order == pivot) & (token > pivot_token))) & (weight >= least)
    if FORM.typical:
        left = left & (tl.abs((peak - order) - centre) < spread)
    return left


@triton.jit
def _summand(order, weight, bounds, SUMMAND: tl.constexpr):
    """The summand of each token: its mass, one, or its mass times the distance from the peak."""
    if SUMMAND == COUNT:
        return tl.full(weight.shape, 1.0, tl.float32)
    if SUMMAND == MOMENT:
        return weight * tl.where(weight > 0, bounds[3] - order, 0.0)
    return weight


@triton.jit
def _sum_chunks(order, weight, token, bounds, SUMMAND: tl.constexpr, FORM: tl.constexpr):
    """Column sums of `_summand` over the tokens that are left (axis 0 is chunks)."""
    return tl.sum(
        tl.where(is_left(order, weight, token, bounds, FORM), _summand(order, weight, bounds, SUMMAND), 0.0), 0
    )


@triton.jit
def column_totals(source, scale, tile, bounds, SUMMAND: tl.constexpr, TILED: tl.constexpr, FORM: tl.constexpr):
    """Sum `_summand` per column, by a pass over the row or from the tile in registers."""
    VOCAB: tl.constexpr = FORM.vocab
    COLUMNS: tl.constexpr = FORM.columns
    GROUP: tl.constexpr = FORM.group
    if TILED:
        order, weight, token = tile
        result = _sum_chunks(order, weight, token, bounds, SUMMAND, FORM)
    else:
        whole: tl.constexpr = VOCAB // (GROUP * COLUMNS)
        piece = tl.arange(0, GROUP)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        result = tl.zeros([COLUMNS], tl.float32)
        for turn in range(0, whole):
            token = turn * (GROUP * COLUMNS) + piece
            _, value = read(source, token, None, FORM)
            order, weight = order_and_mass(value, scale, FORM)
            result += _sum_chunks(order, weight, token, bounds, SUMMAND, FORM)
        if whole * GROUP * COLUMNS < VOCAB:
            rest = whole * GROUP * COLUMNS + piece
            _, value_rest = read(source, rest, rest < VOCAB, FORM)
            order_rest, weight_rest = order_and_mass(value_rest, scale, FORM)
            result += _sum_chunks(order_rest, weight_rest, rest, bounds, SUMMAND, FORM)
    return result


@triton.jit
def row_total(source, scale, tile, bounds, SUMMAND: tl.constexpr, TILED: tl.constexpr, FORM: tl.constexpr):
    """Sum `_summand` over the row."""
    if TILED:
        order, weight, token = tile
        summand = _summand(order, weight, bounds, SUMMAND)
        return tl.sum(tl.where(is_left(order, weight, token, bounds, FORM), summand, 0.0))
    return tl.sum(column_totals(source, scale, tile, bounds, SUMMAND, TILED, FORM), 0)


@triton.jit
def _update_columns(source, turn, state, factor, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Online softmax per column: add a group of chunks to the column maxima and masses."""
    VOCAB: tl.constexpr = FORM.vocab
    COLUMNS: tl.constexpr = FORM.columns
    GROUP: tl.constexpr = FORM.group
    column_max, column_mass, raw_column_max, raw_column_mass, best_chunk = state
    piece = tl.arange(0, GROUP)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    token = turn * (GROUP * COLUMNS) + piece
    raw, value = read(source, token, token < VOCAB if MASKED else None, FORM)
    if FORM.greedy:
        here, chunk = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
        best_chunk = tl.where(here > column_max, turn * GROUP + chunk, best_chunk)
    else:
        here = tl.max(value, 0)
    new_column_max = tl.maximum(column_max, here)
    new_raw_column_max = new_column_max
    if FORM.changed:
        new_raw_column_max = tl.maximum(raw_column_max, tl.max(raw, 0))
    if not FORM.greedy:
        column_mass = column_mass * tl.exp2((column_max - new_column_max) * factor)
        column_mass += tl.sum(tl.exp2((value - new_column_max[None, :]) * factor), 0)
    raw_column_mass = raw_column_mass * tl.exp2((raw_column_max - new_raw_column_max) * LOG2E)
    raw_column_mass += tl.sum(tl.exp2((raw - new_raw_column_max[None, :]) * LOG2E), 0)
    return new_column_max, column_mass, new_raw_column_max, raw_column_mass, best_chunk


@triton.jit
def scan(source, factor, FORM: tl.constexpr):
    """First pass: per column, max and mass of processed and of raw logits, and the chunk of the max."""
    VOCAB: tl.constexpr = FORM.vocab
    COLUMNS: tl.constexpr = FORM.columns
    GROUP: tl.constexpr = FORM.group
    column_max = tl.full([COLUMNS], LOW, tl.float32)
    raw_column_max = tl.full([COLUMNS], LOW, tl.float32)
    column_mass = tl.zeros([COLUMNS], tl.float32)
    raw_column_mass = tl.zeros([COLUMNS], tl.float32)
    best_chunk = tl.zeros([COLUMNS], tl.int32)
    whole: tl.constexpr = VOCAB // (GROUP * COLUMNS)
    for turn in range(0, whole):
        state = (column_max, column_mass, raw_column_max, raw_column_mass, best_chunk)
        column_max, column_mass, raw_column_max, raw_column_mass, best_chunk = _update_columns(
            source, turn, state, factor, FORM, False
        )
    if whole * GROUP * COLUMNS < VOCAB:
        state = (column_max, column_mass, raw_column_max, raw_column_mass, best_chunk)
        column_max, column_mass, raw_column_max, raw_column_mass, best_chunk = _update_columns(
            source, whole, state, factor, FORM, True
        )
    return column_max, column_mass, raw_column_max, raw_column_mass, best_chunk
