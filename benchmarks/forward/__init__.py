"""Forward passes without a cache over rows that begin alike, scored or trained: cases, ways, time and table."""
