"""What slim architectures share: attention layers, their caches' layouts, and families as data (names of weights)."""
