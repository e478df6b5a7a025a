"""Products and attention whose sums have one order, whatever other rows a launch has and wherever a row stands."""
