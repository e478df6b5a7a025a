"""Many tokens of layers with states, in segments of one packed row: convolutions and scans in chunks."""
