# mypy: ignore-errors
"""Exchange of scores between the programs of a group, through words of a value and a tag.

A word of 64 bits holds an fp32 score and the number of its tile, and is written and read as a whole, so that a reader
needs neither a counter nor a fence: it polls until every word has the tag that it expects.
"""

import triton
import triton.language as tl

HEADER = tl.constexpr(16)  # words before those of scores; the first is the tag that was used last
_POLLS = 1 << 24  # about ten seconds; then a trap, since an error is better than a GPU that hangs


def _receive(count: int) -> str:
    """PTX that polls `count` words at once. Operands: scores, addresses (0: no word, the score is -inf), tags."""
    each = range(count)
    address, tag = count, 2 * count
    lines = [f"mov.b64 word{i}, {{minus_infinity, ${tag}}}; setp.ne.s64 wanted{i}, ${address + i}, 0;" for i in each]
    lines += ["poll:"]
    lines += [f"@wanted{i} ld.relaxed.gpu.global.b64 word{i}, [${address + i}];" for i in each]
    lines += [f"mov.b64 {{${i}, tag{i}}}, word{i};" for i in each]
    lines += [f"setp.ne.b32 stale, tag0, ${tag};"]
    lines += [f"setp.ne.or.b32 stale, tag{i}, ${tag}, stale;" for i in each[1:]]
    lines += ["add.u32 polls, polls, 1;", f"setp.gt.u32 hangs, polls, {_POLLS};", "@hangs trap;", "@stale bra poll;"]
    registers = [".reg .pred stale, hangs;", ".reg .b32 minus_infinity;", ".reg .u32 polls;"]
    registers += [f".reg .pred wanted{i}; .reg .b64 word{i}; .reg .b32 tag{i};" for i in each]
    begin = ["mov.u32 polls, 0;", "mov.b32 minus_infinity, 0xff800000;"]
    return "\n".join(["{", *registers, *begin, *lines, "}"])


def _constraints(count: int) -> str:
    return ",".join(["=&r"] * count + ["l"] * count + ["r"] * count)


_RECEIVE_1, _CONSTRAINTS_1 = tl.constexpr(_receive(1)), tl.constexpr(_constraints(1))
_RECEIVE_2, _CONSTRAINTS_2 = tl.constexpr(_receive(2)), tl.constexpr(_constraints(2))
_RECEIVE_4, _CONSTRAINTS_4 = tl.constexpr(_receive(4)), tl.constexpr(_constraints(4))


@triton.jit
def publish(words, scores, tag, mask):
    """Write scores under a tag, each as one 64-bit word at its address in `words`."""
    low = scores.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(words, (tag.to(tl.int64) << 32) | low, mask=mask, sem="relaxed", scope="gpu")


@triton.jit
def receive(words, tag, wanted, PACK: tl.constexpr):
    """Wait for the words of a tag and return their scores; -inf where not wanted.

    PACK words of a thread are polled at once; a thread must hold a multiple of it.
    """
    address = tl.where(wanted, words.to(tl.int64), 0)
    tags = tl.zeros_like(address).to(tl.int32) + tag
    PTX: tl.constexpr = _RECEIVE_4 if PACK == 4 else _RECEIVE_2 if PACK == 2 else _RECEIVE_1
    CONSTRAINTS: tl.constexpr = _CONSTRAINTS_4 if PACK == 4 else _CONSTRAINTS_2 if PACK == 2 else _CONSTRAINTS_1
    return tl.inline_asm_elementwise(PTX, CONSTRAINTS, [address, tags], dtype=tl.float32, is_pure=False, pack=PACK)
