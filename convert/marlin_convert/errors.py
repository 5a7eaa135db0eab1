"""Errors that a person can act on, and the exit code of each."""

from __future__ import annotations


class ConvertError(Exception):
    """Base of all errors this project raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 4


class OutputError(ConvertError):
    """Something in an output folder is wrong."""

    exit_code = 1


class UsageError(ConvertError):
    """The request cannot be met: bad options, options that conflict with each other or with an output
    folder.
    """

    exit_code = 2


class SourceError(ConvertError):
    """The source is not what it should be: damaged, incomplete, unknown, or not the one a run began with."""

    exit_code = 3


class MachineError(ConvertError):
    """Disk, network or machine failed; running the same command again continues."""

    exit_code = 4


class MachineWarning(UserWarning):
    """Something this machine does not offer is done without; the result is the same."""


class SourceWarning(UserWarning):
    """Something to know of the source, such as what the kernel could not be asked of it."""
