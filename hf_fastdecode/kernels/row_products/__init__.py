"""Products of a few rows with weights as they lie in a model: each weight is read once, at the rate of memory."""
