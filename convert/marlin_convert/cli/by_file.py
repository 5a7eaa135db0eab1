"""Commands that are loaded when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click


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

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        if cmd_name not in self._names:
            return None
        command = import_module(self._place + cmd_name).command
        assert isinstance(command, click.Command)
        return command
