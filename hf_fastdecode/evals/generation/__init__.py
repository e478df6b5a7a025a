"""Drawing many samples of each task, and timing it."""
