"""Forward passes without a cache over rows that begin alike: shared tokens run through the layers once."""
