"""Makes the embedded model and its tasks: corpus grammar, tokenizer training, model training."""
