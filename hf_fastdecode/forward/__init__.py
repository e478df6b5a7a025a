"""Forward passes without a cache over rows that begin alike: tokens that rows share are computed once."""
