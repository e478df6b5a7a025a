"""What a call gives with its prompts: an encoder's inputs, images, videos or audio, and whose they are."""
