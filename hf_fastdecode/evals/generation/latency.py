"""How long it takes to draw n samples of a prompt, apart from what the samples are worth."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import nan
from typing import Any, Final, cast

import numpy as np

from ...api import explain
from ...errors import out_of_memory
from ...measurement.calls import begin_peak, peak_over
from ..prompts import PromptFormat
from ..records import Latency, Mode, Task
from ..settings import Drawing
from .draw import DrawnRows, draw_rows, sharing

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
    length that it has not met. The way ``shared`` is what `enable` does: calls that gain nothing from it, such as one
    sample of one prompt, run stock. Peak memory is what a CUDA device allocated over what it held before the call.
    """
    asked = drawing.mode if drawing.way == "shared" and drawing.mode != "auto" else "eager"
    row = Latency(drawing.way, cast(Mode, asked), n, device)
    on_gpu = model.device.type == "cuda"
    # On the CPU, eager steps only need the libraries to be initialised.
    warm_up = drawing if on_gpu or drawing.mode not in ("eager", "auto") else _short(drawing)
    runs: list[DrawnRows] = []
    peaks: list[int] = []
    try:
        with sharing(model, drawing):
            for number, task in enumerate(tasks):
                if number == 0 or on_gpu:
                    draw_rows(model, tokenizer, form, [task], n, warm_up, seed=seed)
                before = begin_peak(model.device)
                runs.append(draw_rows(model, tokenizer, form, [task], n, drawing, seed=seed))
                if (peak := peak_over(model.device, before)) is not None:
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
    first, median, last = ([own[at] for own in ends] for at in (0, (n - 1) // 2, n - 1))
    steps = [1e3 * (after - before) for run in runs for before, after in pairwise(run.call.step_times)]
    return replace(
        row,
        prefill_s=_percentile([run.call.first_token_s for run in runs], 50),
        ms_per_step_p50=_percentile(steps, 50),
        ms_per_step_p90=_percentile(steps, 90),
        first_sample_s=_percentile(first, 50),
        median_sample_s=_percentile(median, 50),
        last_sample_s=_percentile(last, 50),
        first_sample_s_p90=_percentile(first, 90),
        median_sample_s_p90=_percentile(median, 90),
        last_sample_s_p90=_percentile(last, 90),
        peak_bytes=max(peaks, default=None),
        runs=len(runs),
    )


def _short(drawing: Drawing) -> Drawing:
    return replace(drawing, max_new_tokens=min(_WARM_UP_TOKENS, drawing.max_new_tokens))


def _percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else nan
