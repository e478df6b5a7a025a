"""What the README and other pages show works."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import hf_fastdecode
import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from tools import reasons, site
from tools.notebook import NOTEBOOK, run, sources, with_outputs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def run_examples(page: str) -> dict:
    """Run a page's examples from the first one on the embedded model on."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    first = next(index for index, block in enumerate(blocks) if "load_embedded" in block)
    torch.manual_seed(0)
    names: dict = {}
    for block in blocks[first:]:
        exec(block.replace(", cache=", f", {CACHE}="), names)
    return names


def test_the_examples_on_the_embedded_model_run(capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which would let kernels run on the CPU
    names = run_examples("README.md")
    options = (ROOT / "docs/options.md").read_text()
    shown = re.search(r"```text\n(LlamaForCausalLM: enabled.*?)```", options, re.DOTALL)[1]
    printed = capsys.readouterr().out
    assert without_numbers(shown) in without_numbers(printed), (
        "the quickstart of README.md prints another report than the ```text block of docs/options.md shows; numbers "
        f"do not matter. Replace the block by:\n{printed[printed.find('LlamaForCausalLM: enabled') :]}"
    )
    assert len(names["samples"]) == 8, "the quickstart of README.md asks for another number of samples; say 8"
    assert len({tuple(row) for row in names["samples"].tolist()}) > 1


def test_readme_is_short():
    """Two screens: about 1,800 pixels at GitHub's width, of which a line of text has 24 and one of code 20."""
    assert len(README.splitlines()) <= 90
    assert README.index("fd.enable(model)  #") < 2500


def test_readme_names_the_version():
    assert f"Version {fd.__version__}," in README


def test_the_example_of_scoring_runs():
    report = fd.explain(run_examples("docs/scoring.md")["model"]).last_forward
    assert report.path == "shared"
    assert report.computed < report.tokens / 3


def test_the_example_of_a_kept_cache_runs():
    names = run_examples("docs/kept-caches.md")
    assert names["out"].shape[0] == 4
    used = sum(fd.explain(names["model"]).last_call.known_tokens)
    assert used > names["inputs"]["input_ids"].shape[1] * 0.8  # of a prompt that was not prefilled


def test_the_example_of_a_slim_model_runs():
    names = run_examples("docs/slim.md")  # which compares with stock
    assert "SlimLlamaForCausalLM" in repr(type(names["slim"]))


def test_the_examples_of_further_slim_pages_run():
    names = run_examples("docs/slim-measurements.md")
    assert names["slim"].config.slim_sparsity_threshold == 0
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/slim-architectures.md").read_text(), re.DOTALL)
    exec(blocks[0], {})  # which compares with stock; the other reads a sound


def without_numbers(text: str) -> str:
    return " ".join(re.sub(r"[\d,]+", "#", text).split())


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/results/README.md",
    *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    page = ROOT / page
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        assert (page.parent / target).exists(), f"edit {page}: it links to {target}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", ((page.parent / target) if target else page).read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"edit {page}: {target or page.name} has no heading #{anchor}, only {anchors}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/how-it-works.md", "docs/details.md"])
def test_files_and_folders_named_are_there(page):
    package = ROOT / "hf_fastdecode"
    files = {path.name for folder in (package, ROOT / "benchmarks") for path in folder.rglob("*.py")}
    named = re.findall(r"`([\w./-]+(?:\.py|/))`", (ROOT / page).read_text())
    assert len(named) > 20
    missing = [one for one in named if not ((ROOT / one).exists() or (package / one).exists() or one in files)]
    assert not missing, f"edit {page}: it names files that are not there: {', '.join(missing)}"


COMMITTED = json.loads(NOTEBOOK.read_text())
REMEDY = "run python -m tools.notebook"


def test_the_notebook_prints_what_is_committed(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which would let kernels run on the CPU
    cells = [
        cell.replace(", cache=", f", {CACHE}=").replace("out.cache", f"out.{CACHE}") for cell in sources(COMMITTED)
    ]
    printed = run(cells)
    committed = ["".join(cell["outputs"][0]["text"]) for cell in COMMITTED["cells"] if cell.get("outputs")]
    first, *others = ([without_numbers(text) for text in texts] for texts in zip(printed, committed, strict=True))
    assert first[0].startswith("# samples of a prompt of # tokens"), REMEDY  # and a sample, which rounding may change
    for found, expected in others:
        assert found == expected, REMEDY


def test_outputs_are_of_their_cells():
    notebook = {
        "cells": [{"cell_type": kind, "source": [text]} for kind, text in (("markdown", "#"), ("code", "1 + 1"))]
    }
    words, code = with_outputs(notebook, run(sources(notebook)))["cells"]
    assert "outputs" not in words
    assert code["outputs"][0]["text"] == ["2\n"]
    with pytest.raises(ZeroDivisionError):
        run(["1 / 0"])


def test_links_lead_to_pages():
    text = "[a](docs/rl.md) [b](CONTRIBUTING.md#check) [c](hf_fastdecode/api.py) [d](https://x.y) [e](#here)"
    expected = "[a](rl.md) [b](contributing.md#check) c [d](https://x.y) [e](#here)"
    assert site.rewritten(text, "README.md") == expected
    pictures = "![p](eval-embedded.png) [m](../../docs/quickstart.ipynb)"
    assert (
        site.rewritten(pictures, f"{site.RESULTS}/README.md") == "![p](results/eval-embedded.png) [m](quickstart.md)"
    )


def test_a_notebook_is_a_page():
    code = {"cell_type": "code", "source": ["1 + 1"], "outputs": [{"text": ["2\n"]}]}
    words = {"cell_type": "markdown", "source": ["# Sums\n", "and more"]}
    expected = "# Sums\nand more\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n"
    assert site.from_notebook({"cells": [words, code]}) == expected


def test_the_reference_has_the_public_names():
    assert sorted(re.findall(r"::: hf_fastdecode\.(\w+)", site.reference())) == sorted(hf_fastdecode.__all__)


def test_the_site_lists_every_page():
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert listed == pages | {*site.PAGES.values(), "api.md"}


def test_the_index_lists_every_page():
    index = (ROOT / "docs/README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", index))


PAGE = reasons.PAGE.read_text()


def test_the_page_has_the_reasons_of_the_source():
    assert reasons.refreshed(PAGE) == PAGE, "run python -m tools.reasons"


def test_every_reason_has_a_subject():
    lost = {reason.file for reason in reasons.reasons() if reasons.subject_of(reason) is None}
    assert lost <= {"generation/call_context.py"}, "name these files in SUBJECTS of tools/reasons.py"
    assert len(reasons.reasons()) > 100


def test_texts_are_quoted_as_the_source_has_them():
    by_hand = PAGE.partition("## All reasons")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", by_hand, re.MULTILINE)
    assert len(quoted) > 10
    source = " \n".join(reasons.templates()).replace("%d", "…")
    for text in quoted:
        for piece in text.split("…"):
            assert piece.strip() in source, text


def test_reasons_are_read_with_their_values_left_out():
    texts = {reason.text: reason.remedy for reason in reasons.reasons()}
    assert texts["attention dropout is …, and decoding needs 0"] == "call model.eval()"
    assert "use_cache=False" in texts
