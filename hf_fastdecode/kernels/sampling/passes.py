# mypy: ignore-errors
"""Reading a row of logits, and sums over it: the passes of the sampling kernel."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOW = tl.constexpr(-1.0e38)  # stands for -inf and NaN: differences of such values are still numbers
NOTHING = tl.constexpr(-1.0e30)  # a value below this is no token's
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
def rank(value, scale, FORM: tl.constexpr):
    """What tokens are ordered by, and their masses relative to the peak's.

    16-bit logits keep their order and their ties when divided by the temperature; others may not.
    """
    top, factor, inverse_temperature = scale
    order = value if FORM.plain else value * inverse_temperature
    return order, tl.exp2((value - top) * factor)


@triton.jit
def inside(order, weight, token, bounds, FORM: tl.constexpr):
    """Which tokens are left: they rank before the pivot, weigh enough, and are typical enough."""
    pivot, pivot_token, least, peak, centre, spread = bounds
    inside = ((order > pivot) | ((order == pivot) & (token > pivot_token))) & (weight >= least)
    if FORM.typical:
        inside = inside & (tl.abs((peak - order) - centre) < spread)
    return inside


@triton.jit
def _what(order, weight, bounds, WHAT: tl.constexpr):
    """What is summed of each token: its mass, one, or its mass times the distance from the peak."""
    if WHAT == COUNT:
        return tl.full(weight.shape, 1.0, tl.float32)
    if WHAT == MOMENT:
        return weight * tl.where(weight > 0, bounds[3] - order, 0.0)
    return weight


@triton.jit
def _sum(order, weight, token, bounds, WHAT: tl.constexpr, FORM: tl.constexpr):
    """`_what` of the tokens that are left, summed over chunks (axis 0)."""
    return tl.sum(tl.where(inside(order, weight, token, bounds, FORM), _what(order, weight, bounds, WHAT), 0.0), 0)


@triton.jit
def columns_of(source, scale, tile, bounds, WHAT: tl.constexpr, TILED: tl.constexpr, FORM: tl.constexpr):
    """`_sum` for every column: by a pass over the row, or from the tile."""
    VOCAB: tl.constexpr = FORM.vocab
    COLUMNS: tl.constexpr = FORM.columns
    GROUP: tl.constexpr = FORM.group
    if TILED:
        order, weight, token = tile
        result = _sum(order, weight, token, bounds, WHAT, FORM)
    else:
        whole: tl.constexpr = VOCAB // (GROUP * COLUMNS)
        piece = tl.arange(0, GROUP)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        result = tl.zeros([COLUMNS], tl.float32)
        for turn in range(0, whole):
            token = turn * (GROUP * COLUMNS) + piece
            _, value = read(source, token, None, FORM)
            order, weight = rank(value, scale, FORM)
            result += _sum(order, weight, token, bounds, WHAT, FORM)
        if whole * GROUP * COLUMNS < VOCAB:
            rest = whole * GROUP * COLUMNS + piece
            _, value_rest = read(source, rest, rest < VOCAB, FORM)
            order_rest, weight_rest = rank(value_rest, scale, FORM)
            result += _sum(order_rest, weight_rest, rest, bounds, WHAT, FORM)
    return result


@triton.jit
def total_of(source, scale, tile, bounds, WHAT: tl.constexpr, TILED: tl.constexpr, FORM: tl.constexpr):
    """The sum of `columns_of`."""
    if TILED:
        order, weight, token = tile
        what = _what(order, weight, bounds, WHAT)
        return tl.sum(tl.where(inside(order, weight, token, bounds, FORM), what, 0.0))
    return tl.sum(columns_of(source, scale, tile, bounds, WHAT, TILED, FORM), 0)


@triton.jit
def _absorb(source, turn, state, factor, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Take a group of chunks into the columns' maxima and sums."""
    VOCAB: tl.constexpr = FORM.vocab
    COLUMNS: tl.constexpr = FORM.columns
    GROUP: tl.constexpr = FORM.group
    top, mass, raw_top, raw_mass, best = state
    piece = tl.arange(0, GROUP)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    token = turn * (GROUP * COLUMNS) + piece
    raw, value = read(source, token, token < VOCAB if MASKED else None, FORM)
    if FORM.greedy:
        here, chunk = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
        best = tl.where(here > top, turn * GROUP + chunk, best)
    else:
        here = tl.max(value, 0)
    new_top = tl.maximum(top, here)
    new_raw_top = new_top
    if FORM.changed:
        new_raw_top = tl.maximum(raw_top, tl.max(raw, 0))
    if not FORM.greedy:
        mass = mass * tl.exp2((top - new_top) * factor)
        mass += tl.sum(tl.exp2((value - new_top[None, :]) * factor), 0)
    raw_mass = raw_mass * tl.exp2((raw_top - new_raw_top) * LOG2E)
    raw_mass += tl.sum(tl.exp2((raw - new_raw_top[None, :]) * LOG2E), 0)
    return new_top, mass, new_raw_top, raw_mass, best


@triton.jit
def scan(source, factor, FORM: tl.constexpr):
    """The first pass: columns' largest values and masses relative to them, likewise of raw logits, and best chunks."""
    VOCAB: tl.constexpr = FORM.vocab
    COLUMNS: tl.constexpr = FORM.columns
    GROUP: tl.constexpr = FORM.group
    top = tl.full([COLUMNS], LOW, tl.float32)
    raw_top = tl.full([COLUMNS], LOW, tl.float32)
    mass = tl.zeros([COLUMNS], tl.float32)
    raw_mass = tl.zeros([COLUMNS], tl.float32)
    best = tl.zeros([COLUMNS], tl.int32)
    whole: tl.constexpr = VOCAB // (GROUP * COLUMNS)
    for turn in range(0, whole):
        state = (top, mass, raw_top, raw_mass, best)
        top, mass, raw_top, raw_mass, best = _absorb(source, turn, state, factor, FORM, False)
    if whole * GROUP * COLUMNS < VOCAB:
        state = (top, mass, raw_top, raw_mass, best)
        top, mass, raw_top, raw_mass, best = _absorb(source, whole, state, factor, FORM, True)
    return top, mass, raw_top, raw_mass, best
