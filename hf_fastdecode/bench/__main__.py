"""``python -m hf_fastdecode.bench``: the commands of the bench where the package is not installed."""

import sys

from ..command_errors import CommandError
from .app import app

if __name__ == "__main__":
    try:
        app(prog_name="python -m hf_fastdecode.bench")
    except CommandError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
