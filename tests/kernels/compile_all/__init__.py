"""Every kernel and launch configuration compiled, without a GPU: ``python -m tests.kernels.compile_all [FOLDER ...]``.

Each FOLDER holds a version of Triton; the installed one follows. For each GPU of `pretended`, a process pretends to
run on it: the package chooses its launch parameters and launches its kernels over tensors without memory (`attention`,
`slim_layers`, `other_parts`), and what would be launched is compiled down to machine code instead (`__main__`). Taking
more shared memory than a program can have is a failure. Of the launches found, as few are compiled as show every value
of an option, every pair of tile sizes and the largest tiles (`launches`). Triton keeps what it has compiled: a second
run takes seconds.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported
