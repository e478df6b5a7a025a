"""Launch of the decode kernels: cost model, launch parameters, schedules and device tables."""
