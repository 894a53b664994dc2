"""The text form of a program: one line per step, byte-stable. `parse_program(print_program(p)) == p`.

```
program forward
region 0: cpu bf16 enabled cached session 0 policy native:5d41402a
block main(%0: fp32[8, 4] cpu grad weight, %1: fp32[2, 4] cpu) {
  %2: bf16[2, 4] cpu = cast(self=%1) in 0 at 0: encoder.0, model.py:12
  %3: bf16[2, 8] cpu grad = aten.linear.default(input=%2, weight=%4) in 0 at 0: encoder.0, model.py:12
  return %3
}
place 0: {"file": "/home/me/model.py", "line": 12, "module_path": "encoder.0"}
```

`!` behind an operand: it is written to. `~1` : the result may share the memory of operand 1. What stands after the
number of a place is there for the reader.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from narrowcast.decide import Region
from narrowcast.errors import Origin, ProgramError
from narrowcast.formats import parse_format
from narrowcast.policy import NOWHERE, Place
from narrowcast.program.model import Block, OpenedRegion, Operand, Program, Step, Value


def print_program(program: Program) -> str:
    """The program as text."""
    places: dict[Place, int] = {}
    lines = [f"program {program.name}"]
    for n, region in enumerate(program.regions):
        r = region.facts
        state = f"{'enabled' if r.enabled else 'disabled'} {'cached' if r.cache else 'uncached'}"
        lines.append(
            f"region {n}: {r.device_type} {r.low} {state} session {region.session} policy {region.policy or '-'}"
            + (f" open {','.join(region.open)}" if region.open else "")
        )
    _print_block(program.body, "", places, lines)
    lines += [f"place {n}: {_print_place(place)}" for place, n in places.items()]
    return "\n".join(lines) + "\n"


def _print_block(block: Block, margin: str, places: dict[Place, int], lines: list[str]) -> None:
    lines.append(f"{margin}block {block.name}({', '.join(_print_value(v) for v in block.parameters)}) {{")
    for step in block.steps:
        lines.append(f"{margin}  {_print_step(step, places)}")
        for inner in step.blocks:
            _print_block(inner, margin + "    ", places, lines)
    lines.append(f"{margin}  return {', '.join(f'%{v}' for v in block.returns)}".rstrip())
    lines.append(f"{margin}}}")


def _print_value(value: Value) -> str:
    text = f"%{value.id}: {value.type}"
    if value.shape is not None:
        text += json.dumps(list(value.shape))
    if value.device:
        text += f" {value.device}"
    return text + " grad" * value.gradient + " weight" * value.weight


def _print_step(step: Step, places: dict[Place, int]) -> str:
    operands = ", ".join(f"{o.name}=%{o.value}{'!' if o.written else ''}" for o in step.operands)
    text = f"{_print_value(step.value)} = {step.op}({operands})"
    if step.constants:
        text += f" with {json.dumps(step.constants)}"
    if step.given:
        text += f" given {','.join(sorted(step.given))}"
    if step.computes:
        text += " computes"
    if step.direction != "forward":
        text += f" {step.direction}"
    if not step.grad_mode:
        text += " nograd"
    if step.aliases:
        text += f" ~{','.join(map(str, step.aliases))}"
    if step.effects:
        text += f" effects {','.join(step.effects)}"
    if step.region is not None:
        text += f" in {','.join(map(str, (step.region, *step.others)))}"
    if step.place != NOWHERE:
        number = places.setdefault(step.place, len(places))
        line = f"{PurePath(step.place.file).name}:{step.place.line}"
        note = step.place.module_path or "(root)"
        note += f", {line}" if step.place.file else ""
        text += f" at {number}: {''.join(c if c.isprintable() else '?' for c in note)}"
    return text


def _print_place(place: Place) -> str:
    return json.dumps({k: v for k, v in asdict(place).items() if v}, sort_keys=True)


# -- reading -----------------------------------------------------------------------------------------------------------

_VALUE = re.compile(r"%(\d+): (\w+)(\[[^\]]*\])?((?: (?!grad\b|weight\b|=)[\w:]+)?)( grad)?( weight)?")
_STEP = re.compile(
    r" = ([^\s(]+)\(([^)]*)\)"
    r'(?: with ("(?:[^"\\]|\\.)*"))?(?: given (\S+))?( computes)?(?: (backward|dgrad|wgrad))?( nograd)?'
    r"(?: ~([\d,]+))?(?: effects (\S+))?(?: in ([\d,]+))?(?: at (\d+): .*)?$"
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
        self.places = {
            int(line[6 : line.index(":")]): self._place(n, line)
            for n, line in enumerate(self.lines)
            if line.startswith("place ")
        }

    def _place(self, n: int, line: str) -> Place:
        try:
            found: dict[str, Any] = json.loads(line.partition(": ")[2])
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
            return Place(**fields)
        except (ValueError, TypeError, AttributeError):
            self.at = n
            raise self._error("a place as JSON") from None

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
        while self.at < len(self.lines) and (not self.lines[self.at] or self.lines[self.at].startswith("place ")):
            self.at += 1
        if self.at < len(self.lines):
            raise self._error("the end, or a place")
        return Program(name, body, tuple(regions))

    def _error(self, wanted: str) -> ProgramError:
        found = self.lines[self.at] if self.at < len(self.lines) else "the end"
        return ProgramError(f"{wanted} in a program", f"found {found!r}", (Origin(self.file, self.at + 1),))

    def _line(self) -> str:
        if self.at >= len(self.lines):
            raise self._error("a step")
        return self.lines[self.at].strip()

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
        op, operands, constants, given, computes, direction, nograd, aliases, effects, within, place = found.groups()
        regions = [int(n) for n in within.split(",")] if within else []
        if place is not None and int(place) not in self.places:
            raise self._error(f"place {place}, which the text lacks,")
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
            self.places[int(place)] if place is not None else NOWHERE,
            tuple(regions[1:]),
        )


def _value(found: re.Match[str]) -> Value:
    number, kind, shape, device, grad, weight = found.groups()
    sizes = tuple(json.loads(shape)) if shape else None
    return Value(int(number), kind, sizes, device.strip(), grad is not None, weight is not None)


def _operand(text: str) -> Operand:
    name, _, value = text.partition("=%")
    return Operand(name, int(value.rstrip("!")), value.endswith("!"))
