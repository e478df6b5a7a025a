"""Samples with log-probabilities: drawn in calls of `generate`, all of a run or timed; or given (teacher forcing)."""

from __future__ import annotations

import bisect
import gc
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

import numpy as np
import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from tqdm import tqdm
from transformers import StoppingCriteria, TemperatureLogitsWarper, TopPLogitsWarper

from ..api import enabled, explain
from ..errors import InputError, out_of_memory
from ..files import JsonlWriter, json_lines, read_jsonl, write_text
from ..generation.decoding.sampling import NotFiniteError, TokenLogProbs
from ..measurement import calls
from .prompts import PromptFormat, ThoughtfulAnswer
from .records import Latency, Mode, Sample, Task
from .run_folder import Drawing, RunSettings, claim_folder, open_samples, units_of
from .stop_rules import StopRule


class ProcessedLogProbs(TokenLogProbs):
    """Gathers the log-probability of each drawn token after temperature and nucleus; of a greedy one that is 0."""

    def __init__(self, temperature: float, top_p: float):
        super().__init__()
        self._greedy = temperature == 0
        self._warpers = [] if self._greedy else [TemperatureLogitsWarper(temperature)]
        if not self._greedy and top_p < 1:
            self._warpers.append(TopPLogitsWarper(top_p))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note the processed logits and return the raw ones as they are: `generate` processes them by itself."""
        processed = scores.float()
        if self._greedy:
            processed = processed.masked_fill(processed < processed.amax(-1, keepdim=True), float("-inf"))
        for warper in self._warpers:
            processed = warper(input_ids, processed)
        super().__call__(input_ids, processed)
        return scores


_ROWS_OF_A_STEP = 128
"""Rows whose tokens are decoded to text in half a millisecond."""


class RowStopping(StoppingCriteria):
    """Ends each row by its stop rule, once nothing that may follow belongs to the completion.

    Text is decoded after every step; with ``k * 128`` rows after every ``k``-th one, because decoding makes the host
    wait for the device. A row then ends some tokens late, which does not change its completion. `prompts` are
    ``[rows, width]``; `end_tokens` count for `finished_at`: when each row finished, by `time.perf_counter`. With
    `special`, rules read the text of special tokens too. A tokenizer without a Rust backend decodes a row's whole text
    each time.
    """

    def __init__(
        self,
        tokenizer: Any,
        rules: Sequence[StopRule],
        prompts: Tensor,
        end_tokens: Sequence[int],
        *,
        special: bool = False,
    ):
        self.finished_at: list[float | None] = [None] * len(rules)
        self._tokenizer = tokenizer
        self._rules, self._width = list(rules), prompts.shape[1]
        self._anchors = prompts[:, -calls.ANCHOR :].tolist()
        self._special = special
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # None without Rust: rows are decoded anew
        self._streams: list[DecodeStream | None] = [
            None if self._backend is None else DecodeStream(ids=ids, skip_special_tokens=not special)
            for ids in self._anchors
        ]
        self._texts = [""] * len(rules)
        self._end_tokens = set(end_tokens)
        self._ended = torch.zeros(len(rules), dtype=torch.bool)
        self._read_up_to = 0
        self._steps_between = max(1, len(rules) // _ROWS_OF_A_STEP)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Bool ``[rows]``: which rows have finished, given ``[rows, length]`` tokens."""
        if input_ids.shape[1] - self._width < self._read_up_to + self._steps_between:
            return self._ended.to(input_ids.device)
        drawn = input_ids[:, self._width + self._read_up_to :].tolist()
        self._read_up_to = input_ids.shape[1] - self._width
        for row in (~self._ended).nonzero().flatten().tolist():
            if self._ends(row, drawn[row], input_ids):
                self._ended[row] = True
                self.finished_at[row] = time.perf_counter()
        return self._ended.to(input_ids.device)

    def _ends(self, row: int, tokens: list[int], input_ids: Tensor) -> bool:
        if not self._end_tokens.isdisjoint(tokens):
            return True
        before = len(self._texts[row])
        stream = self._streams[row]
        if stream is not None:
            try:
                self._texts[row] += stream.step(self._backend, tokens) or ""
            except Exception:  # its only kind: the text of more tokens does not begin with that of fewer
                stream = self._streams[row] = None
        if stream is None:
            ids = input_ids[row, self._width :].tolist()
            text = calls.continuation(self._tokenizer, self._anchors[row], ids, special=self._special)
            self._texts[row] = text.removesuffix("\N{REPLACEMENT CHARACTER}")  # its last bytes may follow
        return len(self._texts[row]) != before and self._rules[row].finished(self._texts[row])


def sharing(model: Any, drawing: Drawing) -> AbstractContextManager[Any]:
    """Enable the model within, unless the drawing is of stock."""
    if drawing.way == "stock":
        return nullcontext()
    return enabled(model, mode=drawing.mode, sampler=drawing.sampler)


@dataclass(frozen=True)
class DrawnRows:
    call: calls.Drawn
    processed: Tensor | None  # [rows, steps] float32: log-probabilities after temperature and nucleus, if asked for
    finished_at: list[float]  # when each row finished, by `time.perf_counter`


def draw_rows(
    model: Any, tokenizer: Any, form: PromptFormat, tasks: Sequence[Task], count: int, drawing: Drawing, *, seed: int
) -> DrawnRows:
    """Draw `count` samples of each task in one call, within `sharing`; torch's generators are left as they were."""
    texts = [form.prompt(task) for task in tasks]
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=form.special_tokens, verbose=False)
    prompts = batch["input_ids"].repeat_interleave(count, dim=0)
    rules = [form.stop_rule(task) for task in tasks for _ in range(count)]
    stopping = RowStopping(tokenizer, rules, prompts, calls.end_tokens_of(model), special=form.thinks)
    processed = ProcessedLogProbs(drawing.temperature, drawing.top_p) if drawing.processed else None
    call = calls.draw(
        model,
        {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")},
        seed=seed,
        processors=[] if processed is None else [processed],
        time_every_step=True,
        max_new_tokens=drawing.max_new_tokens,
        num_return_sequences=count,
        stopping_criteria=[stopping],
        **drawing.options(),
    )
    return DrawnRows(
        call,
        None if processed is None else processed.of(call.tokens).cpu(),
        [call.ended if at is None else at for at in stopping.finished_at],
    )


def samples_of(
    drawn: DrawnRows, model: Any, tokenizer: Any, form: PromptFormat, tasks: Sequence[Task], *, first: int = 0
) -> list[Sample]:
    """Cut the completions of a call out of its rows, in row order, with log-probabilities of the kept tokens.

    These are the fewest whose text holds the completion: an end token, and what a stop rule cuts off, do not count;
    thoughts do. `first` is the index of each task's first sample.
    """
    call = drawn.call
    count = len(call.tokens) // len(tasks)
    ends = set(calls.end_tokens_of(model))
    samples = []
    for row, (prompt, tokens) in enumerate(zip(call.prompts.tolist(), call.tokens.tolist(), strict=True)):
        task = tasks[row // count]
        length = calls.count_before_end(tokens, ends)
        text = calls.continuation(tokenizer, prompt, tokens[:length], special=form.thinks)
        rule = form.stop_rule(task)
        tokens_of = partial(_tokens_of, tokenizer, prompt, tokens[:length], form.thinks)
        kept = tokens_of(rule.kept(text))
        answer = rule.answer_start(text) if isinstance(rule, ThoughtfulAnswer) else 0
        samples.append(
            Sample(
                task_id=task.task_id,
                index=first + row % count,
                completion=rule.completion(text),
                tokens=kept,
                sum_logp=_sum(call.log_probs, row, kept),
                sum_processed_logp=None if drawn.processed is None else _sum(drawn.processed, row, kept),
                thought_tokens=None if not form.thinks else kept if answer is None else tokens_of(answer),
            )
        )
    return samples


def _sum(log_probs: Tensor, row: int, kept: int) -> float:
    return float(log_probs[row, :kept].double().sum())


def _tokens_of(tokenizer: Any, prompt: list[int], tokens: list[int], special: bool, characters: int) -> int:
    if not characters:
        return 0

    def text_length(count: int) -> int:
        return len(calls.continuation(tokenizer, prompt, tokens[:count], special=special))

    return bisect.bisect_left(range(len(tokens) + 1), characters, key=text_length)


def generate_samples(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    form: PromptFormat,
    settings: RunSettings,
    folder: Path,
    *,
    shared: bool = False,
    provenance: dict[str, Any] | None = None,
) -> int:
    """Draw the samples of a run that its folder does not hold yet, and return how many were drawn.

    Of a `shared` run, those that no other process draws; it ends when all are drawn. An interrupted run loses the unit
    in progress, and goes on as if it had not been. An InputError where the folder belongs to another run, another
    process draws into it and the run is not shared, or the rows of a call do not fit into memory.
    """
    claim_folder(folder, settings, provenance or {})
    ids = [task.task_id for task in tasks]
    units, drawn = units_of(len(tasks), settings.n, settings.rows), 0
    no_memory = InputError(
        f"calls of up to {settings.rows} rows and {settings.drawing.max_new_tokens} new tokens do not fit into the "
        f"memory of {model.device}; pass a smaller `rows`, and another `out`"
    )
    opened = open_samples(folder, units, ids, shared=shared)
    total = sum(unit.count * len(unit.tasks) for unit in units)
    with (
        opened as (file, left, there),
        sharing(model, settings.drawing),
        tqdm(total=total, initial=there, desc="samples", unit="sample", disable=None) as bar,
    ):
        for unit in left:
            chosen, seed = [tasks[task] for task in unit.tasks], unit.seed(settings.seed, ids)
            with calls.memory_and_logit_errors(model, lambda: no_memory):
                rows = draw_rows(model, tokenizer, form, chosen, unit.count, settings.drawing, seed=seed)
            samples = samples_of(rows, model, tokenizer, form, chosen, first=unit.first)
            file.write(samples)
            drawn += len(samples)
            bar.update(len(samples))
    return drawn


_WARM_UP_TOKENS: Final = 8


def measure_latency(
    model: Any,
    tokenizer: Any,
    form: PromptFormat,
    tasks: Sequence[Task],
    n: int,
    drawing: Drawing,
    *,
    device: str,
    seed: int = 0,
) -> Latency:
    """Time drawing n samples of one prompt in a call, a call for each task.

    Rows end by their stop rules, as when samples are drawn for scoring. On a GPU each call is made once before it is
    timed: cuDNN's attention, which stock transformers gets from PyTorch, takes tens of milliseconds to plan for each
    new length. The way ``shared`` is what `enable` does: calls that gain nothing from it, such as one
    sample of one prompt, run stock. Peak memory is what a CUDA device allocated over what it held before the call.
    """
    asked = drawing.mode if drawing.way == "shared" and drawing.mode != "auto" else "eager"
    row = Latency(drawing.way, cast(Mode, asked), n, device)
    on_gpu = model.device.type == "cuda"
    warm_up = drawing
    if not on_gpu and drawing.mode in ("eager", "auto"):  # only the libraries need to be initialised
        warm_up = replace(drawing, max_new_tokens=min(_WARM_UP_TOKENS, drawing.max_new_tokens))
    runs: list[DrawnRows] = []
    peaks: list[int] = []
    try:
        with sharing(model, drawing):
            for number, task in enumerate(tasks):
                if number == 0 or on_gpu:
                    draw_rows(model, tokenizer, form, [task], n, warm_up, seed=seed)
                before = calls.begin_peak(model.device)
                runs.append(draw_rows(model, tokenizer, form, [task], n, drawing, seed=seed))
                if (peak := calls.peak_over(model.device, before)) is not None:
                    peaks.append(peak)
            if drawing.way == "shared" and (call := explain(model).last_call) is not None:
                row = replace(row, mode=cast(Mode, call.mode))
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        runs.clear()
        gc.collect()
        return replace(row, status="out of memory")
    ends = [sorted(at - run.call.started for at in run.finished_at) for run in runs]
    samples = {"first": 0, "median": (n - 1) // 2, "last": n - 1}
    times: dict[str, Any] = {
        f"{name}_sample_s{suffix}": _percentile([item[at] for item in ends], share)
        for name, at in samples.items()
        for suffix, share in (("", 50), ("_p90", 90))
    }
    steps = [1e3 * (after - before) for run in runs for before, after in pairwise(run.call.step_times)]
    return replace(
        row,
        prefill_s=_percentile([run.call.first_token_s for run in runs], 50),
        ms_per_step_p50=_percentile(steps, 50),
        ms_per_step_p90=_percentile(steps, 90),
        **times,
        peak_bytes=max(peaks, default=None),
        runs=len(runs),
    )


def _percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else nan


_WORD: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS_AT_ONCE: Final = 1 << 24
_NOT_THE_MODELS: Final = ("_name_or_path", "transformers_version")  # where a config lies, and who wrote it
_SPREAD: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # golden ratio: neighbouring words get very different factors


def model_digest(model: Any, tokenizer: Any) -> str:
    """Hash weights, configs and tokenizer, which decide the tokens that are drawn, and their text."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_THE_MODELS}
    parts = [config, model.generation_config.to_diff_dict(), tokenizer_text(tokenizer)]
    text = json.dumps([weights_digest(model), *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_text(tokenizer: Any) -> str:
    """Write a tokenizer as text: the Rust one, or without it the files that it is saved as."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.to_str())
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes().decode("latin-1") for path in sorted(Path(folder).iterdir())}
    return json.dumps([type(tokenizer).__name__, files])


def weights_digest(model: Any) -> str:
    """Hash names, shapes, dtypes and every value of a model's state dict, on the device of the weights."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        for tensor in _plain(value):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_sum_of_bits(tensor)}".encode())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Iterator[Tensor]:
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    elif isinstance(value, Tensor) and not value.is_meta:
        yield value.detach()


def _sum_of_bits(tensor: Tensor) -> int:
    """Sum a tensor's words, each weighted by its position; it wraps around at 64 bits."""
    words = tensor.contiguous().reshape(-1).view(_WORD[tensor.dtype.itemsize])
    total = 0
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE].long()
        factors = torch.arange(start, start + len(part), device=part.device) * _SPREAD | 1  # odd: no bit is lost
        total += int((part * factors).sum())
    return total & (1 << 64) - 1


_LOGITS: Final = 1 << 28  # elements, half a GiB in bfloat16


def rescore_samples(
    model: Any, tokenizer: Any, form: PromptFormat, tasks: Sequence[Task], samples: Sequence[Sample], out: Path
) -> None:
    """Write samples with the model's log-probabilities, see `rescored`.

    Finished tasks are kept in a hidden file beside `out`, from which an interrupted call continues.
    """
    if form.thinks:
        raise InputError("samples hold no thoughts, so a model that thinks cannot score them; leave out `chat`")
    content = [model_digest(model, tokenizer), *map(form.prompt, tasks), *map(repr, samples)]
    head = {"rescored": hashlib.sha256("\0".join(content).encode(errors="surrogatepass")).hexdigest()[:16]}
    journal = out.with_name(f".{out.name}.rescored")
    lines = list(read_jsonl(journal)) if journal.exists() else []
    if lines[:1] != [head]:
        lines = []
        journal.unlink(missing_ok=True)
    kept = {(line["task_id"], line["index"]): line for line in lines[1:]}
    with JsonlWriter(journal) as file:
        if not lines:
            file.write([head])
        for task in tqdm(tasks, desc="rescore", unit="task", disable=None):
            of_task = [sample for sample in samples if sample.task_id == task.task_id]
            if all((sample.task_id, sample.index) in kept for sample in of_task):
                continue
            found = rescored(model, tokenizer, form, task, of_task)
            file.write(found)
            kept |= {(sample.task_id, sample.index): asdict(sample) for sample in found}
    write_text(out, json_lines(kept.values()))
    journal.unlink()


def rescored(
    model: Any, tokenizer: Any, form: PromptFormat, task: Task, samples: Sequence[Sample], *, rows: int = 16
) -> list[Sample]:
    """Give a task's samples the model's log-probabilities, whichever model or tool drew them.

    The completion is tokenized after its prompt, so its tokens may differ from those that were drawn. At most `rows`
    samples go through the model at once; fewer if they are long, because logits are large.
    """
    prompt = _tokens(tokenizer, form, form.prompt(task))
    texts = [_tokens(tokenizer, form, form.prompt(task) + sample.completion) for sample in samples]
    vocabulary = model.get_output_embeddings().weight.shape[0]
    at_once = max(1, min(rows, _LOGITS // (vocabulary * max(map(len, texts), default=1))))
    no_memory = InputError('the logits of a sample do not fit into memory; try `dtype="bfloat16"` or `device="cpu"`')
    found: list[Sample] = []
    for start in range(0, len(samples), at_once):
        part = texts[start : start + at_once]
        with calls.memory_and_logit_errors(model, lambda: no_memory):
            log_probs = _log_probs(model, part)
        for sample, text, row in zip(samples[start : start + at_once], part, log_probs, strict=True):
            first = max(1, _common_prefix(prompt, text))  # the first token has no logits
            sum_logp = float(row[first - 1 : len(text) - 1].sum())
            found.append(replace(sample, tokens=len(text) - first, sum_logp=sum_logp, sum_processed_logp=None))
    return found


def _tokens(tokenizer: Any, form: PromptFormat, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=form.special_tokens, verbose=False).input_ids)


@torch.no_grad()
def _log_probs(model: Any, texts: Sequence[Sequence[int]]) -> Tensor:
    """Compute log-probabilities of all tokens but the first: ``[texts, longest - 1]`` float64 on the CPU."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[text[-1]] * (longest - len(text))] for text in texts], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    drawn = [row.float().log_softmax(-1).gather(1, after[1:, None])[:, 0] for row, after in zip(logits, ids)]
    log_probs = torch.stack(drawn).double().cpu()
    if bool(log_probs.isnan().any()):
        raise NotFiniteError
    return log_probs


def _common_prefix(prompt: Sequence[int], text: Sequence[int]) -> int:
    """Length of the common prefix: the last prompt token may have merged with the completion."""
    return next((at for at, (one, other) in enumerate(zip(prompt, text)) if one != other), min(len(prompt), len(text)))
