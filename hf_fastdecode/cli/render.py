"""What the commands found, as tables and lines for a person."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from .completions import Completion
from .console import bytes_text
from .demo import Candidate, Demo, Side
from .generate import Generated


def demo_text(demo: Demo, *, machine: str, model: str, best: int) -> RenderableType:
    """The demo's two calls side by side, then its best completions."""
    title = (
        f"{demo.samples} completions of one prompt: {demo.prompt_length:,} tokens ({demo.shots} solved examples and "
        f"task {demo.task['task_id']})"
    )
    closing = Text(
        f"{model}, float32, {machine}; one timed call each, after a tiny one to warm up. "
        f"Both calls drew the same {demo.drawn_tokens:,} tokens from the same seed."
    )
    if demo.shared.path != "shared":
        closing.append(f"\nhf_fastdecode ran this call stock: {demo.shared.reason}.", style="yellow")
    heading = Text.assemble(
        "\n",
        (f"Task {demo.task['task_id']}", "bold"),
        f": {demo.task['text']}\n",
        *(f"  {test}\n" for test in demo.task["test_list"]),
        "\n",
        (f"The tests were not run: {demo.not_tested}.\n", "yellow") if demo.not_tested else _passing(demo),
        "The best by mean log-probability:",
    )
    return Group(_sides(demo, title), closing, heading, _candidates(demo.candidates[:best]))


def _passing(demo: Demo) -> str:
    distinct = sum(candidate.passed for candidate in demo.candidates)
    return (
        f"{demo.passing} of {demo.samples} completions pass its tests, {distinct} of the {len(demo.candidates)} "
        "distinct ones. "
    )


def _sides(demo: Demo, title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("stock transformers", "hf_fastdecode", "stock / ours"):
        table.add_column(name, justify="right")

    def add(label: str, value: Callable[[Side], float], text: Callable[[float], str], style: str = "") -> None:
        stock, ours = value(demo.stock), value(demo.shared)
        table.add_row(label, text(stock), text(ours), f"{stock / ours:.1f}x", style=style)

    add("prompt tokens prefilled", lambda side: side.prompt_tokens, "{:,}".format)
    add("KV cache at the end", lambda side: side.kv_bytes, bytes_text)
    add("to the first token", lambda side: side.first_token_s, "{:.2f} s".format)
    if demo.steps > 1:
        steps = f"the {demo.steps - 1} steps after it"
        add(steps, lambda side: side.total_s - side.first_token_s, "{:.2f} s".format)
    add("total", lambda side: side.total_s, "{:.2f} s".format, style="bold")
    return table


def _candidates(candidates: list[Candidate]) -> Table:
    table = Table(show_lines=True)
    for name in ("#", "mean log-p", "drawn"):
        table.add_column(name, justify="right")
    table.add_column("tests", max_width=24)
    table.add_column("completion", ratio=1)
    for rank, candidate in enumerate(candidates, 1):
        table.add_row(
            str(rank),
            f"{candidate.completion.mean_logp:.3f}",
            f"{candidate.count}x",
            _tested(candidate),
            Syntax(_printable(candidate.completion.text.strip("\n")), "python", theme="ansi_dark", word_wrap=True),
        )
    return table


def _tested(candidate: Candidate) -> Text:
    verdict = candidate.verdict
    if verdict is None:
        return Text("not run", style="yellow")
    return Text("pass", style="green") if verdict.passed else Text(f"{verdict.status}: {verdict.detail}", style="red")


def completion_heading(completion: Completion) -> str:
    """One line that stands before a completion's text."""
    return (
        f"--- prompt {completion.prompt}, sample {completion.sample}: {_count(completion.tokens, 'token')}, "
        f"mean log-p {completion.mean_logp:.3f}, ended by {completion.finish}"
    )


def summary(generated: Generated, *, machine: str, dtype: str) -> str:
    """One line about a `generate` call."""
    tokens = sum(completion.tokens for completion in generated.completions)
    call = generated.report.last_call if generated.report is not None else None
    path = "stock transformers, as asked" if call is None else f"{call.path} ({call.reason})"
    return (
        f"{_count(len(generated.completions), 'completion')}, {_count(tokens, 'token')} in {generated.seconds:.2f} s; "
        f"{path}; "
        f"{dtype}, {machine}"
    )


def _printable(text: str) -> str:
    """Without characters that would move the cursor."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
