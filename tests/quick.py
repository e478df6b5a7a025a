"""``python -m tests.quick``: some 150 cases, of each kind a few, for the inner loop (`make quick`).

pytest reports an error where a name below is no test, so none leaves this list unnoticed.
"""

from __future__ import annotations

import os
import sys

import pytest

KINDS = {
    "algebra": ["attention/test_partial.py", "attention/test_forest.py"],
    "plan": [*("attention/test_plan.py", "generation/test_planning.py::test_forests_are_those_of_the_oracle")],
    "tables": [
        f"attention/test_step_tables.py::test_{name}"
        for name in ("nodes_alone", "tables_follow_trees_read_in_chains", "captured_steps_keep_their_tiles")
    ],
    "house": ["test_house.py", "cache/test_own_layer.py"],
    "llama": [
        f"generation/test_generate.py::test_{name}"
        for name in (
            *("sampling_arguments_give_stock_tokens[top-p]", "sampling_arguments_give_stock_tokens[eos]"),
            *("scores_logits_and_sequences_are_stocks", "same_prompts_apart_are_still_right"),
        )
    ],
    "greedy": ["generation/test_images.py::test_repeated_prompts_are_one_input"],  # samples and beams as well
    "beams": [
        f"generation/loops/test_results.py::test_tokens_are_those_of_stock[llama-gqa-{call}]"
        for call in ("beams", "beam-sample")
    ],
    "hybrid": ["generation/test_states.py::test_tokens_are_stocks[Qwen3NextForCausalLM]"],
    "latent": ["patches/test_latent_attention.py::test_tokens_equal_stock[without-query-ranks]"],
    "encoder": [
        *("generation/test_encoder_decoders.py::test_samples_end_early_at_stocks_tokens",),
        "generation/test_encoder_decoders.py::test_beams_are_stocks",
    ],
    "image": ["generation/test_images.py::test_different_images"],
    "slim": ["patches/test_families.py::test_greedy_over_padded_rows[qwen2-k]"],
    "two processes": ["parallel/quick.py"],
}
"""By kind, files of this folder and tests in them."""


def main() -> int:
    """Run them with pytest, which takes further arguments; returns its exit code."""
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    names = [f"tests/{name}" for kind in KINDS.values() for name in kind]
    return int(pytest.main(["-m", "not exhaustive", *sys.argv[1:], *names]))


if __name__ == "__main__":
    sys.exit(main())
