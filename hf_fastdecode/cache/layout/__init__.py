"""What each layer of a model stores for later tokens, and how that is found."""
