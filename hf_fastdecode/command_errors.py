"""The error that ends a command."""

import textwrap


class CommandError(ValueError):
    """Something that the user can set right, told in one line: the value, the bound and the remedy.

    Args:
        message: The line.
        exit_code: The command's exit status: 2 for bad input, 1 for a check that failed.
    """

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


def one_line(error: BaseException, width: int = 240) -> str:
    """An error of another library in one line of at most so many letters."""
    return textwrap.shorten(str(error) or type(error).__name__, width, placeholder=" …").rstrip(".")
