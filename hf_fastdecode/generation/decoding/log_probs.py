"""What a call adds to its finished rows: a trainer's log-probabilities, and the experts that routers chose.

With ``log_probs="trainer"`` a pass over the finished rows has the log-probabilities of drawn tokens. Steps and a
trainer's passes add up in other orders, so that theirs differ by rounding. This pass is a trainer's: whole rows,
padding at the left and after a row's end, and no positions. `forward.seam` computes in it once what rows share, and
keeps last hidden states, by which later passes over these rows need no layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation import GenerationMode

from ..._compat import CACHE, setting
from ...errors import reason_of
from ..call_context import active_call_of, active_call_of_thread, scores_rows
from ..forward_pass import (
    POSITIONS_IGNORED,
    POSITIONS_OF_MASKS,
    PromptNames,
    input_device,
    prompt_names,
    reads_positions,
)
from ..model_state import ModelState, last_forward_of, owned_by, state_of
from ..support import check_noise
from .loop import FastDecodeOutput
from .sampling import TokenLogProbs, TransformersSampler, is_recorder
from .stopping import Stopping

_LOGITS: Final = 2**27
"""Logits that are in memory at once: 512 MiB in fp32, and about twice as much of what is computed from them."""

CHOICES: Final = "output_router_choices"
"""Argument of `generate`, or field of its config."""

_READ: Final = frozenset({"inputs", "input_ids", "attention_mask"})


def finishing(
    model: PreTrainedModel,
    prompts: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    arguments: dict[str, Any],
    *,
    synced_gpus: bool,
) -> Callable[[Any, Tensor], Any] | None:
    """A function that adds routers' choices and a trainer's log-probabilities to a loop's output, if asked for.

    It is given the output, and ``[rows]`` int64: tokens that each row drew up to its end.

    Args:
        prompts: ``[rows, width]`` int64.
        arguments: The model's, as `generate` prepared them.
        synced_gpus: Whether all processes must run as many passes.

    Raises:
        ValueError: They are asked for, and not to be had of the call's rows.
    """
    call, recorders = active_call_of(model), [one for one in processors if is_recorder(one)]
    state, recorder = _scoring_state(model), None if call is None else call.recorder
    if not (recorders or config.return_dict_in_generate):
        state = None
    if state is None and recorder is None:
        return None
    refusal = _refusal(model, config.get_generation_mode(arguments.get("assistant_model")))
    mask = arguments.get("attention_mask")
    mask = torch.ones_like(prompts) if mask is None else mask.to(prompts.device)
    shown = partial(_shown, mask, Stopping(criteria, prompts.device))
    add: Callable[[Any, Tensor], Any] = lambda output, drawn: output  # noqa: E731
    if state is not None:
        why = refusal or reason_of(check_noise, model.modules())
        if synced_gpus:  # rows of other lengths may take another number of passes
            why = "synced_gpus=True asks for as many passes of all processes; use synced_gpus=False"
        _require_text("log_probs='trainer'", why, "or enable the model with log_probs='auto'")
        others = LogitsProcessorList(  # without those that change no probability
            one for one in processors if not (is_recorder(one) or type(one) is LogitNormalization)
        )
        sampler = TransformersSampler(others, do_sample=config.do_sample, rows=len(prompts))
        add = _TrainerLogProbs(model, prompts.shape[1], shown, sampler, recorders)
    if call is None or recorder is None:
        return add
    if not config.return_dict_in_generate:
        refusal = "this call returns ids alone; use return_dict_in_generate=True"
    elif config.use_cache is False:
        refusal = "this call has no cache; leave out use_cache=False"
    elif call.structure is not None and not call.structure.alone:
        refusal = "several processes compute this model; use a model for each"
    _require_text(f"{CHOICES}=True", refusal, "or leave it out")
    recorder.begin(arguments.get(CACHE))

    def finish(output: Any, drawn: Tensor) -> Any:
        choices = recorder.finish(output.sequences, shown(output.sequences, drawn))
        return add(FastDecodeOutput(**{**output, "router_choices": choices}), drawn)

    return finish


def _scoring_state(model: PreTrainedModel) -> ModelState | None:
    """The state of a model that scores as a trainer does, whose decoder forgets the last pass's rows; else None."""
    if (state := state_of(model)) is None or state.options.log_probs != "trainer":
        return None
    for one in (state, *(of_part for _, of_part in owned_by(state, model))):
        one.last_rows = None  # the steps may need their memory
    return state


def _require_text(what: str, refusal: str | None, otherwise: str) -> None:
    if refusal is not None:
        raise ValueError(f"{what} is for rows of text that are drawn token by token, and {refusal}, {otherwise}")


def field_of_call(model: PreTrainedModel, config: GenerationConfig | None, name: str) -> Any:
    """A field of a call's config, or of the model's where that leaves it unset, as transformers takes it."""
    value = getattr(config, name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def require_scored(model: PreTrainedModel, arguments: Mapping[str, Any], why: str) -> None:
    """Raise ValueError if a call of `generate` asks for a trainer's log-probabilities, and is not given our loop."""
    name, config = "return_dict_in_generate", arguments.get("generation_config")
    returns = arguments.get(name, field_of_call(model, config, name))
    asks = returns or any(is_recorder(one) for one in arguments.get("logits_processor") or ())
    if asks and (state := state_of(model)) is not None and state.options.log_probs == "trainer":
        raise ValueError(
            f"log_probs='trainer' is for rows that this package's loop draws, and {why}; ask for sequences alone, or "
            "enable the model with log_probs='auto'"
        )


def _refusal(model: PreTrainedModel, mode: GenerationMode) -> str | None:
    """Why rows of a call are not ids that a trainer's pass may be given, and what to do; None if they are."""
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"this call runs {mode.value.replace('_', ' ')}; use num_beams=1 without an assistant"
    if prompt_names(model) != PromptNames():
        return f"{type(model).__name__} has an encoder; use a decoder"
    call = active_call_of_thread.get()
    given = set() if call is None else call.given.keys() - _READ
    if others := given & inspect.signature(model.forward).parameters.keys():
        return f"this call is given {', '.join(sorted(others))}; give input_ids and attention_mask alone"
    prepares_itself = getattr(model.prepare_inputs_for_generation, "__self__", None) is model
    if not prepares_itself:
        return (
            "prepare_inputs_for_generation is replaced, as by PEFT's prompts and prefixes, which are not in the rows; "
            "use an adapter of weights, such as LoRA"
        )
    return None


@dataclass(frozen=True)
class _TrainerLogProbs:
    """Log-probabilities of one call."""

    model: PreTrainedModel
    width: int  # tokens of the prompts, padding included
    shown: Callable[[Tensor, Tensor], Tensor]  # maps finished rows, and their tokens, to their mask, see `_shown`
    sampler: TransformersSampler
    recorders: Sequence[TokenLogProbs]  # get the raw ones

    @torch.no_grad()
    def __call__(self, output: Any, drawn: Tensor) -> Any:
        """The output of a loop whose rows have `drawn` so many tokens; if it has fields, with log-probabilities."""
        sequences = output if isinstance(output, Tensor) else output.sequences
        processes, mask = sequences is not output and not self.sampler.needs_all_rows, self.shown(sequences, drawn)
        _warn_of_positions(self.model, mask[:, : self.width] > 0)
        raw, processed = self._of(sequences, mask, processes=processes)
        for recorder in self.recorders:
            recorder.take(raw, sequences[:, self.width :])
        if sequences is output:
            return output
        return FastDecodeOutput(**{**output, "logprobs": raw, "processed_logprobs": processed if processes else None})

    def _of(self, sequences: Tensor, mask: Tensor, *, processes: bool) -> tuple[Tensor, Tensor]:
        """Raw and, if asked for, processed log-probabilities ``[rows, steps]`` of ``[rows, width + steps]`` ids."""
        width = self.width
        tokens, drawn = sequences[:, width:], mask[:, width:] > 0
        raw = torch.zeros_like(tokens, dtype=torch.float32)
        processed, numbers = torch.zeros_like(raw), torch.arange(len(tokens), device=tokens.device)
        for rows, steps in self._parts(sequences, mask):
            logits, chosen = self._logits(sequences[rows], mask[rows], steps), tokens[rows, steps, None]
            raw[rows, steps] = logits.log_softmax(-1).gather(2, chosen)[..., 0]
            processors = self.sampler.processors_of(numbers[rows])
            unfiltered = LogitsProcessorList(one for one in processors if not _is_filter(one))
            for place in range(logits.shape[1] if processes else 0):
                ids, token = sequences[rows, : width + steps.start + place], chosen[:, place]
                scores = processors(ids, logits[:, place])
                scores = scores.scatter(1, token, unfiltered(ids, logits[:, place]).gather(1, token))
                processed[rows, steps.start + place] = scores.log_softmax(-1).gather(1, token)[:, 0]
        return raw.where(drawn, 0.0), processed.where(drawn, 0.0)

    def _parts(self, sequences: Tensor, mask: Tensor) -> list[tuple[slice, slice]]:
        """Rows and steps whose logits are computed at once: some steps of all rows, if their layers run only once."""
        rows, steps = len(mask), sequences.shape[1] - self.width
        fit = _LOGITS // self.model.config.get_text_config().vocab_size
        if fit >= rows * steps:
            return [(slice(rows), slice(0, steps))]
        self._logits(sequences, mask, slice(0, 1))
        report = last_forward_of(self.model)
        if report is not None and report.path == "shared":
            return [(slice(rows), part) for part in _slices(steps, fit // rows)]
        return [(part, slice(0, steps)) for part in _slices(rows, fit // steps)]

    def _logits(self, ids: Tensor, mask: Tensor, steps: slice) -> Tensor:
        """Logits ``[rows, steps, vocabulary]`` fp32, on the device of the ids, that these steps draw from."""
        device, before = input_device(self.model), self.width - 1
        columns = torch.arange(before + steps.start, before + steps.stop, device="cpu")  # for a head on any device
        given = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "use_cache": False}
        if takes := "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            given["logits_to_keep"] = columns
        with setting(scores_rows, True):
            logits: Tensor = self.model(**given).logits
        return (logits if takes else logits[:, columns]).to(ids.device, torch.float32)


def _shown(mask: Tensor, stopping: Stopping, sequences: Tensor, counts: Tensor) -> Tensor:
    """The mask of finished rows: prompts, and tokens up to a row's end token, or the first `counts` of them."""
    tokens = sequences[:, mask.shape[1] :]
    ends = torch.zeros_like(tokens) if stopping.eos is None else torch.isin(tokens, stopping.eos).long()
    drawn = ends.cumsum(1) == ends
    if stopping.pads:
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        drawn &= (steps < counts[:, None]) | (ends > 0)  # an end token may pad, too
    return torch.cat([mask, drawn.to(mask.dtype)], dim=1)


def _warn_of_positions(model: PreTrainedModel, shown: Tensor) -> None:
    """Log once if a pass without positions places tokens otherwise than the steps, by the mask ``[rows, width]``."""
    config, state = model.config.get_text_config(), state_of(model)
    if state is None or not reads_positions(model) or config.model_type in POSITIONS_OF_MASKS | POSITIONS_IGNORED:
        return
    # The same offset for all tokens of a row changes nothing in rotary embeddings.
    rotary = any(hasattr(config, name) for name in ("rope_parameters", "rope_theta", "rotary_dim"))
    gaps = (shown[:, :-1] & ~shown[:, 1:]).any()
    padded, gaps = torch.stack([(~shown).any(), gaps]).tolist()
    if gaps or (padded and not rotary):
        remedy = "pad prompts at the left alone" if rotary else "give prompts of one length, without padding"
        state.log_once(
            "log_probs='trainer': steps have counted what the attention mask shows, and a trainer's pass, without "
            "position_ids, counts hidden tokens too, so that log-probabilities may not be those that tokens "
            f"were drawn with; {remedy}"
        )


def _is_filter(processor: LogitsProcessor) -> bool:
    """Whether it removes tokens by their logits: by rounding, also one that a step has kept and drawn."""
    return type(processor).__name__.endswith("Warper") and not isinstance(processor, TemperatureLogitsWarper)


def _slices(count: int, most: int) -> list[slice]:
    """As few slices of `most` or one."""
    size = max(1, most)
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]
