"""The file that a command is to write rows to."""

from __future__ import annotations

import csv
from pathlib import Path

from ..errors import CommandError
from ..files import partial_of, read_rows


def check_out(out: Path) -> None:
    """Refuse a file that rows cannot be written to, or that holds something else, before anything is measured."""
    try:
        if out.is_dir():
            raise CommandError(f"--out must be a CSV file, {str(out)!r} is a directory; name a file in it")
        if out.exists() and not out.is_file():
            raise CommandError(f"--out must be a CSV file, {str(out)!r} is a device or a pipe; name a file")
        if out.exists() and out.stat().st_size and not all("way" in row for row in read_rows(out) or [{}]):
            raise CommandError(f"--out {str(out)!r} exists and holds no measured rows; name another file")
        partial = partial_of(out.resolve())
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise CommandError(f"--out {str(out)!r} cannot be written: {error.strerror}; name another file") from error
    except (UnicodeError, csv.Error) as error:
        raise CommandError(f"--out {str(out)!r} exists and is no CSV file ({error}); name another file") from error
