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


def test_the_embedded_example_runs():
    example = next(
        block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "load_embedded" in block
    )
    torch.manual_seed(0)
    names: dict = {}
    exec(example, names)
    assert len(names["completions"]) == 8
    assert len(set(names["completions"])) > 1


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (Path(__file__).parents[1] / target).exists(), target
