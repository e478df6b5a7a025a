"""Rows over words, strings and dictionaries. See `grammar` for the template language."""

from __future__ import annotations

from typing import Final

from .grammar import BOOL, DICT, END, INT, INTS, TEXT, WORDS, Row

_LETTERS = tuple("aeiorstnl")

WORD_CONDITIONS: Final = (
    Row(
        ("len({x}) > #",),
        ("[are|is] longer than # characters", "[have|has] more than # letters"),
        (),
        "long",
        consts=("2", "3", "4", "5", "6"),
        hidden_noun=("[are|is] long enough",),
        weight=3,
    ),
    Row(
        ("len({x}) < #",),
        ("[are|is] shorter than # characters", "[have|has] fewer than # letters"),
        (),
        "short",
        consts=("4", "5", "6", "7"),
        hidden_noun=("[are|is] short enough",),
        weight=2,
    ),
    Row(("len({x}) % 2 == 0",), ("[have|has] an even length",), (), "even_length"),
    Row(("len({x}) % 2 != 0", "len({x}) % 2 == 1"), ("[have|has] an odd length",), (), "odd_length"),
    Row(
        ("{x}.startswith('#')", "{x}[0] == '#'"),
        ("[start|starts] with '#'", "[begin|begins] with the letter '#'"),
        (),
        "starting",
        consts=_LETTERS,
        hidden_noun=("[start|starts] with a certain letter",),
        weight=2,
    ),
    Row(
        ("{x}.endswith('#')", "{x}[-1] == '#'"),
        ("[end|ends] with '#'",),
        (),
        "ending",
        consts=_LETTERS,
        hidden_noun=("[end|ends] with a certain letter",),
        weight=2,
    ),
    Row(
        ("'#' in {x}",),
        ("[contain|contains] '#'", "[contain|contains] the letter '#'"),
        (),
        "containing",
        consts=_LETTERS,
        hidden_noun=("[contain|contains] a certain letter",),
        weight=2,
    ),
    Row(
        ("'#' not in {x}",),
        ("[do|does] not contain '#'",),
        (),
        "lacking",
        consts=_LETTERS,
        hidden_noun=("[do|does] not contain a certain letter",),
    ),
    Row(("{x} == {x}[::-1]",), ("[are palindromes|is a palindrome]",), (), "palindrome"),
    Row(("{x}[0] in 'aeiou'",), ("[start|starts] with a vowel",), (), "vowel_start"),
    Row(("len(set({x})) == len({x})",), ("[have|has] no repeated letters",), (), "isogram"),
)

# Changes of one string, of each word of a list or of a whole string.
TEXT_CHANGES: Final = (
    Row(("{x}.upper()",), ("{it} in upper case",), ("convert [each of them|it] to upper case",), "upper", weight=2),
    Row(("{x}[::-1]",), ("{it} [each |]reversed",), ("reverse [each of them|it]",), "reversed", weight=2),
    Row(("{x}.capitalize()",), ("{it} [each |]capitalized",), ("capitalize [each of them|it]",), "capital"),
    Row(
        ("{x}[:#]",),
        ("the first # letters of [each of |]{it}",),
        ("cut [each of them|it] to the first # letters",),
        "prefix",
        consts=("1", "2", "3", "4"),
        hidden_noun=("the first few letters of [each of |]{it}",),
        hidden_verb=("cut [each of them|it] to the first few letters",),
        weight=1.5,
    ),
    Row(
        ("{x}[-#:]",),
        ("the last # letters of [each of |]{it}",),
        ("keep the last # letters of [each of them|it]",),
        "suffix",
        consts=("2", "3", "4"),
        hidden_noun=("the last few letters of [each of |]{it}",),
        hidden_verb=("keep the last few letters of [each of them|it]",),
    ),
    Row(
        ("{x}[::2]",),
        ("every second letter of [each of |]{it}",),
        ("keep every second letter of [each of them|it]",),
        "alternate",
    ),
    Row(
        ("{x} * #",),
        ("{it} [each |]repeated # times",),
        ("repeat [each of them|it] # times",),
        "repeated",
        consts=("2", "3"),
        hidden_noun=("{it} [each |]repeated a few times",),
        hidden_verb=("repeat [each of them|it] a few times",),
    ),
    Row(
        ("{x} + '#'",),
        ("{it} [each |]followed by '#'",),
        ("append '#' to [each of them|it]",),
        "suffixed",
        consts=("!", "s", "?", "er"),
        hidden_noun=("{it} [each |]followed by a fixed ending",),
        hidden_verb=("append a fixed ending to [each of them|it]",),
    ),
    Row(
        ("{x}.replace('#', '~')",),
        ("{it} with '#' replaced by '~'",),
        ("replace '#' by '~' in [each of them|it]",),
        "replaced",
        consts=tuple(f"{old},{new}" for old in "aeiost" for new in "xyz*"),
        hidden_noun=("{it} with one letter replaced by another",),
        hidden_verb=("replace one letter by another in [each of them|it]",),
        weight=2,
    ),
    Row(
        ("{x}.replace('#', '')",),
        ("{it} with every '#' removed",),
        ("remove every '#' from [each of them|it]",),
        "without",
        consts=_LETTERS,
        hidden_noun=("{it} with a certain letter removed",),
        hidden_verb=("remove a certain letter from [each of them|it]",),
        weight=2,
    ),
    Row(
        ("''.join(sorted({x}))",),
        ("{it} with [their|its] letters sorted",),
        ("sort the letters of [each of them|it]",),
        "sorted_letters",
    ),
    Row(
        ("''.join(c for c in {x} if c not in 'aeiou')",),
        ("{it} without vowels",),
        ("remove the vowels from [each of them|it]",),
        "no_vowels",
        weight=2,
    ),
    Row(
        ("''.join(c for c in {x} if c in 'aeiou')",),
        ("the vowels of [each of |]{it}",),
        ("keep only the vowels of [each of them|it]",),
        "vowels",
    ),
    Row(
        ("''.join(dict.fromkeys({x}))",),
        ("{it} without repeated letters",),
        ("drop repeated letters from [each of them|it]",),
        "unique_letters",
    ),
    Row(
        ("''.join(c * 2 for c in {x})",),
        ("{it} with every letter doubled",),
        ("double every letter of [each of them|it]",),
        "doubled",
    ),
)

# Numbers read off one string, of each word or of a whole string.
TEXT_MEASURES: Final = (
    Row(
        ("len({x})",),
        ("the [lengths|length] of {it}",),
        ("take [their lengths|its length]",),
        "length",
        INTS,
        weight=3,
    ),
    Row(
        ("sum(c in 'aeiou' for c in {x})", "sum(1 for c in {x} if c in 'aeiou')"),
        ("the number of vowels in [each of |]{it}",),
        ("count the vowels of [each of them|it]",),
        "vowel_count",
        INTS,
        weight=2,
    ),
    Row(
        ("{x}.count('#')",),
        ("how often '#' occurs in [each of |]{it}",),
        ("count how often '#' occurs in [each of them|it]",),
        "letter_count",
        INTS,
        _LETTERS,
        ("how often a certain letter occurs in [each of |]{it}",),
        ("count how often a certain letter occurs in [each of them|it]",),
        weight=2,
    ),
    Row(
        ("len(set({x}))",),
        ("the number of distinct letters in [each of |]{it}",),
        ("count the distinct letters of [each of them|it]",),
        "distinct_letters",
        INTS,
    ),
)

WORDS_TO_WORDS: Final = (
    Row(("sorted({v})",), ("{it} in alphabetical order",), ("sort them alphabetically",), "sorted", WORDS, weight=2),
    Row(("sorted({v}, key=len)",), ("{it} sorted by length",), ("sort them by length",), "by_length", WORDS, weight=2),
    Row(
        ("{v}[::-1]", "list(reversed({v}))"),
        ("{it} in reverse order",),
        ("reverse their order",),
        "reversed",
        WORDS,
        weight=2,
    ),
    Row(
        ("{v}[:#]",),
        ("the first # of {it}",),
        ("keep the first # of them",),
        "first",
        WORDS,
        ("1", "2", "3"),
        ("the first few of {it}",),
        ("keep the first few of them",),
    ),
    Row(("{v}[::2]",), ("every second one of {it}",), ("keep every second one",), "alternate", WORDS),
    Row(
        ("sorted({v}, key=lambda w: w[-1])",),
        ("{it} sorted by their last letter",),
        ("sort them by their last letter",),
        "by_last",
        WORDS,
    ),
)

WORDS_TO_OTHER: Final = (
    Row(
        ("'#'.join({v})",),
        ("{it} joined by '#'",),
        ("join them with '#'",),
        "joined",
        TEXT,
        ("-", " ", ", ", "+", "/"),
        ("{it} joined by a separator",),
        ("join them with a separator",),
        weight=3,
    ),
    Row(("len({v})",), ("the number of {it}",), ("count them",), "count", INT, weight=3),
    Row(("max({v}, key=len)",), ("the longest of {it}",), ("return the longest",), "longest", TEXT, weight=2),
    Row(("min({v}, key=len)",), ("the shortest of {it}",), ("return the shortest",), "shortest", TEXT, weight=2),
    Row(("min({v})",), ("the alphabetically first of {it}",), ("return the alphabetically first",), "first", TEXT),
    Row(("{v}[-1]",), ("the last of {it}",), ("return the last one",), "last", TEXT),
    Row(
        ("sum(len(w) for w in {v})", "len(''.join({v}))"),
        ("the total length of {it}",),
        ("return their total length",),
        "total_length",
        INT,
        weight=2,
    ),
    Row(
        ("{w: len(w) for w in {v}}",),
        ("a dictionary from each of {it} to its length",),
        ("map each of them to its length",),
        "lengths",
        DICT,
        weight=1.5,
    ),
    Row(("tuple({v})",), ("a tuple of {it}",), ("return them as a tuple",), "tuple", END),
)

TEXT_TO_OTHER: Final = (
    Row(
        ("{v} == {v}[::-1]",),
        ("whether {it} is a palindrome",),
        ("check whether it is a palindrome",),
        "palindrome",
        BOOL,
    ),
    Row(
        ("{c: {v}.count(c) for c in {v}}",),
        ("the frequency of each character of {it}",),
        ("count each character in a dictionary",),
        "frequency",
        DICT,
    ),
    Row(("[ord(c) for c in {v}]",), ("the character codes of {it}",), ("list its character codes",), "codes", INTS),
    Row(
        ("len(set({v})) == len({v})",),
        ("whether {it} has no repeated characters",),
        ("check that no character repeats",),
        "isogram",
        BOOL,
    ),
)

# Condition texts and changes of dictionary values are those of integers; these are about the dictionary itself.
DICT_STEPS: Final = (
    Row(("list({v}.values())",), ("the values of {it}",), ("take its values",), "values", INTS, weight=2),
    Row(
        ("sorted({v})", "sorted({v}.keys())"),
        ("the sorted keys of {it}",),
        ("sort its keys",),
        "keys",
        WORDS,
        weight=2,
    ),
    Row(
        ("max({v}, key={v}.get)",),
        ("the key with the largest value in {it}",),
        ("return the key with the largest value",),
        "top",
        END,
        weight=2,
    ),
    Row(
        ("min({v}, key={v}.get)",),
        ("the key with the smallest value in {it}",),
        ("return the key with the smallest value",),
        "bottom",
        END,
    ),
    Row(
        ("sorted({v}, key={v}.get)",),
        ("the keys of {it} sorted by value",),
        ("sort its keys by value",),
        "keys_by_value",
        WORDS,
    ),
    Row(
        ("sorted({v}.items())",),
        ("the items of {it} sorted by key",),
        ("return its items sorted by key",),
        "items",
        END,
    ),
    Row(
        ("{value: key for key, value in {v}.items()}",),
        ("{it} with keys and values swapped",),
        ("swap its keys and values",),
        "inverted",
        END,
    ),
)
