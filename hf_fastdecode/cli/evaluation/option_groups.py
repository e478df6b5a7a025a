"""Commands that take groups of options, each group a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def expand_option_groups(function: Callable[..., None]) -> Callable[..., None]:
    """A command for typer whose options are the parameters, and the fields of parameters that are dataclasses.

    Options that several commands share are then written once, with their defaults and help.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hints[name] for name in signature(function).parameters if is_dataclass(hints[name])}
    options: list[Parameter] = []
    for name, parameter in signature(function).parameters.items():
        if name in groups:
            annotations = get_type_hints(groups[name], include_extras=True)
            options += [
                Parameter(
                    field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=annotations[field.name]
                )
                for field in fields(groups[name])
            ]
        else:
            options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(function)
    def command(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        function(**made, **given)

    vars(command)["__signature__"] = Signature(options)
    command.__annotations__ = {option.name: option.annotation for option in options}
    return command
