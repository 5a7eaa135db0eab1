"""The families of models that are converted, one module each. A new one is a module and a line here."""

from marlin_convert.models import kimi_k2
from marlin_convert.models.family import register

register(kimi_k2.FAMILY)
