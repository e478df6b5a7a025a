"""``python -m hf_fastdecode``: the command line where the package is not installed."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="python -m hf_fastdecode")
