"""Patterns of an ignore list: regular expressions out of a file, in time that only grows with the text.

Python's own engine tries one way after the other and can take for ever. Here all ways are followed at once,
as sets of states, and each step from a set is kept. Known are literal text, `.`, classes, groups, `|`,
`* + ?`, `^` and `$`; what cannot be followed so (looking ahead, counting, referring back) is told apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

#: characters of all patterns, groups in groups
MAX_LENGTH, MAX_DEPTH = 4096, 32
#: steps that are kept, and states that are visited in all to make them
MAX_KEPT, MAX_WORK = 4096, 5_000_000

Test = Callable[[str], bool]
_CLASSES: dict[str, Test] = {
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
}
#: of the names of modules, which share most of them
_PARTS = re.compile(r"[^.]*\.|[^.]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}


class UnknownFormError(ValueError):
    """A regular expression with a form that is not followed here."""


@dataclass
class _State:
    """`test` takes a character, or a place where it is "^" or "$"; None goes on without one."""

    test: Test | str | None
    out: tuple[int, ...]


@dataclass(eq=False)
class _Set:
    """States that are reached together; `moves` are the steps from here that were made before."""

    states: frozenset[int]
    #: whether what comes next does not matter any more
    decided: bool
    #: whether a text that ends here is matched
    ends: bool
    moves: dict[str, _Set] = field(default_factory=dict)


class Patterns:
    """Whether any of some regular expressions matches the beginning of a text."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises UnknownFormError, ValueError for what is no regular expression or longer than any list."""
        if sum(map(len, patterns)) > MAX_LENGTH:
            raise ValueError(f"the patterns have more than {MAX_LENGTH} characters")
        self._states = [_State(None, ())]  # the first is the end
        starts = [_Parser(pattern, self._states).start() for pattern in patterns]
        self._start = self._closure(starts, "^")
        self._kept, self._work = 0, 0
        self._known: dict[frozenset[int], _Set] = {}
        self._after = lru_cache(MAX_KEPT)(self._follow)

    def match(self, text: str) -> bool:
        """Whether one matches. Raises ValueError where following them takes more than any list does."""
        if not text:
            return 0 in self._closure(self._start, "^$")
        at = self._set(self._start)
        for part in _PARTS.findall(text):
            at = self._after(at, part)
        return at.ends

    def _follow(self, at: _Set, part: str) -> _Set:
        """The states after a part of a text."""
        for char in part:
            if at.decided:
                break
            at = at.moves.get(char) or self._step(at, char)
        return at

    def _set(self, states: frozenset[int]) -> _Set:
        if (known := self._known.get(states)) is None:
            ends = 0 in self._closure(states, "$")
            known = self._known[states] = _Set(states, 0 in states or not states, ends)
        return known

    def _step(self, at: _Set, char: str) -> _Set:
        self._work += len(at.states) + 1
        if self._work > MAX_WORK:
            raise ValueError("the patterns are more than can be followed")
        reached: list[int] = []
        for number in at.states:
            state = self._states[number]
            if callable(state.test) and state.test(char):
                reached += state.out
        if self._kept == MAX_KEPT:
            self._kept, self._known = 0, {}
            at = self._set(at.states)
        self._kept += 1
        at.moves[char] = self._set(self._closure(reached, ""))
        return at.moves[char]

    def _closure(self, states: Sequence[int] | frozenset[int], place: str) -> frozenset[int]:
        """Those and all that follow without a character; `place` has the signs of where in the text that
        is.
        """
        found, left = set[int](), list(states)
        while left:
            number = left.pop()
            if number not in found:
                found.add(number)
                if (test := self._states[number].test) is None or (isinstance(test, str) and test in place):
                    left += self._states[number].out
        return frozenset(found)


class _Parser:
    """One pattern into states. Each part is a list of states whose ways out are still open."""

    def __init__(self, text: str, states: list[_State]) -> None:
        self._text, self._at, self._states = text, 0, states

    def start(self) -> int:
        """The state in which the pattern begins."""
        begin, end = self._alternatives(0)
        if self._at < len(self._text):
            raise ValueError("unbalanced parenthesis")
        self._states[end].out = (0,)
        return begin

    def _new(self, test: Test | str | None, *out: int) -> int:
        self._states.append(_State(test, out))
        return len(self._states) - 1

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._next()
        if not char:
            raise ValueError("it ends too early")
        self._at += 1
        return char

    def _alternatives(self, depth: int) -> tuple[int, int]:
        if depth > MAX_DEPTH:
            raise ValueError("groups are nested too deeply")
        ways = [self._sequence(depth)]
        while self._next() == "|":
            self._at += 1
            ways.append(self._sequence(depth))
        end = self._new(None)
        for _, last in ways:
            self._states[last].out = (end,)
        return self._new(None, *(first for first, _ in ways)), end

    def _sequence(self, depth: int) -> tuple[int, int]:
        begin = end = self._new(None)
        while self._next() not in ("", "|", ")"):
            first, last = self._repeated(depth)
            self._states[end].out = (first,)
            end = last
        return begin, end

    def _repeated(self, depth: int) -> tuple[int, int]:
        first, last = self._atom(depth)
        sign = self._next()
        if sign == "{":
            raise UnknownFormError("a counted repetition")
        if not sign or sign not in "*+?":
            return first, last
        self._at += 1
        if self._next() == "?":  # as few as possible: matches the same texts
            self._at += 1
        elif self._next() and self._next() in "*+{":
            raise UnknownFormError("a repetition of a repetition")
        end = self._new(None)
        self._states[last].out = (end,) if sign == "?" else (first, end)
        begin = first if sign == "+" else self._new(None, first, end)
        return begin, end

    def _atom(self, depth: int) -> tuple[int, int]:
        char = self._take()
        if char == "(":
            if self._text.startswith("?:", self._at):
                self._at += 2
            elif self._next() == "?":
                raise UnknownFormError(f"({self._text[self._at : self._at + 2]}")
            part = self._alternatives(depth + 1)
            if self._take() != ")":
                raise ValueError("unbalanced parenthesis")
            return part
        if char in "*+?":
            raise ValueError("nothing to repeat")
        if char in "^$":
            return self._single(char)
        if char == ".":
            return self._single(lambda c: c != "\n")
        if char == "[":
            return self._single(self._class())
        return self._single(self._escaped() if char == "\\" else char.__eq__)

    def _single(self, test: Test | str) -> tuple[int, int]:
        end = self._new(None)
        return self._new(test, end), end

    def _escaped(self) -> Test:
        char = self._take()
        if char.lower() in _CLASSES:
            test = _CLASSES[char.lower()]
            return test if char.islower() else lambda c: not test(c)
        if char.isalnum() and char not in _ESCAPES:
            raise UnknownFormError(f"\\{char}")
        return _ESCAPES.get(char, char).__eq__

    def _class(self) -> Test:
        inverted = self._next() == "^"
        self._at += inverted
        tests: list[Test] = []
        while (char := self._take()) != "]" or not tests:
            if char == "\\":
                tests.append(self._escaped())
            elif self._next() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]", "\\"):
                self._at += 1
                tests.append(_between(char, self._take()))
            else:
                tests.append(char.__eq__)
        return lambda c: any(test(c) for test in tests) is not inverted


def _between(low: str, high: str) -> Test:
    if low > high:
        raise ValueError(f"the range {low}-{high} goes back")
    return lambda c: low <= c <= high
