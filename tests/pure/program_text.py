"""The text form of a program, read back: `parse_program(print_program(p)) == p`."""

from __future__ import annotations

import json
import re
from typing import Any

from narrowcast.core.decide import Region
from narrowcast.core.policy import NOWHERE, Site
from narrowcast.errors import Origin, ProgramError
from narrowcast.formats import parse_format
from narrowcast.programs.program import Block, OpenedRegion, Operand, Program, Step, Value

_VALUE = re.compile(r"%(\d+): (\w+)(\[[^\]]*\])?((?: (?!grad\b|weight\b|=)[\w:]+)?)( grad)?( weight)?")
_STEP = re.compile(
    r" = ([^\s(]+)\(([^)]*)\)"
    r'(?: with ("(?:[^"\\]|\\.)*"))?(?: given (\S+))?( computes)?(?: (backward|dgrad|wgrad))?( nograd)?'
    r"(?: ~([\d,]+))?(?: effects (\S+))?(?: in ([\d,]+))?(?: #(\d+))?(?: at (\d+): .*)?$"
)
_REGION = re.compile(
    r"region \d+: (\S+) (\S+) (enabled|disabled) (cached|uncached) session (\d+) policy (\S+)(?: open (\S+))?$"
)
_BLOCK = re.compile(r"block (\S+?)\((.*)\) \{$")


def parse_program(text: str, file: str = "<string>") -> Program:
    """The program in the text. ProgramError names file and line of whatever is wrong with it."""
    return _Parser(text, file).run()


class _Parser:
    def __init__(self, text: str, file: str) -> None:
        self.lines = text.split("\n")
        self.file = file
        self.at = 0
        self.sites = {
            int(line[5 : line.index(":")]): self._site(n, line)
            for n, line in enumerate(self.lines)
            if line.startswith("site ")
        }

    def _site(self, n: int, line: str) -> Site:
        try:
            found: dict[str, Any] = json.loads(line.partition(": ")[2])
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
            return Site(**fields)
        except (ValueError, TypeError, AttributeError):
            self.at = n
            raise self._error("a site as JSON") from None

    def run(self) -> Program:
        start, name = self.lines[0][:8], self.lines[0][8:]
        if start != "program ":
            raise self._error("'program '")
        self.at = 1
        regions = []
        while self._line().startswith("region "):
            found = _REGION.match(self.lines[self.at])
            if found is None:
                raise self._error("a region")
            device, low, enabled, cached, session, policy, left_open = found.groups()
            facts = Region(device, parse_format(low), enabled == "enabled", cached == "cached")
            is_open = tuple(left_open.split(",")) if left_open else ()
            regions.append(OpenedRegion(facts, "" if policy == "-" else policy, int(session), is_open))
            self.at += 1
        body = self._block()
        while self.at < len(self.lines) and (not self.lines[self.at] or self.lines[self.at].startswith("site ")):
            self.at += 1
        if self.at < len(self.lines):
            raise self._error("the end, or a site")
        return Program(name, body, tuple(regions))

    def _error(self, wanted: str) -> ProgramError:
        found = self.lines[self.at] if self.at < len(self.lines) else "the end"
        return ProgramError(f"{wanted} in a program", f"found {found!r}", (Origin(self.file, self.at + 1),))

    def _line(self) -> str:
        if self.at >= len(self.lines):
            raise self._error("a step")
        return self.lines[self.at].lstrip()  # a note at the end may be blank

    def _block(self) -> Block:
        head = _BLOCK.match(self._line())
        if head is None:
            raise self._error("a block")
        parameters = self._values(head.group(2))
        self.at += 1
        steps: list[Step] = []
        while not self._line().startswith("return"):
            step = self._step()
            self.at += 1
            blocks = []
            while self._line().startswith("block "):
                blocks.append(self._block())
            steps.append(Step(**{**{f: getattr(step, f) for f in Step.__slots__}, "blocks": tuple(blocks)}))
        returns = tuple(int(v.strip()[1:]) for v in self._line()[6:].split(",") if v.strip())
        self.at += 1
        if self._line() != "}":
            raise self._error("}")
        self.at += 1
        return Block(head.group(1), parameters, tuple(steps), returns)

    def _values(self, text: str) -> tuple[Value, ...]:
        values = []
        position = 0
        while position < len(text):
            found = _VALUE.match(text, position)
            if found is None:
                raise self._error("values")
            values.append(_value(found))
            position = found.end() + 2
        return tuple(values)

    def _step(self) -> Step:
        line = self._line()
        made = _VALUE.match(line)
        found = _STEP.match(line, made.end()) if made else None
        if made is None or found is None:
            raise self._error("a step")
        op, operands, constants, given, computes, direction, nograd, aliases, effects, within, *last = found.groups()
        number, site = last
        regions = [int(n) for n in within.split(",")] if within else []
        if site is not None and int(site) not in self.sites:
            raise self._error(f"site {site}, which the text lacks,")
        return Step(
            _value(made),
            op,
            tuple(_operand(o) for o in operands.split(", ") if o),
            json.loads(constants) if constants else "",
            frozenset(given.split(",")) if given else frozenset(),
            computes is not None,
            regions[0] if regions else None,
            nograd is None,
            direction or "forward",
            tuple(int(n) for n in aliases.split(",")) if aliases else (),
            tuple(effects.split(",")) if effects else (),
            (),
            self.sites[int(site)] if site is not None else NOWHERE,
            tuple(regions[1:]),
            1 if number is None else int(number),
        )


def _value(found: re.Match[str]) -> Value:
    number, kind, shape, device, grad, weight = found.groups()
    sizes = tuple(json.loads(shape)) if shape else None
    return Value(int(number), kind, sizes, device.strip(), grad is not None, weight is not None)


def _operand(text: str) -> Operand:
    name, _, value = text.partition("=%")
    return Operand(name, int(value.rstrip("!")), value.endswith("!"))
