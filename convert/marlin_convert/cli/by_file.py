"""Commands that are loaded when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click


def examples(*lines: str) -> str:
    """Command lines for the end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  marlin-convert {line}" for line in lines)


class CommandsByFile(click.Group):
    """`names` are its commands in order; NAME is `command` of the module `place` + NAME, so that each costs
    only its own imports.
    """

    def __init__(self, *args: Any, names: Sequence[str], place: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._names, self._place = names, place

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return list(self._names)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is asked for; of one that there is not, the nearest is named."""
        if args[0] not in self._names and (near := get_close_matches(args[0], self._names, 1, 0.5)):
            ctx.fail(f"No such command '{args[0]}'; did you mean {near[0]}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        if cmd_name not in self._names:
            return None
        command = import_module(self._place + cmd_name).command
        assert isinstance(command, click.Command)
        return command
