"""Forward passes over rows that begin alike: shared beside stock."""
