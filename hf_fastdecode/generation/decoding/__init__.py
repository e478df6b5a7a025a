"""The decoding loop: sampling, stopping criteria, compaction of finished rows."""
