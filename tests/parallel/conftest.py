"""One start of two processes, and one of four, for the scenarios of all files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..workers import made_once
from .processes import Seen, run_scenarios

SEQUENCE_PARALLEL = [f"test_sequence_parallel_{part}" for part in ("tokens", "caches", "refusals", "steps", "plan")]


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, ...]]:
    return made_once(tmp_path_factory, "seen", lambda: _seen_by_two(tmp_path_factory))


def _seen_by_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, ...]]:
    sizes = {"vocab_size": 98, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "max_position_embeddings": 512}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    folders: dict[str, Path] = {}
    types = {"llama": "llama", "gpt_neox": "gpt_neox", "olmo2": "olmo2", "trained": "llama", "small": "llama"}
    for name, model_type in types.items():
        torch.manual_seed(0)
        own = {} if name == "gpt_neox" else {"num_key_value_heads": 4}
        if name == "small":  # interpreted kernels take time by layer and head
            own = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = AutoConfig.for_model(model_type, **sizes | own)
        folders[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
    files = [*(f"test_tensor_parallel_{part}" for part in ("calls", "layouts", "loops")), "test_loop_passes"]
    files += ["test_gathered_parameters", "test_shared_forward"]
    return run_scenarios(files + SEQUENCE_PARALLEL, folders, tmp_path_factory.mktemp("seen"))


@pytest.fixture(scope="session")
def seen_by_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, ...]]:
    """What three and four processes saw, of contexts or parameters divided between them."""

    def run() -> dict[str, tuple[Seen, ...]]:
        files = [*SEQUENCE_PARALLEL, "test_gathered_parameters"]
        return run_scenarios(files, {}, tmp_path_factory.mktemp("seen"), ranks=(3, 4))

    return made_once(tmp_path_factory, "seen_by_four", run)
