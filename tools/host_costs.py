"""Measures what sharing costs a call on the CPU, and writes the table of docs/limits.md.

Calls of tiny models, whose arithmetic takes next to no time, are timed in turns with stock's, by the process's own
time: for one new token, and for some more, with few layers and with many. What sharing saved of prefill and of reads,
by `Savings`, is added to the difference.

Run ``OMP_NUM_THREADS=1 python -m tools.host_costs`` from a clone, and copy the constants that it prints to
`generation/prompts/gain.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, set_seed

import hf_fastdecode as fd
from hf_fastdecode.generation.prompts.gain import HostCosts, Savings
from hf_fastdecode.generation.structure import Structure
from tests.architectures.classes import class_named
from tests.architectures.overrides import OVERRIDES
from tests.architectures.shrink import TOKENS, shrunken
from tests.image_inputs import prompts_with_images

from .pages import DOCS, replace_table

KINDS: Final = {
    "keys and values": "LlamaForCausalLM",
    "images": "Qwen3VLForConditionalGeneration",
    "states": "Qwen3_5ForCausalLM",
    "latents": "DeepseekV3ForCausalLM",
    "an encoder": "T5ForConditionalGeneration",
}
FEW, MANY, ROWS, STEPS, REPEATS = 2, 6, 8, 32, 6
SAMPLES: Final[dict[str, Any]] = {"do_sample": True, "num_return_sequences": ROWS}


def loop_of_a_user(model: PreTrainedModel, input_ids: Tensor, **arguments: Any) -> Any:
    """A ``custom_generate``: transformers' own loop."""
    return cast(Any, type(model))._sample(model, input_ids, **arguments)


OTHER_LOOPS: Final[dict[str, list[dict[str, Any]]]] = {
    "transformers'": [
        {"do_sample": False, "num_beams": ROWS},
        {**SAMPLES, "output_hidden_states": True, "return_dict_in_generate": True},
    ],
    "a user's": [{**SAMPLES, "custom_generate": loop_of_a_user}],
}
HEADER: Final = (
    "| calls with | measured on | a call, ms | a step and layer, µs | a step, µs |\n|---|---|---|---|---|\n"
)


def model_of(name: str, layers: int) -> PreTrainedModel:
    """A random tiny model with so many decoder layers, in fp32."""
    kind = class_named(name)
    config = shrunken(kind.config_class, OVERRIDES.get(name, {}))
    text = config.get_text_config(decoder=True)
    for part in {id(config): config, id(text): text}.values():
        for field in ("num_hidden_layers", "num_decoder_layers"):
            if getattr(part, field, None):
                setattr(part, field, layers)
        if getattr(part, "layer_types", None):
            part.layer_types = (list(part.layer_types) * layers)[:layers]
    torch.manual_seed(0)
    model = cast(PreTrainedModel, kind(config).eval())
    model.generation_config = GenerationConfig(**TOKENS | {"eos_token_id": None})
    return model


def seconds(model: PreTrainedModel, inputs: dict[str, Any], tokens: int) -> float:
    """The process's seconds of a call of so many tokens a row."""
    set_seed(0)
    begin = time.process_time()
    model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens)
    return time.process_time() - begin


def lost(model: PreTrainedModel, inputs: dict[str, Any], tokens: int) -> float:
    """Seconds that a call takes longer than stock's, with what sharing saved of prefill and reads added."""
    stock, shared, saved = float("inf"), float("inf"), 0
    for repeat in range(REPEATS):
        now = seconds(model, inputs, tokens)
        stock = min(stock, now) if repeat else stock
        with fd.enabled(model, min_saved_tokens=0):
            seconds(model, inputs, tokens)
            shared = min(shared, seconds(model, inputs, tokens))
            report = fd.explain(model).last_call
            assert report is not None and report.path == "shared", report
            saved = int(report.reason.split()[0])
    savings = Savings.of(model, Structure(model))
    return shared - stock + saved * (savings.prefill + (tokens - 1) * savings.step)


def measured(kind: str, loop: dict[str, Any]) -> HostCosts:
    """Extra time of calls of one kind over stock in a loop, which these arguments ask for."""
    few, many = (model_of(KINDS[kind], layers) for layers in (FEW, MANY))
    inputs: dict[str, Any] = {"input_ids": torch.randint(3, 60, (1, 52))}
    if kind == "images":
        inputs = prompts_with_images(few, [24, (4, 4), 24])
    inputs |= loop
    first, every = lost(few, inputs, 1), [lost(model, inputs, 1 + STEPS) for model in (few, many)]
    layer = (every[1] - every[0]) / STEPS / (MANY - FEW)
    return HostCosts(first, layer, (every[0] - first) / STEPS - FEW * layer)


def costs_of(kind: str) -> HostCosts:
    """The costs of one kind of calls in this package's loop, what a step takes whatever its layers with these."""
    found = measured(kind, SAMPLES)
    return HostCosts(max(0.0, found.call), found.layer + max(0.0, found.step) / FEW)


def costs_of_loop(loop: str) -> HostCosts:
    """Extra time of a step and of a call in a loop of `OTHER_LOOPS` over this package's."""
    own = measured("keys and values", SAMPLES)
    others = [measured("keys and values", arguments) for arguments in OTHER_LOOPS[loop]]
    few, many = (
        max(0.0, *(one.step + layers * one.layer - own.step - layers * own.layer for one in others))
        for layers in (FEW, MANY)
    )
    layer = max(0.0, min((many - few) / (MANY - FEW), many / MANY))
    return HostCosts(max(0.0, *(one.call - own.call for one in others)), layer, max(0.0, few - FEW * layer))


def rounded(costs: HostCosts) -> HostCosts:
    """Costs to the digits of the table."""
    return HostCosts(round(costs.call, 4), round(costs.layer, 5), round(costs.step, 5))


def line_of(kind: str, name: str, costs: HostCosts) -> str:
    """A line of the table."""
    return f"| {kind} | {name} | {1e3 * costs.call:.1f} | {1e6 * costs.layer:.0f} | {1e6 * costs.step:.0f} |\n"


def main() -> None:
    """Measure, print the constants and write the table."""
    torch.set_num_threads(1)
    lines = []
    for kind, name in KINDS.items():
        costs = rounded(costs_of(kind))
        print(f'    "{kind}": {costs},', flush=True)
        lines.append(line_of(kind, name, costs))
    for loop in OTHER_LOOPS:
        costs = rounded(costs_of_loop(loop))
        print(f'    "{loop}": {costs},', flush=True)
        lines.append(line_of(f"{loop} loop, in addition", KINDS["keys and values"], costs))
    cpu = Path("/proc/cpuinfo").read_text()
    machine = next((line.split(":")[1].strip() for line in cpu.splitlines() if line.startswith("model name")), "a CPU")
    note = f"\nOne thread of {machine}, torch {torch.__version__}, transformers {transformers.__version__}, fp32.\n"
    replace_table(DOCS / "limits.md", "tools.host_costs", HEADER + "".join(lines) + note)


if __name__ == "__main__":
    main()
