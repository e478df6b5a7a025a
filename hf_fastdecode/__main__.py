"""The command line: ``hf-fastdecode``, and ``python -m hf_fastdecode`` where the package is not installed."""

from .cli.interrupts import exit_on_interrupt


def main(program: str = "hf-fastdecode") -> None:
    """Run a command and leave by `SystemExit`."""
    with exit_on_interrupt():
        from typer.main import get_command

        from .cli.app import app

        command = get_command(app)
    command.main(prog_name=program)


if __name__ == "__main__":
    main("python -m hf_fastdecode")
