"""The ``custom_generate`` that `generate` is given."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.utils import ModelOutput

from ..._compat import CACHE, is_compiled_in_place
from ...cache.shared import SharedContextCache
from ..active_call import active_call_of_thread
from ..decoding.decisions import agreed_criteria
from ..decoding.decode import decode_shared
from ..loop_argument import reads_its_cache
from ..prompts.start import start_shared
from ..same_calls import require_same_draws
from ..steps.early_kernels import begin_compiling_sampler
from ..steps.modes import call_passes, choose_mode


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decoding loop passed as ``custom_generate``; calls that cannot share context go to transformers' own loop."""
    call, active_call = None, active_call_of_thread.get()
    if active_call is not None:
        call, active_call.context = active_call.context, None
    if call is not None and call.model is model:
        call.config, call.arguments = generation_config, model_kwargs
        new_tokens = int(generation_config.max_length) - input_ids.shape[1]  # may be another library's integer
        call.set_mode(*choose_mode(call, new_tokens))
        begin_compiling_sampler(call, logits_processor, input_ids)
        with call_passes(call) as passes:
            with call.or_stock():
                start = start_shared(call, passes, input_ids)
            if not call.runs_stock:
                if is_compiled_in_place(model):
                    call.state.log_once(
                        "model.compile() does not apply to passes with shared context, which run uncompiled; "
                        "on a GPU they are captured in CUDA graphs"
                    )
                return _for_callers(
                    model,
                    decode_shared(
                        call, passes.make_steps, start, input_ids, logits_processor, stopping_criteria, streamer
                    ),
                )
        if call.must_share:  # its prompts cannot use the given cache
            model_kwargs[CACHE] = call.stock_cache()
        require_same_draws(call, "transformers")
        call.ranks.watchdog.enter_foreign_loop()
    if active_call is not None and not isinstance(model_kwargs.get(CACHE), SharedContextCache):
        active_call.give_back(model_kwargs)
    elif active_call is not None and active_call.inputs is not None:
        model_kwargs |= active_call.inputs.of_each_pass(model)  # needed if the first pass runs stock after all
    mode = generation_config.get_generation_mode(model_kwargs.get("assistant_model"))
    stock = getattr(type(model), GENERATION_MODES_MAPPING[mode])
    if "inputs_tensor" in inspect.signature(stock).parameters:  # passed to loops that accept it
        model_kwargs["inputs_tensor"] = inputs_tensor
    if active_call is not None and active_call.model is model and active_call.structure is not None:
        ranks = active_call.structure.ranks
        stopping_criteria = agreed_criteria(ranks, stopping_criteria, input_ids.device)
        if ranks.count > 1:  # the criteria have it; a draft that ended by it would be shorter on one of them
            generation_config.max_time = None
    output = stock(
        model,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        synced_gpus=synced_gpus,
        streamer=streamer,
        **model_kwargs,
    )
    return _for_callers(model, output)


def _for_callers(model: PreTrainedModel, output: Any) -> Any:
    """An output without a shared cache where a class's own `generate` would read each row's tensors in it."""
    if not reads_its_cache(type(model)) or not isinstance(output, ModelOutput):
        return output
    if not isinstance(output.get(CACHE), SharedContextCache):
        return output
    return type(output)(**{name: value for name, value in output.items() if name != CACHE})
