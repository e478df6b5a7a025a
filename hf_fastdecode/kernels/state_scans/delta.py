# mypy: ignore-errors
"""Kernels of the gated delta rule over many tokens, in chunks (Gated DeltaNet, section 3.3: the WY form).

Within a chunk that begins with the state ``S``, with products of decays ``g_i`` from its first token on, the rows that
are written are ``T (v - g k S)``, where ``T = (I + L)^-1 diag(beta)``, and ``L_ij = beta_i (k_i k_j) g_i / g_j`` below
the diagonal. `relate` makes ``L`` and the products of queries with keys, `invert` makes ``T`` in place of ``L``, both
for all chunks at once; `scan` carries the state from chunk to chunk.

Queries and keys enter products as they are given, and their norms as factors of the results: in half precision they
are exact parts of products, and only what is computed from them has to be cut into parts.
"""

import triton
import triton.language as tl

from ..pointwise.kernel import follow_previous
from ..state_steps.kernel import softplus
from .chunks import CHUNK, FACTORS, chunk_of, product

BLOCK = tl.constexpr(16)  # rows that `invert` solves one by one
PARTS = tl.constexpr(3)  # of factors of products that become a state, see `product`

# Factors of a chunk's tokens.
READ = tl.constexpr(0)  # of what keys read
ASK = tl.constexpr(1)  # of what queries read
WRITE = tl.constexpr(2)  # of what keys write
BETA = tl.constexpr(3)
DECAY = tl.constexpr(4)  # of the state before the chunk, up to a token


@triton.jit(do_not_specialize=["segments"])
def relate(
    queries,  # [tokens, heads, K], contiguous along K
    keys,  # likewise
    decays,  # [tokens, HEADS], logarithms
    betas,  # [tokens, HEADS]
    rates,  # [HEADS]; not read unless PROJECTED
    biases,  # [HEADS], likewise
    starts,  # [segments + 1]
    systems,  # [slots, HEADS, 2, CHUNK, CHUNK] fp32: L, and products of queries with keys
    factors,  # [slots, HEADS, FACTORS, CHUNK] fp32
    segments,
    query_stride,  # of tokens
    query_head_stride,
    key_stride,
    key_head_stride,
    decay_stride,
    beta_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads of values that share a query and a key
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least K
    PROJECTED: tl.constexpr,  # decays and betas are projections, of which these are made here
    PDL: tl.constexpr,
):
    slot, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    follow_previous(PDL)
    _, _, end, first = chunk_of(slot, starts, segments)
    if first >= end:
        return
    at, along_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    token = first + at.to(tl.int64)
    held = token < end
    kept = held[:, None] & (along_k < K)[None, :]
    shared = head // GROUP
    keys, queries = keys + shared * key_head_stride, queries + shared * query_head_stride
    key = tl.load(keys + token[:, None] * key_stride + along_k[None, :], mask=kept, other=0.0)
    query = tl.load(queries + token[:, None] * query_stride + along_k[None, :], mask=kept, other=0.0)
    decay = tl.load(decays + token * decay_stride + head, mask=held, other=0.0).to(tl.float32)
    beta = tl.load(betas + token * beta_stride + head, mask=held, other=0.0).to(tl.float32)
    if PROJECTED:
        step = softplus(decay + tl.load(biases + head).to(tl.float32))
        decay = tl.where(held, -tl.exp(tl.load(rates + head).to(tl.float32)) * step, 0.0)
        beta = (1.0 / (1.0 + tl.exp(-beta))).to(betas.dtype.element_ty).to(tl.float32)
        beta = tl.where(held, beta, 0.0)
    of_keys = tl.rsqrt(tl.sum(key.to(tl.float32) * key.to(tl.float32), 1) + eps)
    of_queries = tl.rsqrt(tl.sum(query.to(tl.float32) * query.to(tl.float32), 1) + eps) * scale
    # Sums of decays in two parts: their differences are as exact as sums of the decays between.
    exact = tl.cumsum(decay.to(tl.float64), 0)
    total = tl.sum(tl.where(at == CHUNK - 1, exact, 0.0), 0)
    since = exact.to(tl.float32)
    rest = (exact - since.to(tl.float64)).to(tl.float32)
    between = (since[:, None] - since[None, :]) + (rest[:, None] - rest[None, :])
    between = tl.exp(tl.where(at[:, None] >= at[None, :], between, float("-inf")))
    between *= of_keys[None, :]
    lower = product(key, tl.trans(key), PARTS) * between * (of_keys * beta)[:, None]
    asked = product(query, tl.trans(key), PARTS) * between * of_queries[:, None]
    chunk = slot.to(tl.int64) * HEADS + head
    tile = systems + chunk * (2 * CHUNK * CHUNK) + at[:, None] * CHUNK + at[None, :]
    tl.store(tile, tl.where(at[:, None] > at[None, :], lower, 0.0))
    tl.store(tile + CHUNK * CHUNK, asked)
    factor = factors + chunk * (FACTORS * CHUNK) + at
    # In fp64: errors of chunks' decays multiply up, and a GPU's exp in fp32 errs alike for decays that are alike.
    kept_of_state = tl.exp(exact).to(tl.float32)
    tl.store(factor + READ * CHUNK, kept_of_state * of_keys)
    tl.store(factor + ASK * CHUNK, kept_of_state * of_queries)
    tl.store(factor + WRITE * CHUNK, tl.exp(total - exact).to(tl.float32) * of_keys)
    tl.store(factor + BETA * CHUNK, beta)
    tl.store(factor + DECAY * CHUNK, kept_of_state)


@triton.jit(do_not_specialize=["segments"])
def invert(
    systems,  # see `relate`; L becomes T
    factors,
    starts,
    segments,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    slot, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    follow_previous(PDL)
    _, _, end, first = chunk_of(slot, starts, segments)
    if first >= end:
        return
    chunk = slot.to(tl.int64) * HEADS + head
    system = systems + chunk * (2 * CHUNK * CHUNK)
    beta = factors + chunk * (FACTORS * CHUNK) + BETA * CHUNK
    # The inverses of the diagonal's blocks, by forward substitution of their rows, all blocks at once.
    at, blocks = tl.arange(0, BLOCK), tl.arange(0, CHUNK // BLOCK)
    row_at, column_at = at[None, :, None], at[None, None, :]
    coefficients = system + (blocks * (BLOCK * CHUNK + BLOCK))[:, None, None] + row_at
    inverses = tl.where(row_at == column_at, 1.0, 0.0) + blocks[:, None, None] * 0.0
    for row in range(1, BLOCK):
        before = tl.sum(tl.load(coefficients + row * CHUNK) * inverses, 1)
        inverses = tl.where(row_at == row, inverses - before[:, None, :], inverses)
    t00, t11 = _block(inverses, 0), _block(inverses, 1)
    t22, t33 = _block(inverses, 2), _block(inverses, 3)
    # What is below, from the diagonal on.
    l10, l20, l30 = _tile(system, 1, 0), _tile(system, 2, 0), _tile(system, 3, 0)
    l21, l31, l32 = _tile(system, 2, 1), _tile(system, 3, 1), _tile(system, 3, 2)
    t10 = -_dot(t11, _dot(l10, t00))
    t21 = -_dot(t22, _dot(l21, t11))
    t32 = -_dot(t33, _dot(l32, t22))
    t20 = -_dot(t22, _dot(l20, t00) + _dot(l21, t10))
    t31 = -_dot(t33, _dot(l31, t11) + _dot(l32, t21))
    t30 = -_dot(t33, _dot(l30, t00) + _dot(l31, t10) + _dot(l32, t20))
    _store_column(system, beta, 0, (t00, t10, t20, t30))
    _store_column(system, beta, 1, (t11, t21, t31))
    _store_column(system, beta, 2, (t22, t32))
    _store_column(system, beta, 3, (t33,))


@triton.jit
def _pointers(system, ROW: tl.constexpr, COLUMN: tl.constexpr):
    at = tl.arange(0, BLOCK)
    return system + (at + ROW * BLOCK)[:, None] * CHUNK + (at + COLUMN * BLOCK)[None, :]


@triton.jit
def _tile(system, ROW: tl.constexpr, COLUMN: tl.constexpr):
    return tl.load(_pointers(system, ROW, COLUMN))


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _store_column(system, beta, COLUMN: tl.constexpr, tiles):
    factor = tl.load(beta + COLUMN * BLOCK + tl.arange(0, BLOCK))
    for index in tl.static_range(len(tiles)):
        tl.store(_pointers(system, COLUMN + index, COLUMN), tiles[index] * factor[None, :])


@triton.jit
def _block(inverses, INDEX: tl.constexpr):
    here = (tl.arange(0, CHUNK // BLOCK) == INDEX)[:, None, None]
    return tl.sum(tl.where(here, inverses, 0.0), 0)


@triton.jit(do_not_specialize=["resumed"])
def scan(
    queries,  # [tokens, heads, K], contiguous along K
    keys,  # likewise
    values,  # [tokens, HEADS, V], contiguous along V
    systems,  # [slots, HEADS, 2, CHUNK, CHUNK] fp32: T, and products of queries with keys
    factors,  # [slots, HEADS, FACTORS, CHUNK] fp32
    starts,  # [segments + 1]
    states,  # [segments, HEADS, K, V], contiguous; not read unless resumed
    out,  # [tokens, HEADS, V], contiguous
    final,  # as states, fp32
    query_stride,  # of tokens
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    resumed,  # whether segments begin with states; zeros if not
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least K
    BLOCK_V: tl.constexpr,  # of a program
    OUT_PARTS: tl.constexpr,  # of factors of products that become an output, which is rounded
    STAGES: tl.constexpr,  # chunks in flight
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % HEADS
    segment = tl.program_id(0) // (BLOCKS * HEADS)
    at, along_k, along_v = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = along_k < K, along_v < V
    follow_previous(PDL)
    place = (segment.to(tl.int64) * HEADS + head) * (K * V) + along_k[:, None] * V + along_v[None, :]
    kept = in_k[:, None] & in_v[None, :]
    state = tl.load(states + place, mask=kept & (resumed != 0), other=0.0).to(tl.float32)
    start, end = tl.load(starts + segment), tl.load(starts + segment + 1)
    chunk = (start // CHUNK + segment).to(tl.int64) * HEADS + head
    key_tile = keys + head // GROUP * key_head_stride + along_k[None, :]
    query_tile = queries + head // GROUP * query_head_stride + along_k[None, :]
    value_tile = values + head * value_head_stride + along_v[None, :]
    system = systems + at[:, None] * CHUNK + at[None, :]
    for first in tl.range(start, end, CHUNK, num_stages=STAGES):
        token = first + at.to(tl.int64)
        held = (token < end)[:, None]
        key = tl.load(key_tile + token[:, None] * key_stride, mask=held & in_k[None, :], other=0.0)
        query = tl.load(query_tile + token[:, None] * query_stride, mask=held & in_k[None, :], other=0.0)
        value = tl.load(value_tile + token[:, None] * value_stride, mask=held & in_v[None, :], other=0.0)
        solved = tl.load(system + chunk * (2 * CHUNK * CHUNK))
        asked = tl.load(system + chunk * (2 * CHUNK * CHUNK) + CHUNK * CHUNK)
        factor = factors + chunk * (FACTORS * CHUNK) + at
        last = factors + chunk * (FACTORS * CHUNK) + DECAY * CHUNK + CHUNK - 1
        read, ask = tl.load(factor + READ * CHUNK), tl.load(factor + ASK * CHUNK)
        write, whole = tl.load(factor + WRITE * CHUNK), tl.load(last)
        remembered = product(key, state, PARTS) * read[:, None]
        written = product(solved, value.to(tl.float32) - remembered, PARTS)
        found = product(query, state, OUT_PARTS) * ask[:, None] + product(asked, written, OUT_PARTS)
        state = state * whole + product(tl.trans(key), written * write[:, None], PARTS)
        place_out = out + (token[:, None] * HEADS + head) * V + along_v[None, :]
        tl.store(place_out, found.to(out.dtype.element_ty), mask=held & in_v[None, :])
        chunk += HEADS
    tl.store(final + place, state, mask=kept)
