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
    first_token_s: float  # until the logits of the first token
    total_s: float


@dataclass(frozen=True)
class Candidate:
    completion: Completion  # of the equal ones, that with the highest mean log-probability
    count: int  # samples with this text
    verdict: Verdict | None  # of the task's tests; None where they were not run

    @property
    def passed(self) -> bool:
        return self.verdict is not None and self.verdict.passed


@dataclass(frozen=True)
class Demo:
    task: Task
    shots: int  # solved examples in the prompt
    prompt_length: int
    steps: int  # tokens drawn per row, with padding after the end
    drawn_tokens: int  # of all completions, without that padding
    stock: Side
    shared: Side
    candidates: list[Candidate]  # best mean log-probability first
    not_tested: str  # why the tests were not run, with the remedy; empty where they were

    @property
    def samples(self) -> int:
        return sum(candidate.count for candidate in self.candidates)

    @property
    def passing(self) -> int:
        return sum(candidate.count for candidate in self.candidates if candidate.passed)


def run_demo(model: Any, tokenizer: Any, task: Task, sampling: Sampling, *, shots: int) -> Demo:
    """Draw the same completions twice, compare them, rank them and run the task's tests on them."""
    inputs = encode(model, tokenizer, [few_shot_prompt(task, shots)], sampling.max_new_tokens)
    check_memory(model, inputs["input_ids"], sampling, shared=False)
    _warm_up(model, inputs)
    with progress_bar("stock transformers", sampling.max_new_tokens) as on_step:
        stock, prompt_tokens = _counted(model, inputs, sampling, on_step)
        stock_side = _side("stock", "transformers as it is", prompt_tokens, stock)
    stock = replace(stock, cache=None)  # the larger of the two caches need not stand beside the other
    with progress_bar("hf_fastdecode", sampling.max_new_tokens) as on_step, enabled(model):
        shared, prompt_tokens = _counted(model, inputs, sampling, on_step)
        call = explain(model).last_call
        shared_side = _side(call.path if call else "stock", call.reason if call else "", prompt_tokens, shared)
    check_same(stock.sequences, shared.sequences, stock.prompt_length)
    completions = read_completions(shared, tokenizer, sampling, end_tokens=end_tokens_of(model))
    candidates, not_tested = _rank(completions, task)
    return Demo(
        task=task,
        shots=shots,
        prompt_length=shared.prompt_length,
        steps=shared.log_probs.shape[1],
        drawn_tokens=sum(completion.tokens for completion in completions),
        stock=stock_side,
        shared=shared_side,
        candidates=candidates,
        not_tested=not_tested,
    )


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


def _warm_up(model: Any, inputs: dict[str, Tensor]) -> None:
    """Run a tiny call of each kind, so that neither time includes set-up of the process."""
    few = {name: tensor[:, -256:] for name, tensor in inputs.items()}
    draw(model, few, _WARM_UP)
    with enabled(model):
        draw(model, few, _WARM_UP)


def _counted(
    model: Any, inputs: dict[str, Tensor], sampling: Sampling, on_step: Callable[[int], None]
) -> tuple[Drawn, int]:
    """A call, and the tokens that went through the embedding layer until its first logits."""
    until_first = 0

    def step(drawn: int) -> None:
        nonlocal until_first
        until_first = until_first or sum(counted)
        on_step(drawn)

    with counted_tokens(model.get_input_embeddings()) as counted:
        drawn = draw(model, inputs, sampling, on_step=step)
    return drawn, until_first


def _side(path: str, reason: str, prompt_tokens: int, drawn: Drawn) -> Side:
    return Side(path, reason, prompt_tokens, cache_bytes(drawn.cache), drawn.first_token_s, drawn.total_s)


def _rank(completions: Sequence[Completion], task: Task) -> tuple[list[Candidate], str]:
    """The distinct texts, best mean log-probability first, with verdicts or the reason why there are none."""
    counts = Counter(completion.text for completion in completions)
    best: dict[str, Completion] = {}
    for completion in sorted(completions, key=lambda completion: -completion.mean_logp):
        best.setdefault(completion.text, completion)
    distinct = list(best.values())
    found: Sequence[Verdict | None] = [None] * len(distinct)
    not_tested = ""
    try:
        (known,) = load_tasks(task_ids=[task["task_id"]]).tasks
        samples = [
            Sample(known.task_id, index, completion.text.partition(DONE)[0])
            for index, completion in enumerate(distinct)
        ]
        found = score({known.task_id: known}, samples, sandbox=choose())
    except SandboxError as error:
        not_tested = str(error)
    candidates = [
        Candidate(completion, counts[completion.text], verdict)
        for completion, verdict in zip(distinct, found, strict=True)
    ]
    return candidates, not_tested


def demo_text(demo: Demo, *, machine: str, model: str, best: int) -> RenderableType:
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
    distinct = sum(candidate.passed for candidate in demo.candidates)
    heading = Text.assemble(
        "\n",
        (f"Task {demo.task['task_id']}", "bold"),
        f": {demo.task['text']}\n",
        *(f"  {test}\n" for test in demo.task["test_list"]),
        "\n",
        (f"The tests were not run: {demo.not_tested}.\n", "yellow")
        if demo.not_tested
        else f"{demo.passing} of {demo.samples} completions pass its tests, {distinct} of the {len(demo.candidates)} "
        "distinct ones. ",
        "The best by mean log-probability:",
    )
    return Group(_sides(demo, title), closing, heading, _candidates(demo.candidates[:best]))


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


def _printable(text: str) -> str:
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
