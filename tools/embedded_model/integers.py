"""Rows over single integers, also as elements of lists: conditions and changes. See `grammar` for the templates."""

from __future__ import annotations

from typing import Final

from .grammar import END, INT, Row


def span(low: int, high: int) -> tuple[str, ...]:
    """Constants low..high as source text."""
    return tuple(str(value) for value in range(low, high + 1))


_DIGIT_SUM = "sum(int(d) for d in str(abs({x})))"

# A condition's noun is a bare predicate; its verb is not used.
INT_CONDITIONS: Final = (
    Row(("{x} % 2 == 0",), ("[are|is] even",), (), "even", weight=3),
    Row(("{x} % 2 != 0", "{x} % 2 == 1"), ("[are|is] odd",), (), "odd", weight=3),
    Row(("{x} > 0",), ("[are|is] positive",), (), "positive", weight=1.5),
    Row(("{x} < 0",), ("[are|is] negative",), (), "negative", weight=1.5),
    Row(
        ("{x} > #",),
        ("[are|is] greater than #", "[are|is] more than #", "[are|is] above #"),
        (),
        "above",
        consts=span(1, 12),
        hidden_noun=("[are|is] above a certain limit", "[are|is] large enough"),
        weight=3,
    ),
    Row(
        ("{x} < #",),
        ("[are|is] less than #", "[are|is] smaller than #", "[are|is] below #"),
        (),
        "below",
        consts=span(2, 12),
        hidden_noun=("[are|is] below a certain limit", "[are|is] small enough"),
        weight=3,
    ),
    Row(
        ("{x} % # == 0",),
        ("[are|is] divisible by #", "[are multiples|is a multiple] of #"),
        (),
        "divisible",
        consts=span(3, 9),
        hidden_noun=("[are|is] divisible by a certain number",),
        weight=3,
    ),
    Row(
        ("{x} % # != 0",),
        ("[are|is] not divisible by #", "[are not multiples|is not a multiple] of #"),
        (),
        "indivisible",
        consts=span(3, 9),
        hidden_noun=("[are|is] not divisible by a certain number",),
        weight=1.5,
    ),
    Row(
        ("{x} % # == ~",),
        ("[leave|leaves] remainder ~ when divided by #",),
        (),
        "remainder",
        consts=("3,1", "3,2", "4,1", "4,2", "4,3", "5,1", "5,2", "5,3", "5,4"),
        hidden_noun=("[leave|leaves] a certain remainder when divided by a fixed number",),
        weight=2,
    ),
    Row(
        ("# <= {x} <= ~", "{x} >= # and {x} <= ~"),
        ("[lie|lies] between # and ~", "[are|is] from # to ~"),
        (),
        "between",
        consts=tuple(f"{low},{low + width}" for low in range(1, 8) for width in (3, 5, 8)),
        hidden_noun=("[lie|lies] in a certain range",),
        weight=2,
    ),
    Row(
        ("{x} != #",),
        ("[are|is] not equal to #", "[differ|differs] from #"),
        (),
        "other",
        consts=span(1, 9),
        hidden_noun=("[differ|differs] from a certain number",),
    ),
    Row(
        ("abs({x}) % 10 == #",),
        ("[end|ends] in the digit #",),
        (),
        "ending",
        consts=span(0, 9),
        hidden_noun=("[end|ends] in a certain digit",),
    ),
    Row((f"{_DIGIT_SUM} % 2 == 0",), ("[have|has] an even digit sum",), (), "even_digit_sum"),
    Row(
        ("{x} > 1 and all({x} % d for d in range(2, {x}))", "{x} > 1 and all({x} % d != 0 for d in range(2, {x}))"),
        ("[are|is] prime", "[are prime numbers|is a prime number]"),
        (),
        "prime",
        weight=2,
    ),
    Row(("str({x}) == str({x})[::-1]",), ("[are palindromes|is a palindrome]",), (), "palindrome"),
    Row(
        ("{x} >= 0 and int({x} ** 0.5) ** 2 == {x}",),
        ("[are perfect squares|is a perfect square]",),
        (),
        "square",
    ),
    Row(("len(str(abs({x}))) == 2", "10 <= abs({x}) <= 99"), ("[have|has] two digits",), (), "two_digit"),
)

INT_CHANGES: Final = (
    Row(
        ("{x} + #",),
        ("{it} [each |]increased by #", "{it} with # added to [each|it]"),
        ("add # to [each of them|it]", "increase [each of them|it] by #"),
        "plus",
        consts=span(1, 12),
        hidden_noun=("{it} [each |]increased by a fixed amount",),
        hidden_verb=("add a fixed amount to [each of them|it]",),
        weight=3,
    ),
    Row(
        ("{x} - #",),
        ("{it} [each |]decreased by #",),
        ("subtract # from [each of them|it]", "decrease [each of them|it] by #"),
        "minus",
        consts=span(1, 10),
        hidden_noun=("{it} [each |]decreased by a fixed amount",),
        hidden_verb=("subtract a fixed amount from [each of them|it]",),
        weight=2,
    ),
    Row(
        ("{x} * #",),
        ("{it} [each |]multiplied by #",),
        ("multiply [each of them|it] by #",),
        "times",
        consts=span(2, 9),
        hidden_noun=("{it} [each |]multiplied by a constant",),
        hidden_verb=("multiply [each of them|it] by a constant",),
        weight=3,
    ),
    Row(
        ("{x} * 2",), ("[the doubles|the double] of {it}",), ("double [each of them|it]",), "double", takes_param=False
    ),
    Row(
        ("{x} ** 2", "{x} * {x}"),
        ("the [squares|square] of {it}",),
        ("square [each of them|it]",),
        "square",
        weight=3,
    ),
    Row(("{x} ** 3",), ("the [cubes|cube] of {it}",), ("cube [each of them|it]",), "cube", weight=1.5),
    Row(
        ("abs({x})",),
        ("the absolute [values|value] of {it}",),
        ("take the absolute value of [each of them|it]",),
        "abs",
        weight=1.5,
    ),
    Row(("-{x}",), ("the [negatives|negative] of {it}",), ("flip the sign of [each of them|it]",), "negated"),
    Row(
        ("{x} % #",),
        ("the [remainders|remainder] of {it} when divided by #", "{it} [each |]modulo #"),
        ("take [each of them|it] modulo #",),
        "mod",
        consts=span(2, 9),
        hidden_noun=("{it} [each |]modulo a constant",),
        hidden_verb=("take [each of them|it] modulo a constant",),
        weight=2,
    ),
    Row(
        ("{x} // #",),
        ("{it} [each |]floor divided by #", "the integer [quotients|quotient] of {it} by #"),
        ("floor divide [each of them|it] by #",),
        "quotient",
        consts=span(2, 9),
        hidden_noun=("{it} [each |]floor divided by a constant",),
        hidden_verb=("floor divide [each of them|it] by a constant",),
        weight=2,
    ),
    Row(
        ("# - {x}",),
        ("the [differences|difference] between # and [each of |]{it}",),
        ("subtract [each of them|it] from #",),
        "from",
        consts=span(10, 20),
        hidden_noun=("the [differences|difference] between a constant and [each of |]{it}",),
        hidden_verb=("subtract [each of them|it] from a constant",),
    ),
    Row(
        ("{x} * # + ~",),
        ("{it} [each |]multiplied by # and increased by ~",),
        ("multiply [each of them|it] by # and add ~",),
        "linear",
        consts=tuple(f"{scale},{shift}" for scale in range(2, 6) for shift in range(1, 6)),
        hidden_noun=("{it} [each |]multiplied by a constant and increased by another",),
        hidden_verb=("multiply [each of them|it] by a constant and add another",),
        weight=2,
    ),
    Row(
        ("{x} ** 2 + #", "{x} * {x} + #"),
        ("the [squares|square] of {it} [each |]increased by #",),
        ("square [each of them|it] and add #",),
        "square_plus",
        consts=span(1, 9),
        hidden_noun=("the [squares|square] of {it} [each |]increased by a fixed amount",),
        hidden_verb=("square [each of them|it] and add a fixed amount",),
    ),
    Row(
        ("min({x}, #)",),
        ("{it} [each |]capped at #",),
        ("cap [each of them|it] at #",),
        "capped",
        consts=span(4, 12),
        hidden_noun=("{it} [each |]capped at a certain value",),
        hidden_verb=("cap [each of them|it] at a certain value",),
    ),
    Row(
        ("max({x}, #)",),
        ("{it} [each |]raised to at least #",),
        ("raise [each of them|it] to at least #",),
        "floored",
        consts=span(0, 6),
        hidden_noun=("{it} [each |]raised to at least a certain value",),
        hidden_verb=("raise [each of them|it] to at least a certain value",),
    ),
    Row((_DIGIT_SUM,), ("the digit [sums|sum] of {it}",), ("take the digit sum of [each of them|it]",), "digit_sum"),
    Row(
        ("{x} * # if {x} % 2 == 0 else {x}",),
        ("{it} with [even ones|it] multiplied by # [|if even]",),
        ("multiply [the even ones|it] by # [and keep the rest|if it is even]",),
        "scale_even",
        consts=span(2, 6),
        hidden_noun=("{it} with [even ones|it] multiplied by a constant [|if even]",),
        hidden_verb=("multiply [the even ones|it] by a constant [and keep the rest|if it is even]",),
    ),
    Row(
        ("{x} // 2 if {x} % 2 == 0 else {x} * # + 1",),
        ("{it} [each |]halved if even and else multiplied by # and increased by 1",),
        ("halve [each of them|it] if even and else multiply by # and add 1",),
        "collatz",
        consts=span(3, 5),
    ),
)

INT_TO_OTHER: Final = (
    Row(
        ("int(str(abs({x}))[::-1])",),
        ("the number with the digits of {it} reversed",),
        ("reverse its digits",),
        "reversed",
        INT,
    ),
    Row(("len(str(abs({x})))",), ("the number of digits of {it}",), ("count its digits",), "digits", INT),
    Row(("bin({x})[2:]",), ("the binary representation of {it}",), ("write it in binary",), "binary", END),
    Row(("bin({x}).count('1')",), ("the number of one bits of {it}",), ("count its one bits",), "ones", INT),
    Row(("str({x})",), ("{it} as a string",), ("turn it into a string",), "text", END),
)
