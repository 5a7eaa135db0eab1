"""Stand-in: sglang's grammar modules import names from xgrammar (43 MB) that nothing here calls."""

from pydantic import BaseModel


class StructuralTag(BaseModel):
    pass


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
