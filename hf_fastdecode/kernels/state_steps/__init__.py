"""One step of layers with states: convolutions, gated delta rule, Mamba-2, each state read and written once."""
