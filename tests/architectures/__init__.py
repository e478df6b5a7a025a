"""Every generating class of transformers, tiny and random: stock's tokens beside those of the enabled model."""
