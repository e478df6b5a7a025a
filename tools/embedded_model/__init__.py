"""How the embedded model and its tasks were made: corpus grammar, tokenizer training, model training."""
