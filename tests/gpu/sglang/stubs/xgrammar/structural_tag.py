"""Stand-in, as the package beside it."""

from pydantic import BaseModel


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (BaseModel,), {"__module__": __name__})
