"""``python -m benchmarks``."""

from hf_fastdecode.cli.interrupts import exit_on_interrupt


def main() -> None:
    """Run a command and leave by `SystemExit`."""
    with exit_on_interrupt():
        from typer.main import get_command

        from .cli import app

        command = get_command(app)
    command.main(prog_name="python -m benchmarks")


if __name__ == "__main__":
    main()
