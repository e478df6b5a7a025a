"""lm-eval, evalplus and transformers' pipeline over a given model: each runs its own code and returns its samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, pipeline

from hf_fastdecode.assets import DONE, SEPARATOR, Task, embedded_tasks, few_shot_prompt, fewshot_tasks, task_prompt

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}


def lm_eval_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[Task],
    folder: Path,
    *,
    shots: int,
    batch_size: int,
    new_tokens: int,
    repeats: int = 1,
    until: tuple[str, ...] = (SEPARATOR,),
    **wrapper: Any,
) -> list[list[str]]:
    """Samples of ``lm_eval.simple_evaluate`` on a few-shot task read from local JSON, sampled when repeated.

    Args:
        model: Given to `HFLM`.
        tokenizer: Likewise.
        tasks: The problems, in MBPP's schema.
        folder: Where their JSON lies.
        shots: Solved examples in front of each.
        batch_size: As lm-eval takes it.
        new_tokens: Most tokens of a sample.
        repeats: Samples of each problem; one is greedy.
        until: Where samples end.
        wrapper: Further arguments of `HFLM`.

    Returns:
        For each problem its samples.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    task = _task(tasks, folder, shots=shots, new_tokens=new_tokens, repeats=repeats, until=until)
    evaluated = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **wrapper),
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),  # reading lm-eval's own thousands of tasks takes a minute
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(evaluated["samples"]["embedded"], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0] for sample in samples]


def write_task(folder: Path, tasks: list[Task], *, shots: int, new_tokens: int, repeats: int) -> None:
    """The same task as a file of a folder that lm-eval's command line includes; arguments as for `lm_eval_samples`."""
    folder.mkdir()
    task = _task(tasks, folder, shots=shots, new_tokens=new_tokens, repeats=repeats)
    (folder / "embedded.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML


def _task(
    tasks: list[Task],
    folder: Path,
    *,
    shots: int,
    new_tokens: int,
    repeats: int,
    until: tuple[str, ...] = (SEPARATOR,),
) -> dict[str, Any]:
    """lm-eval's description of a few-shot task, whose problems are written into the folder."""
    files = {"test": tasks, "train": fewshot_tasks()}
    for split, docs in files.items():
        text = "".join(json.dumps(_document(doc)) + "\n" for doc in docs)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    sampling = SAMPLING if repeats > 1 else {"do_sample": False}
    return {
        "task": "embedded",
        **_local_data(folder),
        "output_type": "generate_until",
        "num_fewshot": shots,
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "fewshot_delimiter": SEPARATOR,
        "repeats": repeats,
        "generation_kwargs": {"until": list(until), "max_gen_toks": new_tokens, **sampling},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def _local_data(folder: Path) -> dict[str, Any]:
    """Where lm-eval finds problems and examples in the folder's files."""
    return {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {split: str(folder / f"{split}.jsonl") for split in ("test", "train")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
    }


def lm_eval_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    problems: int,
    shots: int,
    batch_size: int,
    rolling: bool = False,
) -> tuple[dict[str, float], list[Any]]:
    """Metrics of ``lm_eval.simple_evaluate`` on a task of log-likelihoods read from local JSON, and those of samples.

    Args:
        model: Given to `HFLM`.
        tokenizer: Likewise.
        folder: Where the task's JSON lies.
        problems: How many; each has four solutions to choose from.
        shots: Solved examples in front of each.
        batch_size: As lm-eval takes it.
        rolling: Whether all of a text is scored, prompt and solution, in place of a choice.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for split, tasks in {"test": embedded_tasks()[:problems], "train": fewshot_tasks()}.items():
        text = "".join(json.dumps(document) + "\n" for document in _with_choices(tasks))
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    task = {
        "task": "scored",
        **_local_data(folder),
        "doc_to_text": "{{prompt}}",
        "target_delimiter": "",
        "fewshot_delimiter": SEPARATOR,
    }
    if rolling:
        names = ["word_perplexity", "byte_perplexity", "bits_per_byte"]
        task |= {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    else:
        names = ["acc", "acc_norm", "brier_score"]
        task |= {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "right"}
        task |= {"num_fewshot": shots}
    task |= {"metric_list": [{"metric": name} for name in names]}
    evaluated = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    scores = {name: value for name, value in evaluated["results"]["scored"].items() if isinstance(value, float)}
    samples = sorted(evaluated["samples"]["scored"], key=lambda sample: sample["doc_id"])
    return scores, [sample["filtered_resps"] for sample in samples]


def _with_choices(tasks: list[Task]) -> list[dict[str, Any]]:
    """Problems with their solutions: what the first test expects, among what the others and the next problem's do."""
    documents = []
    for task, following in zip(tasks, tasks[1:] + tasks[:1], strict=True):
        tests = [*task["test_list"], following["test_list"][0]]
        (asked, right), *others = (test.rsplit(" == ", 1) for test in tests)
        choices = sorted({right, *(value for _, value in others)})
        prompt = f"{task_prompt(task['text'], task['test_list'][1:])}{task['code']}\n{asked} == "
        documents.append(
            {"prompt": prompt, "choices": choices, "right": choices.index(right), "text": f"{prompt}{right}"}
        )
    return documents


def _document(task: Task) -> dict[str, str]:
    return {"prompt": task_prompt(task["text"], task["test_list"]), "answer": f"{task['code']}\n{DONE}"}


def evalplus_decoder(name: str | Path, *, samples: int, new_tokens: int) -> Any:
    """evalplus's decoder for transformers models, which loads by name; its model is ``.model``.

    Args:
        name: A folder.
        samples: Rows of a batch.
        new_tokens: Most tokens of a sample.
    """
    from evalplus.provider import make_model

    decoder = make_model(
        str(name),
        "hf",
        "mbpp",
        batch_size=samples,
        temperature=0.8,
        dtype="float32",
        force_base_prompt=True,
        attn_implementation="sdpa",
    )
    decoder.max_new_tokens = new_tokens
    return decoder


def evalplus_samples(decoder: Any, tasks: list[Task], *, shots: int, samples: int) -> list[list[str]]:
    """What evalplus's decoder generates for each problem, from one seed."""
    torch.manual_seed(0)
    return [decoder.codegen(few_shot_prompt(task, shots), do_sample=True, num_samples=samples) for task in tasks]


def pipeline_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[Task],
    *,
    shots: int,
    samples: int,
    new_tokens: int,
    batch_size: int = 1,
) -> list[list[str]]:
    """What ``pipeline("text-generation", model=model)`` returns for each problem, from one seed."""
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    torch.manual_seed(0)
    found = generate(
        [few_shot_prompt(task, shots) for task in tasks],
        batch_size=batch_size,
        num_return_sequences=samples,
        max_new_tokens=new_tokens,
        return_full_text=False,
        **SAMPLING,
    )
    return [[sample["generated_text"] for sample in one] for one in found]
