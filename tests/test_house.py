"""The size of the package, long functions, and how far features spread over the core: bounds that only go down."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from .quick import KINDS

PACKAGE = Path(__file__).resolve().parents[1] / "hf_fastdecode"
CORE = ("attention", "cache", "generation")

BOUNDS = {"files": 299, "lines": 61056}
"""Of the package's Python files. Lines are to come to 50,000."""

FEATURES = {
    "several processes": (r"ranks?|peers?|parallel|collectives?|distributed", 15),
    "latents": (r"latents?", 12),
    "images": (r"images?|pixels?|videos?", 8),
    "states": (r"states|stateful|recurrent", 15),
    "encoders": (r"encoders?|encoded|cross", 15),
}
"""By feature, the words of names that tell of it, and files of the core with such a name; these may be 15 at most."""

MOST_BRANCHES = 20
LONG = {}
"""Functions with more branches, which are to become none. Triton's kernels are left out."""

_BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.BoolOp, ast.match_case)


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a file, by their qualified names; those within functions count as part of these."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{inside}{node.name}", node
        else:
            yield from functions(node, f"{inside}{node.name}." if isinstance(node, ast.ClassDef) else inside)


def branches(function: ast.AST) -> int:
    return sum(isinstance(node, _BRANCHES) for node in ast.walk(function))


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(one) for one in function.decorator_list)


@cache
def words_of_core() -> dict[str, set[str]]:
    """For each file of the core, the words of all names in it, as in `latent_bytes` and `LatentStore`."""
    found = {}
    for folder in CORE:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            with tokenize.open(path) as file:
                names = {one.string for one in tokenize.generate_tokens(file.readline) if one.type == tokenize.NAME}
            parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", " ".join(names))
            found[path.relative_to(PACKAGE).as_posix()] = {part.lower() for part in parts}
    return found


def check_bound(name: str, count: int, bound: int) -> None:
    """Fails above the bound, and where the bound is so far above the count that it should be lowered to it."""
    assert count <= bound, f"{name}: {count}, and at most {bound} are allowed; take away as much as you add"
    assert count >= bound - max(2, bound // 50), f"{name}: {count}; lower the bound in {Path(__file__).name} to that"


def test_the_package_does_not_grow():
    sizes = [len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")]
    check_bound("files", len(sizes), BOUNDS["files"])
    check_bound("lines", sum(sizes), BOUNDS["lines"])


def test_functions_have_few_branches():
    counts = {
        f"{path}:{name}": branches(function)
        for path, tree in trees()
        for name, function in functions(tree)
        if not is_kernel(function)
    }
    over = {name: count for name, count in counts.items() if count > MOST_BRANCHES}
    assert not over, f"split these functions of more than {MOST_BRANCHES} branches: {over}"


@pytest.mark.parametrize("feature", FEATURES)
def test_features_do_not_spread(feature):
    pattern, bound = FEATURES[feature]
    files = [path for path, words in words_of_core().items() if any(re.fullmatch(pattern, one) for one in words)]
    check_bound(f"files of the core that know {feature}", len(files), bound)


def test_the_quick_list_names_tests():
    """`make quick` is not part of CI, and tests move."""
    for name in (one for kind in KINDS.values() for one in kind):
        file, _, test = name.partition("::")
        path = Path(__file__).parent / file
        assert path.exists(), f"tests/quick.py names {file}"
        assert f"def {test.partition('[')[0]}" in path.read_text(), f"tests/quick.py names {name}"


def test_the_counts_count():
    """On a small example, so that a fault in counting cannot look like a small house."""
    tree = ast.parse("class A:\n def f(self):\n  def g(): return [1 for _ in x if a and b or c]\n  if y: pass")
    assert [(name, branches(one)) for name, one in functions(tree)] == [("A.f", 4)]
