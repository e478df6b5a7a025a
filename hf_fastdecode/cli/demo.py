"""`hf-fastdecode demo`: one few-shot task, many completions, stock and shared side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hf_fastdecode.api import enabled, explain
from hf_fastdecode.assets import Task, few_shot_prompt
from hf_fastdecode.assets.prompt import DONE
from hf_fastdecode.cache.shared import cache_bytes
from hf_fastdecode.evals.records import Sample, Verdict
from hf_fastdecode.evals.sandbox import SandboxError, choose
from hf_fastdecode.evals.scoring import score
from hf_fastdecode.evals.tasks import load_tasks

from ..errors import CommandError
from ..measurement.draw import Drawn, end_tokens_of
from .completions import Completion, draw, encode, read_completions
from .memory import check_memory
from .sampling import Sampling

_WARM_UP: Final = Sampling(n=2, max_new_tokens=2)

# Opens a progress bar of this title over so many steps, and gives the function that moves it.
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Side:
    """One of the two `generate` calls.

    Attributes:
        path: ``stock`` or ``shared``.
        reason: Why this path.
        prompt_tokens: Tokens that went through the embedding layer until the logits of the first token.
        kv_bytes: Bytes of the keys and values at the end of the call, with what is allocated for them.
        first_token_s: Seconds until the logits of the first token.
        total_s: Seconds of the call.
    """

    path: str
    reason: str
    prompt_tokens: int
    kv_bytes: int
    first_token_s: float
    total_s: float


@dataclass(frozen=True)
class Candidate:
    """A distinct completion.

    Attributes:
        completion: One of the equal completions, the one with the highest mean log-probability.
        count: How many samples have this text.
        verdict: Of the task's tests; None where they were not run.
    """

    completion: Completion
    count: int
    verdict: Verdict | None

    @property
    def passed(self) -> bool:
        """Whether all tests were run and passed."""
        return self.verdict is not None and self.verdict.passed


@dataclass(frozen=True)
class Demo:
    """What the demo found.

    Attributes:
        task: The task, in MBPP's schema.
        shots: Solved examples in the prompt.
        prompt_length: In tokens.
        steps: Tokens drawn per row, with padding behind the end.
        drawn_tokens: Tokens of all completions, without that padding.
        stock: Stock transformers.
        shared: With hf_fastdecode.
        candidates: The distinct completions, best mean log-probability first.
        not_tested: Why the tests were not run, with the remedy; empty where they were.
    """

    task: Task
    shots: int
    prompt_length: int
    steps: int
    drawn_tokens: int
    stock: Side
    shared: Side
    candidates: list[Candidate]
    not_tested: str

    @property
    def samples(self) -> int:
        """Completions drawn."""
        return sum(candidate.count for candidate in self.candidates)

    @property
    def passing(self) -> int:
        """Completions that pass the tests, equal ones counted each."""
        return sum(candidate.count for candidate in self.candidates if candidate.passed)


def run_demo(
    model: Any,
    tokenizer: Any,
    task: Task,
    sampling: Sampling,
    *,
    shots: int,
    bar: Bar = lambda title, steps: nullcontext(lambda step: None),
    check_progress: bool = False,
) -> Demo:
    """Draw the same completions twice, compare them, rank them and run the task's tests on them.

    Args:
        model: From `load_model`, in float32; it is enabled for its own call only.
        tokenizer: Its tokenizer.
        task: From `pick_tasks`.
        sampling: What to draw.
        shots: Solved examples before the task.
        bar: Shows progress.
        check_progress: Show a bar while the tests run.

    Raises:
        CommandError: The prompt is too long, the rows do not fit into memory, or the two calls drew different tokens
            (exit code 1).
    """
    inputs = encode(model, tokenizer, [few_shot_prompt(task, shots)], sampling.max_new_tokens)
    check_memory(model, inputs["input_ids"], sampling, shared=False)
    _warm_up(model, inputs)
    with bar("stock transformers", sampling.max_new_tokens) as on_step:
        stock, prompt_tokens = _counted(model, inputs, sampling, on_step)
        stock_side = _side("stock", "transformers as it is", prompt_tokens, stock)
    stock = replace(stock, cache=None)  # the larger of the two caches need not stand beside the other
    with bar("hf_fastdecode", sampling.max_new_tokens) as on_step, enabled(model):
        shared, prompt_tokens = _counted(model, inputs, sampling, on_step)
        call = explain(model).last_call
        shared_side = _side(call.path if call else "stock", call.reason if call else "", prompt_tokens, shared)
    check_same(stock.sequences, shared.sequences, stock.prompt_length)
    completions = read_completions(shared, tokenizer, sampling, end_tokens=end_tokens_of(model))
    candidates, not_tested = _rank(completions, task, check_progress)
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
    """Check that two calls drew the same tokens.

    Args:
        stock: ``[rows, length]`` ids.
        shared: ``[rows, length]`` ids.
        prompt_length: Tokens of the prompts.

    Raises:
        CommandError: They did not; the exit code is 1.
    """
    if torch.equal(stock, shared):
        return
    length = min(stock.shape[1], shared.shape[1])
    differing = (stock[:, :length] != shared[:, :length]).nonzero()
    row, column = differing[0].tolist() if len(differing) else (0, length)
    raise CommandError(
        f"stock and shared drew different tokens, first in completion {row} at token {column - prompt_length}; "
        "in float32 this is a bug of hf_fastdecode, please report it with the output of hf-fastdecode --version",
        exit_code=1,
    )


def _warm_up(model: Any, inputs: dict[str, Tensor]) -> None:
    """A tiny call of each kind: what happens once per process is in neither time."""
    few = {name: tensor[:, -256:] for name, tensor in inputs.items()}
    draw(model, few, _WARM_UP)
    with enabled(model):
        draw(model, few, _WARM_UP)


def _counted(
    model: Any, inputs: dict[str, Tensor], sampling: Sampling, on_step: Callable[[int], None]
) -> tuple[Drawn, int]:
    """A call, and the tokens that went through the embedding layer until its first logits."""
    until_first: list[int] = []
    with _embedded_tokens(model) as count:

        def step(drawn: int) -> None:
            if not until_first:
                until_first.append(count())
            on_step(drawn)

        drawn = draw(model, inputs, sampling, on_step=step)
    return drawn, until_first[0]


@contextmanager
def _embedded_tokens(model: Any) -> Iterator[Callable[[], int]]:
    total = 0

    def hook(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        total += arguments[0].numel()

    handle = model.get_input_embeddings().register_forward_hook(hook)
    try:
        yield lambda: total
    finally:
        handle.remove()


def _side(path: str, reason: str, prompt_tokens: int, drawn: Drawn) -> Side:
    return Side(path, reason, prompt_tokens, cache_bytes(drawn.cache), drawn.first_token_s, drawn.total_s)


def _rank(completions: Sequence[Completion], task: Task, progress: bool) -> tuple[list[Candidate], str]:
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
        found = score({known.task_id: known}, samples, sandbox=choose(), progress=progress)
    except SandboxError as error:
        not_tested = str(error)
    candidates = [
        Candidate(completion, counts[completion.text], verdict)
        for completion, verdict in zip(distinct, found, strict=True)
    ]
    return candidates, not_tested
