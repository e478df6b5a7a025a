"""Hooks of mkdocs, which make the site of mkdocs.yml from the pages as they are in the repository.

README, CONTRIBUTING, CHANGELOG, the measurements, the notebook and a reference of the public names become pages; links
between them are rewritten, and links to other files of the repository become plain text. Runs without the package.
"""

from __future__ import annotations

import ast
import json
import os.path
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = "benchmarks/results"
PAGES: Final = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "docs/quickstart.ipynb": "quickstart.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    f"{RESULTS}/README.md": "measurements.md",
}
"""Files of the repository and their pages; other pages of docs/ keep their names."""
_LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)([^)#\s]*)(#[^)\s]+)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made, and the pictures that are not in docs/."""
    from mkdocs.structure.files import File  # here, since tests of the other functions run without mkdocs

    for name in ("README.md", "quickstart.ipynb"):
        if (file := files.get_file_from_path(name)) is not None:
            files.remove(file)
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        text = from_notebook(json.loads(text)) if source.endswith(".ipynb") else text
        files.append(File.generated(config, page, content=rewritten(text, source)))
    files.append(File.generated(config, "api.md", content=reference()))
    for picture in sorted((ROOT / RESULTS).glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of pages that lie in docs/."""
    uri = page.file.src_uri
    made = uri == "api.md" or uri in PAGES.values()
    return markdown if made else rewritten(markdown, f"docs/{uri}")


def rewritten(text: str, source: str) -> str:
    """A page's text with links of the site: `source` is its file in the repository."""

    def link(match: re.Match[str]) -> str:
        picture, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target:
            return match[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        if path.startswith(RESULTS) and path.endswith(".png"):
            path = f"results/{os.path.basename(path)}"
        elif path in PAGES:
            path = PAGES[path]
        elif path.startswith("docs/"):
            path = path.removeprefix("docs/")
        elif (ROOT / path).exists():
            return words  # such as a source file
        return f"{picture}[{words}]({path}{anchor})"

    return _LINK.sub(link, text).replace('"docs/pictures/', '"pictures/')


def from_notebook(notebook: dict[str, Any]) -> str:
    """The cells and outputs of a notebook as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        outputs = ["".join(output["text"]).strip() for output in cell.get("outputs", [])]
        parts += [f"```text\n{output}\n```" for output in outputs]
    return "\n\n".join(parts) + "\n"


def reference() -> str:
    """A directive for each public name, as ``__all__`` has them."""
    tree = ast.parse((ROOT / "hf_fastdecode" / "__init__.py").read_text())
    assigned = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    )
    names = sorted(ast.literal_eval(assigned), key=lambda name: (not name[0].islower(), name))
    head = "# Reference\n\nThe names of `import hf_fastdecode as fd`: functions, then classes.\n\n"
    return head + "\n".join(f"::: hf_fastdecode.{name}\n" for name in names)
