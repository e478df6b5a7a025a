"""The report as one HTML page that needs nothing else: styles and pictures are inside, nothing is fetched."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from html import escape
from typing import Final

from .build import Report
from .words import accuracy_table, growth_lines, latency_tables, status_line, task_table

PAGE: Final = "report.html"

# The policy has a browser refuse to fetch anything, whatever a task's name might smuggle in.
_HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #202124; background: #fff; max-width: 68rem; margin: 2rem auto;
  padding: 0 1rem }}
h1 {{ font-size: 1.4rem }}
h2 {{ font-size: 1.1rem; margin-top: 2rem }}
img {{ max-width: 100%; height: auto }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.87rem }}
th, td {{ padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #e0e0e0; white-space: nowrap }}
th:first-child, td:first-child {{ text-align: left }}
.note {{ background: #fef7e0; padding: 0.3rem 0.6rem; margin: 0.3rem 0 }}
pre {{ background: #f5f5f5; padding: 0.6rem; overflow-x: auto; font-size: 0.82rem }}
</style>
</head>
<body>
"""


def page(found: Report, pictures: Mapping[str, bytes]) -> str:
    """The page's text; pictures are PNG bytes by what they show."""
    accuracy = found.accuracy
    parts = [_HEAD.format(title=escape(found.title)), f"<h1>{escape(found.title)}</h1>\n"]
    parts += [f'<p class="note">{escape(note)}</p>\n' for note in found.notes]
    for name, picture in pictures.items():
        source = b64encode(picture).decode()
        parts.append(f'<p><img alt="{escape(name)}" src="data:image/png;base64,{source}"></p>\n')
    if accuracy is not None:
        m = accuracy.m
        parts += [
            "<h2>Accuracy</h2>\n",
            "<p>pass@n: some of n samples passes its tests."
            + (f" pass@top{m}: one of the {m} best-ranked distinct samples passes." if m is not None else "")
            + " Means over all subsets of n samples of each task's pool, with 95 % bootstrap intervals over tasks in "
            "brackets; ± is the standard error of an estimate by Monte Carlo.</p>\n",
            *_table(*accuracy_table(accuracy)),
            f"<p>{escape(status_line(accuracy))}</p>\n",
        ]
    if found.latency:
        parts += [
            "<h2>Latency</h2>\n",
            "<p>Medians over prompts, each in a call of its own, measured apart from the samples that were scored. "
            "Accuracy and latency are joined by n only; within a time budget, the most accurate n whose last sample "
            "is in time counts.</p>\n",
            *(
                part
                for device, cells in latency_tables(found).items()
                for part in (f"<h3>{escape(device)}</h3>\n", *_table(*cells))
            ),
            *(f"<p>{escape(line)}</p>\n" for line in growth_lines(found)),
        ]
    if accuracy is not None:
        parts += ["<h2>Tasks</h2>\n", *_table(*task_table(accuracy))]
    settings = json.dumps(found.settings, indent=1, ensure_ascii=False)
    parts += ["<h2>Settings</h2>\n", f"<pre>{escape(settings)}</pre>\n", "</body>\n</html>\n"]
    return "".join(parts)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"

    return ['<div class="wide"><table>\n', line(head, "th"), *(line(row, "td") for row in rows), "</table></div>\n"]
