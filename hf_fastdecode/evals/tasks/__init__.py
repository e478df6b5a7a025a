"""Where tasks come from: the package, files in published forms, the hub."""

from __future__ import annotations

__all__ = ["SPLITS", "TASK_NAMES", "TaskIds", "TaskSet", "load_tasks"]
