"""What the README shows works, and what it lists is what is tested."""

import re
from pathlib import Path

import torch

from .tiny_models import ARCHITECTURES

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_architectures_listed_are_the_tested_ones():
    listed = re.search(r"<!-- architectures -->\n(.*?)\n<!-- end architectures -->", README, re.DOTALL)[1]
    names = re.findall(r"\w+", re.sub(r"\(.*?\)", "", listed))
    assert names == sorted({model_type for model_type, _ in ARCHITECTURES.values()})


def test_the_examples_on_the_embedded_model_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    first = next(index for index, block in enumerate(blocks) if "load_embedded" in block)
    torch.manual_seed(0)
    names: dict = {}
    for block in blocks[first:]:
        exec(block, names)
    assert len(names["completions"]) == 8
    assert len(set(names["completions"])) > 1
    assert names["out"].shape[0] == 4


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (Path(__file__).parents[1] / target).exists(), target
