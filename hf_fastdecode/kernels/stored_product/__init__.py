"""Products of few rows with matrices that are stored in fp16 with a scale per column."""
