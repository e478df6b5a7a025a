"""GPU kernels: one folder per operator."""
