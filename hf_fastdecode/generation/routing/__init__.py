"""Which experts a mixture's routers choose: recorded in `generate`, and replayed in later passes."""
