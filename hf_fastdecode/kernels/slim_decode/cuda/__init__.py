"""CUDA C++ of the slim decode kernel on thread block clusters."""
