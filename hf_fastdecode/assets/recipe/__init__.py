"""The recipe of the embedded model: corpus grammar, tokenizer training, model training."""
