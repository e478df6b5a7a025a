"""Launch of the decode kernels: measured rates, launch parameters, schedules and device tables."""
