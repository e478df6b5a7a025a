"""The run of `demo`: the same completions with stock transformers and with shared context, ranked and tested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from torch import Tensor

from hf_fastdecode.api import enabled, explain
from hf_fastdecode.assets import DONE, Task, few_shot_prompt
from hf_fastdecode.cache.shared import cache_bytes
from hf_fastdecode.evals.records import Sample, Verdict
from hf_fastdecode.evals.sandbox import SandboxError, choose
from hf_fastdecode.evals.scoring import score
from hf_fastdecode.evals.tasks import load_tasks

from ..measurement.calls import Drawn, counted_tokens, end_tokens_of
from .console import FailedCheck, bytes_text, progress_bar
from .models import Completion, check_memory, draw, encode, read_completions
from .options import Sampling

_WARM_UP: Final = Sampling(n=2, max_new_tokens=2)


@dataclass(frozen=True)
class Side:
    path: str  # "stock" or "shared"
    reason: str  # why this path
    prompt_tokens: int  # that went through the embedding layer until the logits of the first token
    kv_bytes: int  # at the end of the call, with what is allocated for them
    drawn: Drawn  # without its cache


@dataclass(frozen=True)
class Demo:
    stock: Side
    shared: Side
    completions: list[Completion]  # best mean log-probability first
    verdicts: dict[str, Verdict]  # of the task's tests, by text; empty where they were not run
    not_tested: str  # why they were not, with the remedy; else empty


def run_demo(model: Any, tokenizer: Any, task: Task, sampling: Sampling, *, shots: int) -> Demo:
    """Draw the same completions twice, compare them, rank them and run the task's tests on them."""
    inputs = encode(model, tokenizer, [few_shot_prompt(task, shots)], sampling.max_new_tokens)
    check_memory(model, inputs["input_ids"], sampling, shared=False)
    few = {name: tensor[:, -256:] for name, tensor in inputs.items()}
    draw(model, few, _WARM_UP)  # so that neither time includes set-up of the process
    with enabled(model):
        draw(model, few, _WARM_UP)
    with progress_bar("stock transformers", sampling.max_new_tokens) as on_step:
        stock = _side(model, inputs, sampling, on_step)
    with progress_bar("hf_fastdecode", sampling.max_new_tokens) as on_step, enabled(model):
        shared = _side(model, inputs, sampling, on_step)
        if (call := explain(model).last_call) is not None:
            shared = replace(shared, path=call.path, reason=call.reason)
    check_same(stock.drawn.sequences, shared.drawn.sequences, stock.drawn.prompt_length)
    completions = read_completions(shared.drawn, tokenizer, sampling, end_tokens=end_tokens_of(model))
    completions.sort(key=lambda completion: -completion.mean_logp)
    return Demo(stock, shared, completions, *judged([completion.text for completion in completions], task))


def check_same(stock: Tensor, shared: Tensor, prompt_length: int) -> None:
    """Raise `FailedCheck` if two calls drew different tokens ``[rows, length]`` after a prompt of this length."""
    if torch.equal(stock, shared):
        return
    length = min(stock.shape[1], shared.shape[1])
    differing = (stock[:, :length] != shared[:, :length]).nonzero()
    row, column = differing[0].tolist() if len(differing) else (0, length)
    raise FailedCheck(
        f"stock and shared drew different tokens, first in completion {row} at token {column - prompt_length}; "
        "in float32 this is a bug of hf_fastdecode, please report it with the output of hf-fastdecode --version"
    )


def _side(model: Any, inputs: dict[str, Tensor], sampling: Sampling, on_step: Callable[[int], None]) -> Side:
    until_first = 0

    def step(drawn: int) -> None:
        nonlocal until_first
        until_first = until_first or sum(counted)
        on_step(drawn)

    with counted_tokens(model.get_input_embeddings()) as counted:
        drawn = draw(model, inputs, sampling, on_step=step)
    # The larger of the two caches need not stand beside the other.
    return Side("stock", "", until_first, cache_bytes(drawn.cache), replace(drawn, cache=None))


def judged(texts: Sequence[str], task: Task) -> tuple[dict[str, Verdict], str]:
    """Verdicts of a task's tests by text, or the reason why there are none."""
    try:
        (known,) = load_tasks(task_ids=[task["task_id"]]).tasks
        samples = [Sample(known.task_id, index, text.partition(DONE)[0]) for index, text in enumerate(texts)]
        return dict(zip(texts, score({known.task_id: known}, samples, sandbox=choose()))), ""
    except SandboxError as error:
        return {}, str(error)


def demo_text(demo: Demo, task: Task, shots: int, *, machine: str, model: str, best: int) -> RenderableType:
    title = (
        f"{len(demo.completions)} completions of one prompt: {demo.shared.drawn.prompt_length:,} tokens ({shots} "
        f"solved examples and task {task['task_id']})"
    )
    closing = Text(
        f"{model}, float32, {machine}; one timed call each, after a tiny one to warm up. Both calls drew the same "
        f"{sum(completion.tokens for completion in demo.completions):,} tokens from the same seed."
    )
    if demo.shared.path != "shared":
        closing.append(f"\nhf_fastdecode ran this call stock: {demo.shared.reason}.", style="yellow")
    counts = Counter(completion.text for completion in demo.completions)
    passing = [text for text, verdict in demo.verdicts.items() if verdict.passed]
    heading = Text.assemble(
        "\n",
        (f"Task {task['task_id']}", "bold"),
        f": {task['text']}\n",
        *(f"  {test}\n" for test in task["test_list"]),
        "\n",
        (f"The tests were not run: {demo.not_tested}.\n", "yellow")
        if demo.not_tested
        else f"{sum(counts[text] for text in passing)} of {len(demo.completions)} completions pass its tests, "
        f"{len(passing)} of the {len(counts)} distinct ones. ",
        "The best by mean log-probability:",
    )
    candidates = Table(show_lines=True)
    for name in ("#", "mean log-p", "drawn"):
        candidates.add_column(name, justify="right")
    candidates.add_column("tests", max_width=24)
    candidates.add_column("completion", ratio=1)
    firsts = {completion.text: completion for completion in reversed(demo.completions)}
    for rank, text in enumerate(list(counts)[:best], 1):
        code = Syntax(_printable(text.strip("\n")), "python", theme="ansi_dark", word_wrap=True)
        log_p = f"{firsts[text].mean_logp:.3f}"
        candidates.add_row(str(rank), log_p, f"{counts[text]}x", _shown(demo.verdicts.get(text)), code)
    return Group(_sides(demo, title), closing, heading, candidates)


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
    add("to the first token", lambda side: side.drawn.first_token_s, "{:.2f} s".format)
    if (steps := demo.shared.drawn.log_probs.shape[1]) > 1:  # per row, with padding after the end
        rest = f"the {steps - 1} steps after it"
        add(rest, lambda side: side.drawn.total_s - side.drawn.first_token_s, "{:.2f} s".format)
    add("total", lambda side: side.drawn.total_s, "{:.2f} s".format, style="bold")
    return table


def _shown(verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text("not run", style="yellow")
    return Text("pass", style="green") if verdict.passed else Text(f"{verdict.status}: {verdict.detail}", style="red")


def _printable(text: str) -> str:
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
