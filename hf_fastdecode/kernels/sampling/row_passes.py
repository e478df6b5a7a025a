# mypy: ignore-errors
"""Passes of the sampling kernel over a row of logits: maxima, masses and filtered sums per column."""

import triton
import triton.language as tl

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
