"""The lines that --log-json writes to standard error, one object a line, told apart by `event`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from marlin_convert.documents.fields import Count, OneOrMore, Share, Text, UnitName, about

Time = Annotated[Text, about("when, in UTC, as ISO 8601 has it")]


class LogProgress(Struct, frozen=True, omit_defaults=True):
    """How far the run is: at most once a second, and at the end of each stage."""

    event: Annotated[Text, about("the kind of this line", enum=["progress"])]
    time: Time
    stage: Annotated[Text, about("what is being done, such as converting")]
    done: Annotated[Count, about("bytes of this stage that are done")]
    total: Annotated[Count, about("bytes of this stage in all")]
    bytes_per_second: Annotated[Share, about("mean of this stage so far")]
    seconds_left: Annotated[Share | None, about("at that rate; left out where there is none yet")] = None
    unit: Annotated[UnitName | None, about("the unit that was begun last, where it goes by units")] = None
    number: Annotated[OneOrMore | None, about("which one that is")] = None
    units: Annotated[OneOrMore | None, about("of how many")] = None


class LogCompiling(Struct, frozen=True):
    """Code is compiled, which is done once on a machine and kept."""

    event: Annotated[Text, about("the kind of this line", enum=["compiling"])]
    time: Time
    begun: Annotated[bool, about("true where it begins, false where it is done")]


class LogMessage(Struct, frozen=True):
    """Something to know."""

    event: Annotated[Text, about("the kind of this line", enum=["message"])]
    time: Time
    text: Annotated[Text, about("as people read it")]


class LogError(Struct, frozen=True):
    """Why the run ends with another exit code than 0."""

    event: Annotated[Text, about("the kind of this line", enum=["error"])]
    time: Time
    text: Annotated[Text, about("as people read it")]
