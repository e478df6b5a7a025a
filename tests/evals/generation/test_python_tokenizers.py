"""Tokenizers without a Rust backend draw samples too."""

from __future__ import annotations

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from hf_fastdecode.evals.generation import RowStopping, draw_rows, samples_of, sharing
from hf_fastdecode.evals.rescore import model_digest
from hf_fastdecode.evals.run_folder import Drawing
from hf_fastdecode.evals.stop_rules import StopWords


def test_rows_end_by_their_rules() -> None:
    tokenizer = ByT5Tokenizer()
    text = "\u00e9a[DONE]b"
    ids = torch.tensor([tokenizer("x" + text, add_special_tokens=False).input_ids])
    stopping = RowStopping(tokenizer, [StopWords(["[DONE]"])], ids[:, :1], [1])
    ended = [bool(stopping(ids[:, : 1 + length], None)[0]) for length in range(1, ids.shape[1])]
    assert ended.index(True) + 1 == len("\u00e9a[DONE]".encode())


def test_samples_are_drawn_both_ways(small) -> None:
    tokenizer = ByT5Tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, pad_token_id=0, eos_token_id=1)
    model = LlamaForCausalLM(config).eval()
    tokenizer.padding_side = "left"
    found = []
    for way in ("shared", "stock"):
        drawing = Drawing(max_new_tokens=6, way=way)
        with sharing(model, drawing):
            drawn = draw_rows(model, tokenizer, small.form, small.tasks[:2], 2, drawing, seed=0)
        found.append([one.completion for one in samples_of(drawn, model, tokenizer, small.form, small.tasks[:2])])
    assert found[0] == found[1]
    assert len(found[0]) == 4
    other = ByT5Tokenizer(extra_ids=100)
    assert model_digest(model, tokenizer) == model_digest(model, ByT5Tokenizer()) != model_digest(model, other)
