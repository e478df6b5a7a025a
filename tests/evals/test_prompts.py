"""Prompt formats, and the answers of models that think."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_fastdecode.assets import embedded_tasks, few_shot_prompt, load_embedded
from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.generation import DrawnRows, RowStopping, rescore_samples, samples_of
from hf_fastdecode.evals.prompts import CHANNELS, ThoughtfulAnswer, Thoughts, prompt_format
from hf_fastdecode.evals.records import Sample, Task, thoughts_line
from hf_fastdecode.evals.tasks import TaskSet, load_tasks
from hf_fastdecode.measurement.calls import Drawn

from .example_tasks import JAVA, JAVASCRIPT, MBPP, PYTHON


def of(*tasks: Task, examples: tuple[Task, ...] = ()) -> TaskSet:
    return TaskSet("a", "a test", tasks, examples)


class Template:
    """A tokenizer with a chat template."""

    chat_template = "some"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return "".join(f"<{one['role']}>{one['content']}</>" for one in messages) + "<assistant>"


def test_embedded_prompts_are_those_that_the_model_was_trained_on() -> None:
    tasks = load_tasks("embedded", limit=5)
    for shots in (0, 3):
        found = prompt_format(tasks, shots=shots)
        for task, fields in zip(tasks.tasks, embedded_tasks(), strict=False):
            assert found.prompt(task) == few_shot_prompt(fields, shots)


def test_austin_is_as_published() -> None:
    one, two = (replace(MBPP, task_id=str(number), description=f"Task {number}.") for number in (2, 3))
    found = prompt_format(of(MBPP, examples=(one, two)), "austin", shots=1)
    assert found.prompt(MBPP) == (
        "You are an expert Python programmer, and here is your task: Task 2. Your code should pass these tests:\n\n"
        "assert double(2) == 4\nassert double(0) == 0\n[BEGIN]\ndef double(x):\n    return 2 * x\n[DONE]\n\n"
        "You are an expert Python programmer, and here is your task: Write a function to double a number. Your code "
        "should pass these tests:\n\nassert double(2) == 4\nassert double(0) == 0\n[BEGIN]\n"
    )
    assert (
        found.stop_rule(MBPP).completion("def double(x):\n    return 2 * x\n[DONE]\n\nYou are")
        == "def double(x):\n    return 2 * x\n"
    )


def test_bigcode_is_as_published() -> None:
    found = prompt_format(of(MBPP), "bigcode")
    assert found.prompt(MBPP) == '"""\nWrite a function to double a number.\nassert double(2) == 4\n"""\n'
    text = "def f(x):\n    return 2 * x\n\ndef double(x):\n    return f(x)\n\nassert double(2) == 4"
    assert found.stop_rule(MBPP).completion(text) == text.partition("\nassert")[0]
    assert found.stop_rule(MBPP).completion("def f(") == "def f("  # as there, nothing is repaired
    assert found.prompt(PYTHON) == PYTHON.stem.strip()
    assert found.stop_rule(PYTHON).completion("\n    return 2 * x\n\ndef f():") == "\n    return 2 * x\n"


@pytest.mark.parametrize("task", [PYTHON, JAVA, JAVASCRIPT], ids=lambda task: task.language)
def test_mbxp_is_the_stem(task: Task) -> None:
    found = prompt_format(of(task))
    assert (found.name, found.prompt(task), found.special_tokens) == ("mbxp", task.stem, True)
    assert found.stop_rule(task).completion(task.reference or "") == task.reference


@pytest.mark.parametrize("task", [PYTHON, JAVA, JAVASCRIPT, MBPP], ids=lambda task: task.task_id)
def test_chat_asks_and_begins_the_block(task: Task) -> None:
    found = prompt_format(of(task), chat_tokenizer=Template())
    prompt = found.prompt(task)
    assert prompt.startswith("<user>") and prompt.endswith(f"</><assistant>```{task.language}\n{task.stem}")
    assert (task.stem.strip() or task.tests[1]) in prompt.partition("<assistant>")[0]
    assert not found.special_tokens
    completion = found.stop_rule(task).completion(f"{task.reference}\n```\nIt doubles.")
    assert completion.rstrip() == (task.reference or "").rstrip()
    if task.language == "python":
        ast.parse(task.program(completion))


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        (of(MBPP), {"name": "mbxp"}, 'task 11 has no signature .* use `prompt_format="austin"` or'),
        (
            of(JAVA),
            {"name": "austin", "shots": 0},
            'task MBJP/3 begins with a signature; .* use `prompt_format="mbxp"`',
        ),
        (
            of(replace(MBPP, stem="Once", tests=())),
            {"name": "austin"},
            "task 11 is a prompt without tests; .* leave out `prompt_format`",
        ),
        (of(JAVA), {"name": "bigcode"}, 'bigcode is for Python, got a task in java; use `prompt_format="mbxp"`'),
        (of(MBPP), {"name": "basic"}, "there is no prompt format 'basic'; choose one of mbxp, austin, bigcode"),
        (of(MBPP), {}, "`shots` must be between 0 and 0, .* got 3; pass a file that also holds the tasks 1 to 10"),
        (of(MBPP, examples=(MBPP,)), {"shots": 2}, "`shots` must be between 0 and 1, the solved examples, got 2$"),
        (
            of(MBPP),
            {"name": "austin", "chat_tokenizer": Template()},
            '`chat` and `prompt_format="austin"` were both given',
        ),
        (of(MBPP), {"chat_tokenizer": object()}, "the tokenizer object has no chat template; leave out `chat`"),
    ],
)
def test_formats_that_cannot_be(tasks: TaskSet, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prompt_format(tasks, **options)


_IM = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
_ASKED = _IM + "<|im_start|>assistant\n{{ '' }}"
_CLOSES = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}"
QWEN_3_5 = f"{_ASKED}{_CLOSES}<think>\n{{% endif %}}"
QWEN_3 = f"{_ASKED}{_CLOSES}{{% endif %}}"
GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endfor %}<|start|>assistant"
)
MAGISTRAL = "Think in [THINK][/THINK].{% for m in messages %}[INST]{{ m['content'] }}[/INST]{% endfor %}"


@pytest.fixture
def tokenizer() -> Any:
    return load_embedded()[1]


def form_of(tokenizer: Any, template: str, task: Task = MBPP, **arguments: Any) -> Any:
    tokenizer.chat_template = template
    tasks = TaskSet("a", "a test", (task,))
    return prompt_format(tasks, chat_tokenizer=tokenizer, template_arguments=arguments)


@pytest.mark.parametrize(
    ("template", "arguments", "name", "end"),
    [
        (_ASKED, {}, "chat", "<|im_start|>assistant\n```python\n"),
        (QWEN_3_5, {}, "chat-thinking", "<|im_start|>assistant\n<think>\n"),
        (QWEN_3_5, {"enable_thinking": False}, "chat", "<think>\n\n</think>\n\n```python\n"),
        (QWEN_3, {}, "chat-thinking", "<|im_start|>assistant\n"),
        (QWEN_3, {"enable_thinking": False}, "chat", "<think>\n\n</think>\n\n```python\n"),
        (GPT_OSS, {}, "chat-thinking", "<|start|>assistant"),
        (MAGISTRAL, {}, "chat-thinking", "[/INST]"),
    ],
    ids=["none", "open", "closed", "by itself", "closed by choice", "channels", "special"],
)
def test_a_prompt_ends_where_the_template_ends_it(
    tokenizer: Any, template: str, arguments: dict[str, Any], name: str, end: str
) -> None:
    found = form_of(tokenizer, template, **arguments)
    assert (found.name, found.thinks, found.special_tokens) == (name, name == "chat-thinking", False)
    assert found.prompt(MBPP).endswith(end)


@pytest.mark.parametrize(("template", "opened", "thoughts"), [(_ASKED, "", ""), (QWEN_3_5, "<think>\n", "a</think>")])
def test_the_answer_to_a_prompt_without_tests_is_all_of_the_text(
    tokenizer: Any, template: str, opened: str, thoughts: str
) -> None:
    task = Task("1", "python", "", "Why?", ())
    form = form_of(tokenizer, template, task)
    assert form.prompt(task) == f"<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n{opened}"
    rule, answer = form.stop_rule(task), "b\n```\nc\n```\nd"
    assert (rule.finished(thoughts + answer), rule.completion(thoughts + answer)) == (False, answer)


OPEN = Thoughts("<think>", "</think>", opened=True)
CLOSED = Thoughts("<think>", "</think>")
PROGRAM = "def double(x):\n    return 2 * x\n"
BLOCK = f"```python\n{PROGRAM}```"


@pytest.mark.parametrize(
    ("thoughts", "text", "completion"),
    [
        (OPEN, f"Maybe\n```python\ndef no(): pass\n```\n</think>\n\nHere:\n{BLOCK}\nAnd\n```\nmore\n```", PROGRAM),
        (OPEN, f"Maybe\n{BLOCK}\n", ""),
        (OPEN, "</think>I cannot.", ""),
        (OPEN, f"</think>\n```python\n{PROGRAM}", PROGRAM),
        (OPEN, f"</think>\n```python\n{PROGRAM}def cut(", PROGRAM),
        (CLOSED, f"<think>\nNo.\n</think>\n{BLOCK}", PROGRAM),
        (CLOSED, f"\n<think>\n{BLOCK}", ""),
        (CLOSED, f"Sure.\n{BLOCK}", PROGRAM),
        (CHANNELS, f"<|channel|>analysis<|message|>{BLOCK}<|end|><|channel|>final<|message|>{BLOCK}", PROGRAM),
        (CHANNELS, f"<|channel|>final<|message|>{BLOCK}", PROGRAM),
        (CHANNELS, f"<|channel|>analysis<|message|>{BLOCK}", ""),
    ],
)  # fmt: skip
def test_the_program_is_the_first_block_after_the_thoughts(thoughts: Thoughts, text: str, completion: str) -> None:
    assert ThoughtfulAnswer(MBPP, thoughts).completion(text) == completion
    rule, ends = ThoughtfulAnswer(MBPP, thoughts), []
    for length in range(len(text) + 1):
        if rule.finished(text[:length]):
            ends.append(rule.end(text[:length]))
            assert ThoughtfulAnswer(MBPP, thoughts).completion(text[:length]) == completion
    assert len(set(ends)) <= 1


@pytest.mark.parametrize("task", [PYTHON, JAVA, JAVASCRIPT], ids=lambda task: task.language)
def test_a_whole_function_continues_a_stem(task: Task) -> None:
    program = task.program(task.reference or "")
    text = f"</think>\n```{task.language}\n{program}\n```"
    assert ThoughtfulAnswer(task, OPEN).completion(text).rstrip() == (task.reference or "").rstrip()
    if task.language == "python":
        alone = ThoughtfulAnswer(task, OPEN).completion(f"</think>\n```\n{PROGRAM}```")
        scope: dict[str, Any] = {}
        exec(compile(ast.parse(task.program(alone)), "", "exec"), scope)
        assert scope["double"](4) == 8
    if task.language == "java":
        other = "class Solution {\n    static int twice(int y) {\n        return y + y;\n    }\n}\n"
        found = task.program(ThoughtfulAnswer(task, OPEN).completion(f"</think>\n```java\n{other}```"))
        assert "return y + y;" in found
        assert "Solution" not in found
        assert found.count("{") == found.count("}")


def test_thoughts_are_tokens_of_a_sample_and_marks_may_be_special_tokens(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel|>", "<|message|>"]})
    form = form_of(tokenizer, GPT_OSS)
    thoughts, answer = "<|channel|>analysis<|message|>def", f"<|channel|>final<|message|>\n{BLOCK}"
    texts = [thoughts + answer + "\nmore", thoughts, answer]
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    prompt = tokenizer(form.prompt(MBPP), add_special_tokens=False).input_ids
    end = tokenizer.eos_token_id
    width = max(map(len, rows)) + 1
    tokens = torch.tensor([[*row, *[end] * (width - len(row))] for row in rows])
    sequences = torch.cat([torch.tensor([prompt] * 3), tokens], dim=1)
    stopping = RowStopping(
        tokenizer, [form.stop_rule(MBPP) for _ in rows], sequences[:, : len(prompt)], [end], special=True
    )
    for length in range(1, width):
        ended = stopping(sequences[:, : len(prompt) + length], None)
    assert ended.tolist() == [True, True, True]
    call = Drawn(sequences, len(prompt), torch.zeros(tokens.shape), None, 0.0, [0.0], 1.0)

    class Model:
        class generation_config:  # noqa: N801
            eos_token_id = end

    found = samples_of(DrawnRows(call, None, [0.0] * 3), Model, tokenizer, form, [MBPP])
    assert [one.completion for one in found] == [PROGRAM, "", PROGRAM]
    closing = len(tokenizer("<|channel|>final<|message|>", add_special_tokens=False).input_ids)
    before = len(rows[1])
    assert [one.thought_tokens for one in found] == [before + closing, before, closing]
    assert [one.tokens for one in found] == [before + len(rows[2]), before, len(rows[2])]
    assert thoughts_line(found) == (
        f"Samples think first, {before} tokens in the median; 1 of 3 did not reach an answer within the new tokens "
        "that they had"
    )
    assert thoughts_line([Sample("1", 0, "x", 3)]) == ""
    with pytest.raises(InputError, match="samples hold no thoughts"):
        rescore_samples(None, tokenizer, form, [MBPP], found, None)  # type: ignore[arg-type]
