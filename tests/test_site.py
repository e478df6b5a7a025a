"""What tools/site.py makes of the repository's files; `make docs` builds the site itself, and checks its links."""

import re

import hf_fastdecode
from tools import site

from .test_readme import ROOT


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
