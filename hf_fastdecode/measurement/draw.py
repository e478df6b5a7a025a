"""Errors of drawing samples that a user can set right, each told in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_fastdecode.generation.decoding.token_log_probs import NotFiniteError

from ..errors import CommandError, out_of_memory


@contextmanager
def told(model: Any, memory_error: Callable[[], Exception]) -> Iterator[None]:
    """Within, memory that runs out and logits that are not finite end in one line.

    Args:
        model: That draws, with a `TokenLogProbs` that looks at its logits.
        memory_error: Makes the error to raise where memory ran out.

    Raises:
        CommandError: The logits are not finite.
    """
    try:
        yield
    except (RuntimeError, MemoryError, NotFiniteError) as error:
        if out_of_memory(error):
            raise memory_error() from error
        # What torch.multinomial says of a later step than the first.
        if not isinstance(error, NotFiniteError) and "probability tensor contains" not in str(error):
            raise
        weights = (name for name, weight in model.named_parameters() if not bool(weight.isfinite().all()))
        if culprit := next(weights, None):
            reason = f"its weight {culprit} holds NaN or infinity; get the checkpoint again"
        else:
            reason = f"numbers are too large for {str(model.dtype).removeprefix('torch.')}; try --dtype float32"
        raise CommandError(f"the model's logits are not finite: {reason}") from error
