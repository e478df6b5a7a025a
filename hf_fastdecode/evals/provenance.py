"""Which versions ran, for the files of a run."""

from __future__ import annotations

import platform


def versions() -> dict[str, str]:
    """Versions of Python, torch, transformers and this package."""
    import torch
    import transformers

    from hf_fastdecode import __version__

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_fastdecode": __version__,
    }
