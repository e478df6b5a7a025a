"""What happens between `model.generate` and the decode loop: forests from prompts, prefill once, fallbacks."""
