"""Slim models with ``tp_plan="auto"``: two processes split MLPs, embeddings and the head, and each attends alone."""

from __future__ import annotations

import copy
from pathlib import Path

from ..fresh_processes import run_fresh
from ..ports import place_of
from .family_models import family_pair
from .slim_models import pair

RANKS = """
import os, sys, warnings
import torch
from transformers import AutoModelForCausalLM
from torch.distributed.tensor import DTensor
import hf_fastdecode as fd

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
warnings.simplefilter("ignore", FutureWarning)  # of tp_plan
folders, again = sys.argv[1:-1], sys.argv[-1]
os.environ["WORLD_SIZE"] = "2"
second = os.fork() == 0
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(int(second))
ids = torch.arange(3, 90).remainder(61)[None] + 3
sampling = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 6}


def draw(model):
    torch.manual_seed(0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **sampling)


for folder in folders:
    alone = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    split = {name for name, one in model.named_parameters() if isinstance(one, DTensor)}
    assert any("mlp" in name for name in split), split
    assert not any("attn" in name or "attention." in name for name in split), split
    with torch.no_grad():
        expected = alone(ids).logits
        assert (model(ids).logits - expected).norm() < 1e-5 * expected.norm()
    expected = draw(alone)
    assert torch.equal(draw(model), expected)
    with fd.enabled(model, min_saved_tokens=64):
        assert torch.equal(draw(model), expected)
        assert fd.explain(model).last_call.path == "shared", fd.explain(model).last_call.reason
    model.save_pretrained(again)
    torch.distributed.barrier()
    saved = AutoModelForCausalLM.from_pretrained(again).state_dict()
    assert all(torch.equal(one, saved[name]) for name, one in alone.state_dict().items())
    torch.distributed.barrier()
torch.distributed.destroy_process_group()
if second:
    os._exit(0)
assert os.wait()[1] == 0
print("same")
"""


def test_two_ranks(tmp_path: Path) -> None:
    for name, slim in {"llama": pair("mixed")[1], "phi3": family_pair("phi3", "k+r")[1]}.items():
        even = copy.deepcopy(slim)
        even.resize_token_embeddings(98)  # transformers 5.17 splits the head evenly or not at all
        even.save_pretrained(tmp_path / name)
    folders = [str(tmp_path / name) for name in ("llama", "phi3", "again")]
    done = run_fresh(RANKS, *folders, **place_of(2))
    assert done.stdout.splitlines()[-1:] == ["same"], done.stderr
