"""Training steps of two GPUs whose rows share other numbers of tokens, by NCCL: DDP, and layers divided by FSDP 2."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .processes import Seen, run_scenarios
from .test_shared_forward import check_steps


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, ...]]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    torch.manual_seed(0)
    sizes = {"vocab_size": 98, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, pad_token_id=0)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return run_scenarios(["test_shared_forward"], {"llama": folder}, tmp_path_factory.mktemp("seen"), backend="nccl")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["steps_of_ddp", "steps_of_fsdp_2", "checkpointed_steps_of_fsdp_2"])
def test_steps_are_those_of_stock(seen: dict[str, tuple[Seen, ...]], name: str) -> None:
    check_steps(seen, name)
