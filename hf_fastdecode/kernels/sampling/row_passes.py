# mypy: ignore-errors
"""Reading a row of logits, and sums over it: the passes of the sampling kernel."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOW = tl.constexpr(-1.0e38)  # stands for -inf and NaN: differences of such values are still numbers
NO_TOKEN = tl.constexpr(-1.0e30)  # a value below this is no token's
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite

MASS = tl.constexpr(0)
COUNT = tl.constexpr(1)
MOMENT = tl.constexpr(2)


@triton.jit
def read(source, token, valid, FORM: tl.constexpr):
    """Logits as the model gave them, and after penalty and suppression; both fp32."""
    logits, seen, eos_ids, early, penalty, inverse_penalty = source
    if valid is None:
        given = tl.load(logits + token).to(tl.float32)
    else:
        given = tl.load(logits + token, mask=valid, other=-float("inf")).to(tl.float32)
    raw = tl.where(given > LOW, given, LOW)  # not a maximum: Triton's versions differ in what that makes of NaN
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
    return raw, value


@triton.jit
def order_and_mass(value, scale, FORM: tl.constexpr):
    """What tokens are ordered by, and their masses relative to the peak's.

    16-bit logits keep their order and their ties when divided by the temperature; others may not.
    """
    row_max, factor, inverse_temperature = scale
    order = value if FORM.plain else value * inverse_temperature
    return order, tl.exp2((value - row_max) * factor)


@triton.jit
def is_left(order, weight, token, bounds, FORM: tl.constexpr):
    """Which tokens are left: they rank before the pivot, weigh enough, and are typical enough."""
    pivot, pivot_token, least, peak, centre, spread = bounds
    left = ((order > pivot) | ((order == pivot) & (token > pivot_token))) & (weight >= least)
    if FORM.typical:
        left = left & (tl.abs((peak - order) - centre) < spread)
    return left


@triton.jit
def _summand(order, weight, bounds, SUMMAND: tl.constexpr):
    """What is summed of each token: its mass, one, or its mass times the distance from the peak."""
    if SUMMAND == COUNT:
        return tl.full(weight.shape, 1.0, tl.float32)
    if SUMMAND == MOMENT:
        return weight * tl.where(weight > 0, bounds[3] - order, 0.0)
    return weight


@triton.jit
def _sum_chunks(order, weight, token, bounds, SUMMAND: tl.constexpr, FORM: tl.constexpr):
    """`_summand` of the tokens that are left, summed over chunks (axis 0)."""
    return tl.sum(
        tl.where(is_left(order, weight, token, bounds, FORM), _summand(order, weight, bounds, SUMMAND), 0.0), 0
    )


@triton.jit
def column_totals(source, scale, tile, bounds, SUMMAND: tl.constexpr, TILED: tl.constexpr, FORM: tl.constexpr):
    """`_sum_chunks` for every column: by a pass over the row, or from the tile."""
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
    """The sum of `column_totals`."""
    if TILED:
        order, weight, token = tile
        summand = _summand(order, weight, bounds, SUMMAND)
        return tl.sum(tl.where(is_left(order, weight, token, bounds, FORM), summand, 0.0))
    return tl.sum(column_totals(source, scale, tile, bounds, SUMMAND, TILED, FORM), 0)


@triton.jit
def _update_columns(source, turn, state, factor, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Take a group of chunks into the columns' maxima and sums."""
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
    """The first pass: columns' largest values and masses relative to them, likewise of raw logits, and best chunks."""
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
