"""pass@k of the embedded model on the embedded tasks.

python -m hf_fastdecode.evals.embedded --n 32 --shots 3
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from hf_fastdecode.api import enabled
from hf_fastdecode.assets import Task as Record
from hf_fastdecode.assets import embedded_tasks, few_shot_prompt, fewshot_tasks, load_embedded
from hf_fastdecode.assets.prompt import DONE

from .pass_at_k import pass_at_k
from .records import Sample, Verdict
from .sandbox import Sandbox, choose
from .scoring import score
from .task import Task

KS: Final = (1, 8, 32)


def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    n: int,
    *,
    temperature: float = 0.8,
    top_p: float = 0.95,
    max_new_tokens: int = 128,
    prompts_per_batch: int = 4,
    progress: bool = True,
) -> list[list[str]]:
    """Draw n completions of each prompt; greedy when `temperature` is 0.

    Prompts are prefilled once and shared by their samples. Draws come from torch's global generator.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer, with left padding.
        prompts: texts.
        n: samples per prompt.
        prompts_per_batch: prompts decoded together; a batch has ``prompts_per_batch * n`` rows.

    Returns:
        Per prompt its n completions, special tokens left out.
    """
    completions: list[list[str]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # like lengths together: less padding
    greedy = {"do_sample": False}
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    batches = [order[start : start + prompts_per_batch] for start in range(0, len(order), prompts_per_batch)]
    with enabled(model):
        for batch in tqdm(batches, desc="sample", unit="batch", disable=not progress):
            encoded = tokenizer([prompts[index] for index in batch], return_tensors="pt", padding=True)
            inputs = {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask")}
            repeats = {"num_return_sequences": n} if temperature > 0 else {}
            out = model.generate(
                **inputs, max_new_tokens=max_new_tokens, **(sampling if temperature > 0 else greedy), **repeats
            )
            texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            per_prompt = repeats.get("num_return_sequences", 1)
            for row, text in enumerate(texts):
                completions[batch[row // per_prompt]] += [text] * (n // per_prompt)
    return completions


def verdicts(
    tasks: Sequence[Record], completions: Sequence[Sequence[str]], sandbox: Sandbox, *, progress: bool = True
) -> list[list[Verdict]]:
    """Run completions on their tasks' tests.

    Args:
        tasks: Of the package.
        completions: Per task, programs that end at the first ``[DONE]``.
        sandbox: Where they run.
        progress: Show a tqdm bar.

    Returns:
        Per task its completions' verdicts.
    """
    known = {str(task["task_id"]): _as_task(task) for task in tasks}
    samples = [
        Sample(task_id, index, text.partition(DONE)[0])
        for task_id, texts in zip(known, completions, strict=True)
        for index, text in enumerate(texts)
    ]
    found = iter(score(known, samples, sandbox=sandbox, progress=progress))
    return [[next(found) for _ in texts] for texts in completions]


def measure(
    tasks: Sequence[Record], completions: Sequence[Sequence[str]], sandbox: Sandbox, *, progress: bool = True
) -> list[int]:
    """How many completions of each task pass its tests; arguments as for `verdicts`."""
    return [sum(one.passed for one in found) for found in verdicts(tasks, completions, sandbox, progress=progress)]


def _as_task(record: Record) -> Task:
    return Task(
        task_id=str(record["task_id"]),
        language="python",
        description=record["text"],
        stem="",
        tests=tuple(record["test_list"]),
        setup=record["test_setup_code"],
        reference=record["code"],
    )


def table(passed: Sequence[int], n: int) -> dict[str, float]:
    """Mean pass@k over tasks for each k of `KS` that n allows."""
    return {f"pass@{k}": sum(pass_at_k(n, c, k) for c in passed) / len(passed) for k in KS if k <= n}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the body from a seed and leave torch's generators as they were."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def main() -> None:
    """Command line."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=32, help="samples per task")
    parser.add_argument("--shots", type=int, default=3, help="solved examples before the task")
    parser.add_argument("--limit", type=int, help="only the first tasks")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 for greedy")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4, help="prompts per batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, help="a checkpoint folder in place of the embedded model")
    parser.add_argument("--tasks", type=Path, help="a JSONL file in place of the embedded tasks")
    parser.add_argument("--json", type=Path, help="write the figures and the passes per task there")
    args = parser.parse_args()
    sandbox = choose()
    model, tokenizer = _load(args.model, args.device)
    tasks = _read_tasks(args.tasks) if args.tasks else embedded_tasks()
    tasks = tasks[: args.limit]
    prompts = [few_shot_prompt(task, fewshot_tasks()[: args.shots]) for task in tasks]
    start = time.perf_counter()
    with seeded(args.seed):
        completions = sample(
            model,
            tokenizer,
            prompts,
            args.n,
            temperature=args.temperature,
            top_p=args.top_p,
            prompts_per_batch=args.batch,
        )
    drawn = time.perf_counter()
    passed = measure(tasks, completions, sandbox)
    figures = table(passed, args.n)
    length = sum(len(ids) for ids in tokenizer(prompts).input_ids) / len(prompts)
    print(f"{len(tasks)} tasks, n = {args.n}, {args.shots} shots, {length:.0f} prompt tokens on average")
    print(f"sampling {drawn - start:.1f} s, checking {time.perf_counter() - drawn:.1f} s")
    for name, value in figures.items():
        print(f"{name:>8} {value:.3f}")
    if args.json:
        record = {
            "n": args.n,
            "shots": args.shots,
            **figures,
            "passed": {task["task_id"]: c for task, c in zip(tasks, passed, strict=True)},
        }
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps(record))
        os.replace(partial, args.json)


def _load(path: Path | None, device: str) -> tuple[Any, Any]:
    import torch

    if path is None:
        return load_embedded(torch.float32, device)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(path)


def _read_tasks(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
