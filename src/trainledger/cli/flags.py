"""The flags of a verb, read off its Request: what the command line, the help and the docs share."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import msgspec


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a Request, as the command line and the docs show it.

    name    the field; option: with hyphens
    type    without None; a tuple is written with commas, or repeats
    hyphen  the value may begin with a hyphen
    value   what help shows in place of the value; "" for a switch
    """

    name: str
    option: str
    type: Any
    default: Any
    description: str
    value: str
    group: str
    repeat: bool
    positional: bool
    hyphen: bool

    @property
    def required(self) -> bool:
        """Whether the verb cannot do without it."""
        return self.default is inspect.Parameter.empty

    @property
    def options(self) -> tuple[str, ...]:
        """What is typed: the value's name, the option, or a switch and its opposite."""
        if self.positional:
            return (self.value,)
        return (f"--{self.option}", f"--no-{self.option}") if self.type is bool else (f"--{self.option}",)


def flags(request: type[msgspec.Struct]) -> tuple[Flag, ...]:
    """The fields of a Request, in order."""
    found: list[Flag] = []
    for field in msgspec.structs.fields(request):
        hint, meta = get_args(field.type)
        kind = next((part for part in get_args(hint) if part is not type(None)), hint) if _optional(hint) else hint
        found.append(
            Flag(
                name=field.name,
                option=field.encode_name,
                type=kind,
                default=inspect.Parameter.empty if field.required else field.default,
                description=meta.description,
                value=meta.extra["value"] or "|".join(map(str, get_args(kind))),
                group=meta.extra["group"],
                repeat=meta.extra["repeat"],
                positional=meta.extra["positional"],
                hyphen=meta.extra["hyphen"],
            )
        )
    return tuple(found)


def _optional(hint: object) -> bool:
    return type(None) in get_args(hint)
