"""How kernels run in these tests."""

from ..settings import merging_in_pairs, uncaptured  # noqa: F401
