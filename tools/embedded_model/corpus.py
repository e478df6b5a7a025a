"""The synthetic corpus: compositions turned into tasks in MBPP's schema, split by meaning into training and held-out.

python -m tools.embedded_model.corpus --out DIR     writes tasks.jsonl and fewshot.jsonl
python -m tools.embedded_model.corpus --check 20000 compares held-out tasks with that many training examples
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from hf_fastdecode.assets import Task, solved_example

from .compose import compose, describe, function_name, is_hideable, write_code
from .grammar import BOOL
from .inputs import draw_arguments

HELD_OUT_ONE_IN: Final = 8  # one signature in eight never occurs in training
VAGUE_SHARE: Final = 0.4  # training share of texts that leave constants to the tests
BLOCK: Final = 2000  # examples per random stream: the corpus does not depend on the number of workers
TASKS_PRECISE: Final = 80
TASKS_VAGUE: Final = 80
TASKS_FEW_SHOT: Final = 40
_TESTS: Final = 3
_TRIES: Final = 14
_LONGEST_RANGE: Final = 10_000  # steps of a loop in a test
_LONGEST_VALUE: Final = 48  # characters of an argument list or of an expected value


@dataclass(frozen=True)
class Example:
    """A task with what the schema does not keep: its meaning and whether the text leaves constants open."""

    text: str
    code: str
    tests: tuple[str, ...]
    signature: str
    vague: bool
    steps: int

    def as_text(self) -> str:
        """The example as it stands in a training document."""
        return solved_example(self.text, self.tests, self.code)

    def as_task(self, task_id: int) -> Task:
        """MBPP's fields."""
        return {
            "task_id": task_id,
            "text": self.text,
            "code": self.code,
            "test_list": list(self.tests),
            "test_setup_code": "",
            "challenge_test_list": [],
        }


def is_held_out(signature: str) -> bool:
    """Whether a composition belongs to the held-out split: decided by a hash of its meaning alone."""
    return int.from_bytes(hashlib.sha256(signature.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def bare_code(code: str) -> str:
    """Code without its function's name, to compare programs."""
    return re.sub(r"def \w+\(", "def f(", code)


def make_example(rng: random.Random, held_out: bool, vague_share: float = VAGUE_SHARE) -> Example | None:
    """Draw one example of a split, or None where the draw fell on the other split or gave no telling tests."""
    composition = compose(rng)
    signature = composition.signature
    if is_held_out(signature) != held_out:
        return None
    vague = is_hideable(composition) and rng.random() < vague_share
    text = describe(composition, vague, rng)
    name = function_name(composition, rng)
    code = write_code(composition, name, rng)
    tests = _make_tests(code, name, composition.input_kinds, composition.gives == BOOL, rng)
    if tests is None:
        return None
    return Example(text, code, tests, signature, vague, len(composition.steps))


def _short_range(*bounds: int) -> range:
    """`range`, refusing what takes long, such as the divisors tried to see whether a large number is prime."""
    numbers = range(*bounds)
    if len(numbers) > _LONGEST_RANGE:
        raise OverflowError(f"a loop of {len(numbers)} steps is too long for a test; the limit is {_LONGEST_RANGE}")
    return numbers


def _make_tests(
    code: str, name: str, kinds: tuple[str, ...], boolean: bool, rng: random.Random
) -> tuple[str, ...] | None:
    """Three asserts whose expected values come from running the code; at least two differ, at most one is empty."""
    scope: dict[str, Any] = {"range": _short_range}
    exec(compile(code, name, "exec"), scope)
    chosen: list[tuple[str, str]] = []
    for _ in range(_TRIES):
        arguments = draw_arguments(kinds, rng)
        shown = ", ".join(map(repr, arguments))
        try:
            value = scope[name](*arguments)
        except (
            ValueError,
            IndexError,
            ZeroDivisionError,
            OverflowError,
        ):  # an empty list has no maximum, and the like
            continue
        expected = repr(value)
        if len(expected) > _LONGEST_VALUE or len(shown) > _LONGEST_VALUE:
            continue
        values = [other for _, other in chosen]
        if boolean and values.count(expected) == 2:
            continue
        if not boolean and (values.count(expected) or (not value and value != 0)):
            continue
        chosen.append((shown, expected))
        if len(chosen) == _TESTS:
            return tuple(f"assert {name}({shown}) == {expected}" for shown, expected in chosen)
    return None


def training_block(seed: int, index: int) -> list[Example]:
    """Block `index` of the training split: `BLOCK` examples, the same on every machine."""
    rng = random.Random(f"train-{seed}-{index}")
    examples: list[Example] = []
    while len(examples) < BLOCK:
        example = make_example(rng, held_out=False)
        if example is not None:
            examples.append(example)
    return examples


def training_blocks(seed: int, count: int) -> Iterator[list[Example]]:
    """Blocks 0..count-1 of the training split."""
    for index in range(count):
        yield training_block(seed, index)


def held_out_examples(seed: int, precise: int, vague: int) -> list[Example]:
    """Distinct held-out examples, `precise` with full texts and `vague` with texts whose constants only the tests fix.

    A smaller request is a prefix, per kind, of a larger one with the same seed. Ends with precise and vague interleaved.
    """
    return _distinct(random.Random(f"held-out-{seed}"), True, precise, vague)


def few_shot_examples(seed: int, count: int) -> list[Example]:
    """Distinct training-split examples to build prompts from; about half of them vague."""
    return _distinct(random.Random(f"few-shot-{seed}"), False, count - count // 2, count // 2)


def _distinct(rng: random.Random, held_out: bool, precise: int, vague: int) -> list[Example]:
    wanted = {False: precise, True: vague}
    found: dict[bool, list[Example]] = {False: [], True: []}
    seen: set[str] = set()
    while any(len(found[kind]) < wanted[kind] for kind in wanted):
        example = make_example(rng, held_out, vague_share=0.6)
        if example is None or example.signature in seen or len(found[example.vague]) >= wanted[example.vague]:
            continue
        seen.add(example.signature)
        found[example.vague].append(example)
    merged = [(index / max(1, wanted[kind]), kind, index) for kind in wanted for index in range(wanted[kind])]
    return [found[kind][index] for _, kind, index in sorted(merged)]


def check_disjoint(held_out: list[Example], training: Iterator[list[Example]]) -> Counter[str]:
    """Count training examples and what they share with the held-out ones (signatures, bodies, texts with tests)."""
    signatures = {example.signature for example in held_out}
    bodies = {bare_code(example.code) for example in held_out}
    counts: Counter[str] = Counter(examples=0, signatures=0, bodies=0)
    for block in training:
        for example in block:
            counts["examples"] += 1
            counts["signatures"] += example.signature in signatures
            counts["bodies"] += bare_code(example.code) in bodies
    return counts


def write_jsonl(path: Path, tasks: list[Task]) -> None:
    """Write one JSON object per line, under a temporary name first."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    partial.rename(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for tasks.jsonl and fewshot.jsonl")
    parser.add_argument(
        "--check", type=int, default=0, metavar="N", help="look for held-out tasks among N training examples"
    )
    parser.add_argument("--precise", type=int, default=TASKS_PRECISE, help="held-out tasks with a full text")
    parser.add_argument(
        "--vague", type=int, default=TASKS_VAGUE, help="held-out tasks that leave constants to the tests"
    )
    parser.add_argument("--few-shot", type=int, default=TASKS_FEW_SHOT, help="training tasks for prompts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    held_out = held_out_examples(args.seed, args.precise, args.vague)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        write_jsonl(args.out / "tasks.jsonl", [example.as_task(101 + i) for i, example in enumerate(held_out)])
        shots = few_shot_examples(args.seed, args.few_shot)
        write_jsonl(args.out / "fewshot.jsonl", [example.as_task(1 + i) for i, example in enumerate(shots)])
    if args.check:
        blocks = -(-args.check // BLOCK)
        counts = check_disjoint(held_out, iter(tqdm(training_blocks(args.seed, blocks), total=blocks, unit="block")))
        print(dict(counts))
        if counts["signatures"] or counts["bodies"]:
            raise SystemExit("held-out tasks occur in training")


if __name__ == "__main__":
    main()
