"""GPU kernels: a folder or file per operator.

Every operator raises ValueError where a shape, stride, dtype or value is not as documented, and `KernelFailedError`
where a kernel cannot be compiled or launched on the device; the call can then be repeated with another implementation.
"""
