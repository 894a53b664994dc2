"""Random functions, as Python source: regions, decorators, closures, control flow, lists, forks and policies.

Each is run as Python in eager mode and in the front ends; see script_runs.py. No expression occurs twice: TorchScript
makes one of equal ones, and gradients then add up in another order than in eager code. Three faults of torch.autocast
in eager code are kept out: low formats are not mixed in one program (it reuses a weight's cast in the other format, or
crashes), so a region that names no dtype is written where another has chosen the program's; no region object is entered
inside itself (autocast then stays on for good); and sparse products are given no gradients (their backward outside of
the region raises). Half of them give every value that they compute: TorchScript drops what nothing uses, errors
included.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

HEADER = """
from typing import Dict, List, Optional, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowcast as nc

LOW = {low}
POLICY = nc.Policy.native().with_rules(
    nc.Rule("aten.softmax", "lower"), nc.Rule("aten.relu", "full"), nc.Rule("aten.layer_norm", "inside"), name="custom"
)
REGION = torch.autocast("cpu", dtype=LOW)
HELD, OUTERMOST = torch.autocast("cpu", dtype=LOW), torch.autocast("cpu", dtype=LOW)
"""
HELPERS = {
    "plain": """
def plain(a, w):
    return torch.mm(a, w)
""",
    "off": """
def off(a, w):
    with torch.autocast("cpu", enabled=False):
        return torch.mm(a.float(), w) + 1
""",
    "leaving": """
def leaving(a, w, n: int):
    with torch.autocast("cpu", dtype=LOW):
        if n > 1:
            return torch.mm(a, w)
        a = torch.mm(a + 1, w)
    return a.float()
""",
    # decorators
    "decorated": """
@torch.autocast("cpu", dtype=LOW)
def decorated(a, w):
    return torch.softmax(torch.mm(a, w), -1)
""",
    "amp": """
@torch.amp.autocast("cpu", LOW)
def amp(a, w):
    return torch.mm(a, w) - 1
""",
    "cpu_amp": """
@torch.cpu.amp.autocast(True, LOW)
def cpu_amp(a, w):
    return torch.mm(a, w) - 2
""",
    "ours": """
@nc.autocast("cpu", LOW, policy="{policy}")
def ours(a, w):
    return F.relu(torch.mm(a, w))
""",
    "held": """
@HELD
def held(a, w):
    return torch.mm(a, w) + 3
""",
    "switched_off": """
@torch.autocast("cpu", enabled=False)
def switched_off(a, w):
    return torch.mm(a.float(), w) + 4
""",
    "unnamed": """
@torch.autocast("cpu")
def unnamed(a, w):
    return torch.mm(a, w) + 5
""",
    "applied": """
def below(a, w):
    return torch.mm(a, w) + 6


applied = nc.autocast("cpu", LOW)(below)
""",
    "stacked": """
@torch.autocast("cpu", enabled=False)
@nc.autocast("cpu", LOW, policy=POLICY)
def stacked(a, w):
    return torch.softmax(torch.mm(a, w) + 7, -1)
""",
    "stacked_off": """
@torch.autocast("cpu", dtype=LOW)
@torch.amp.autocast("cpu", enabled=False)
def stacked_off(a, w):
    return torch.mm(a.float(), w) + 8
""",
    "made": """
def make_function(low, enabled, policy):
    @torch.autocast("cpu", dtype=low)
    def made(a, w):
        return torch.mm(a, w) + 9

    @torch.autocast("cpu", low, enabled)
    def made_off(a, w):
        return torch.mm(a.float(), w) + 10

    @nc.autocast("cpu", low, policy=policy)
    def made_ours(a, w):
        return torch.softmax(torch.mm(a, w) + 11, -1)

    return made, made_off, made_ours


made, made_off, made_ours = make_function(LOW, False, POLICY)
""",
    "closing": """
def make_closing(low, region, policy):
    def closing(a, w):
        with torch.autocast("cpu", dtype=low):
            y = torch.mm(a, w) + 12
        with region:
            z = torch.mm(y.float(), w)
        with nc.autocast("cpu", low, policy=policy):
            return torch.softmax(torch.mm(z.float(), w), -1)

    return closing


closing = make_closing(LOW, torch.autocast("cpu", dtype=LOW), POLICY)
""",
    "inheriting": """
def inheriting(a, w):
    with torch.autocast("cpu"):
        return torch.mm(a, w) + 13
""",
    # early returns whose conditions refine types
    "maybe": """
def maybe(a, w, m: Optional[Tensor]):
    with torch.autocast("cpu", dtype=LOW):
        if m is not None and m.dim() > 1:
            return torch.mm(a, m)
        a = torch.mm(a + 14, w)
    return a.float()
""",
    "neither": """
def neither(a, w, m: Optional[Tensor]):
    with torch.autocast("cpu", dtype=LOW):
        if m is None:
            return torch.mm(a + 15, w)
        return torch.mm(a, m)
""",
    "either": """
def either(a, w: Union[Tensor, List[Tensor]]):
    with torch.autocast("cpu", dtype=LOW):
        if isinstance(w, Tensor):
            return torch.mm(a, w)
        for t in w:
            a = torch.mm(a, t)
            if a.dim() > 2:
                return a
    return a
""",
    "scripting": """
def scripting(a, w):
    with torch.autocast("cpu", dtype=LOW):
        if torch.jit.is_scripting():
            return torch.mm(a, w) + 16
        return torch.mm(a, w) + 16
""",
}
TOLD = {"made_off": "made", "made_ours": "made"}  # helpers that the text of another makes
METHODS = {
    "method": """
    def method(self, a, w):
        with torch.autocast("cpu", dtype=LOW):
            if hasattr(self, "weight") and a.dim() > 1:
                return torch.mm(a, self.weight) + 17
        return torch.mm(a, w)
""",
    "decorated_method": """
    @torch.autocast("cpu", dtype=LOW)
    def decorated_method(self, a, w):
        return torch.mm(a, w) + 18
""",
    "static_method": """
    @staticmethod
    @nc.autocast("cpu", LOW, policy=POLICY)
    def static_method(a, w):
        return torch.softmax(torch.mm(a, w) + 19, -1)
""",
}
NAMES = ("v0", "v1", "v2")
OPS = (
    "torch.mm({a} * {c}, {w})", "F.linear({a} * {c}, {w}, b)", "torch.matmul({a} * {c}, {b})", "({a} * {c} + {b})",
    "torch.cat([{a} * {c}, {b}])[:4]", "torch.stack([{a} * {c}, {b}])[0]", "torch.softmax({a} * {c}, -1)",
    "F.layer_norm({a} * {c}, [4])", "F.relu({a} * {c})", "torch.tanh({a} * {c}).exp()", "({a} * {c}).float()",
    "({a} * {c}).clone().mul_(0.5)", "F.gelu({a} * {c})", "torch.einsum('ij,jk->ik', {a} * {c}, {b})",
    "torch.addmm({a} * {c}, {b}, {w})", "torch.where({b} > 0, {a} * {c}, {b})",
    "({a} * {c}).sum(0, keepdim=True) * {b}", "F.mse_loss({a} * {c}, {b}) * {b}",
    "torch.bmm(({a} * {c})[None], {b}[None].to({a}.dtype))[0]", "({a} * {c}) @ {w}",
    "torch.sparse.mm(({a} * {c}).detach().to_sparse(), {b}.detach())",
    "torch.sparse.mm(torch.eye(4).to_sparse(), {w}.detach())", "torch.cdist({a} * {c}, {w})",
)  # fmt: skip
CALLS = (
    *(f"{name}({{a}} * {{c}}, {{w}})" for name in (
        "plain", "off", "decorated", "amp", "cpu_amp", "ours", "held", "switched_off", "applied", "stacked",
        "stacked_off", "made", "made_off", "made_ours", "closing", "either", "scripting",
    )),
    "leaving({a} * {c}, {w}, n)", "maybe({a} * {c}, {w}, {w2})", "maybe({a} * {c}, {w}, None)",
    "maybe({a} * {c}, {w}, b)", "neither({a} * {c}, {w}, {w2})", "neither({a} * {c}, {w}, None)",
    "either({a} * {c}, [{w}, {w2}])",
)  # fmt: skip
PLAIN_CALLS = tuple(
    call for call in CALLS if not re.search("@|nc.autocast", HELPERS.get(call.partition("(")[0], "@"))
)  # fmt: skip
"""Calls of helpers that torch.jit.script has code for."""
INHERITING = ("inheriting({a} * {c}, {w})",)
UNNAMED = ("unnamed({a} * {c}, {w})",)
METHOD_CALLS = tuple(f"self.{name}({{a}} * {{c}}, {{w}})" for name in METHODS)
FORKS = ("plain", "decorated", "made_ours", "off", "closing")
REGIONS = (
    'torch.autocast("cpu", dtype=LOW)', 'torch.autocast("cpu", enabled=False)', "REGION",
    'torch.autocast("cpu", dtype=LOW, enabled=flag)', 'nc.autocast("cpu", LOW, policy=POLICY)',
    'nc.autocast("cpu", LOW, policy="safe")', "torch.cpu.amp.autocast(dtype=LOW)", 'torch.amp.autocast("cpu", LOW)',
    'torch.autocast("cpu", dtype=LOW, cache_enabled=False)', "first if flag else second",
    "torch.autocast(x.device.type, dtype=LOW)", "torch.autocast(device_type=x.device.type, dtype=LOW, enabled=flag)",
)  # fmt: skip
INHERITED = ('torch.autocast("cpu")', 'nc.autocast("cpu")', "torch.autocast(x.device.type)")
"""They take the dtype of the region around them, or torch's default where there is none."""
CLOSED = ('torch.autocast("cpu", dtype=low)', "region", 'nc.autocast("cpu", low, policy=policy)')
"""Those of a program that a factory made: what they name are the factory's arguments."""
OBJECTS = ("REGION", "first if flag else second", "region")
HOLDERS = ("function", "function", "decorated", "closure", "module", "module", "made module")
DECORATORS = ('torch.autocast("cpu", dtype=LOW)', 'nc.autocast("cpu", LOW, policy=POLICY)', "OUTERMOST",
              'torch.autocast("cpu", enabled=False)')  # fmt: skip


@dataclass(frozen=True)
class Scope:
    """Where a statement stands. entered: region objects around it. named: whether a region around has the dtype LOW."""

    depth: int = 0
    in_loop: bool = False
    entered: tuple[str, ...] = ()
    named: bool = False
    weights: tuple[str, ...] = ("w", "w", "x")


class Drawing:
    """One program, made of choices. pick: gives one of several, as a strategy or a generator of random numbers does."""

    def __init__(self, pick: Callable[[Sequence], object]):
        self.pick = pick
        self.number = 0
        self.low = pick(("torch.bfloat16", "torch.float16"))
        self.keeps = pick((True, False))
        self.plain = pick((False, False, False, True))
        self.holder = pick(("function", "module") if self.plain else HOLDERS)

    def drawn(self) -> str:
        """The source of a module with a `program(x, w, b, flag: bool, n: int)`."""
        pick, lists = self.pick, self.pick((True, False))
        outside = self.holder in ("decorated", "closure", "made module")
        around = pick(DECORATORS) if outside else None
        weights = ("w", "w", "x") + ("ws[0]", "ws[1]", "named['w']", "o[0]") * lists
        weights += ("self.weight", "self.weight") * ("module" in self.holder)
        named = self.low == "torch.bfloat16" or (around is not None and "enabled=False" not in around)
        self.lists = lists
        lines = [
            '    first = torch.autocast("cpu", dtype=LOW)', '    second = torch.autocast("cpu", enabled=False)',
            "    kept: List[Tensor] = []", "    v0, v1, v2 = x * 1.5, x * 0.75, x * 1.25",
            *["    ws, o = [w, x], [x]", "    named: Dict[str, Tensor] = {'w': w, 'x': x}"] * lists,
            *self.block("    ", Scope(named=named, weights=weights)),
            f"    {self.give}",
        ]  # fmt: skip
        arguments, result = "x: Tensor, w: Tensor, b: Tensor, flag: bool, n: int", "List[Tensor]"
        body = "\n".join(lines)
        deeper = "\n".join(f"    {line}" for line in lines)
        init = "def __init__(self):\n        super().__init__()\n        self.weight = nn.Parameter(torch.eye(4) / 2)\n"
        methods = "".join(text for name, text in METHODS.items() if f"self.{name}(" in body)
        text = {
            "function": f"def program({arguments}):\n{body}",
            "decorated": f"@{around}\ndef program({arguments}):\n{body}",
            "closure": f"def make(low, region, policy):\n    @{around}\n    def program({arguments}):\n{deeper}\n\n"
            '    return program\n\n\nprogram = make(LOW, torch.autocast("cpu", dtype=LOW), POLICY)',
            "module": f"class Model(nn.Module):\n    {init}{methods}\n    def forward(self, {arguments}):\n{deeper}"
            "\n\n\nprogram = Model()",
        }
        made = text["module"].replace("    def forward", f"    @{around}\n    def forward")
        made = made.replace("program = Model()", "")
        made = "\n".join(f"    {line}".rstrip() for line in made.strip().splitlines())
        text["made module"] = (
            f"def make(low, region, policy):\n{made}\n\n    return Model()\n\n\n"
            'program = make(LOW, torch.autocast("cpu", dtype=LOW), POLICY)'
        )
        found = text[self.holder].replace(f"{arguments})", f"{arguments}) -> {result}")
        head = HEADER.format(low=self.low)
        used = [name for name in HELPERS if self.uses(found, name)]
        policy = pick(("native", "safe"))
        parts = [HELPERS[name].replace("{policy}", policy) for name in used] + [found]
        if self.plain:  # torch.jit.script reads no dtype off a name
            parts = [part.replace("LOW", self.low) for part in parts]
        parts = [head, *parts]
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"

    def uses(self, text: str, helper: str) -> bool:
        names = [helper, *[name for name, home in TOLD.items() if home == helper]]
        return any(re.search(rf"\b{name}[(,]", text) for name in names)

    @property
    def give(self) -> str:
        return f"return kept + {'o + ' * self.lists}[v0, v1, v2]"

    def constant(self) -> str:
        self.number += 1
        return f"{1 + self.number / 64}"

    def filled(self, text: str, scope: Scope, **more: str) -> str:
        pick = self.pick
        names = {"a": pick(NAMES), "b": pick(NAMES), "c": self.constant(), "w": pick(scope.weights)}
        return text.format(**{**names, "w2": pick(scope.weights) if "{w2}" in text else "", **more})

    def assign(self, margin: str, scope: Scope) -> list[str]:
        kinds = [OPS, OPS, PLAIN_CALLS if self.plain else CALLS] + [INHERITING] * scope.named
        if not self.plain:
            kinds += [METHOD_CALLS] * ("module" in self.holder) + [UNNAMED] * (self.low == "torch.bfloat16")
        elif self.holder == "module":
            kinds.append(METHOD_CALLS[:1])
        name = self.pick(NAMES)
        return self.kept(margin, [f"{margin}{name} = {self.filled(self.pick(self.pick(kinds)), scope)}"], name)

    def kept(self, margin: str, lines: list[str], name: str) -> list[str]:
        return [*lines, f"{margin}kept.append({name})"] if self.keeps else lines

    def listed(self, margin: str, scope: Scope) -> list[str]:
        """Tensors out of lists and dicts, and into them."""
        name, number, fill = self.pick(NAMES), self.number, self.filled
        kind = self.pick(("append", "append", "comprehension", "set", "update", "loop", "items", "fork", "optional"))
        if kind == "append":
            return [margin + fill("o.append(torch.mm(o[-1], {w}))", scope)]
        if kind == "comprehension":
            lines = [fill(f"{name} = {{a}} * {{c}}", scope), f"m{number} = [torch.mm({name}, t) for t in ws]",
                     f"{name} = m{number}[0] + m{number}[-1]"]  # fmt: skip
        elif kind == "set":
            lines = [fill("ws[1] = {w} * {c}", scope), f"{name} = torch.mm({name}, ws[1])"]
        elif kind == "update":
            lines = [fill("named['t'] = torch.mm({a} * {c}, {w})", scope), f"{name} = {name} + named['t']"]
        elif kind == "loop":
            inner = replace(scope, depth=scope.depth + 1, in_loop=True, weights=(*scope.weights, *[f"t{number}"] * 3))
            chosen = fill(f"for t{number} in [{{w}}, {{w2}}]:", scope)
            lines = [chosen, fill(f"    {name} = torch.mm({name} * {{c}}, t{number})", scope)]
            return [margin + line for line in lines] + self.block(f"{margin}    ", inner)
        elif kind == "items":
            lines = [f"for k{number}, t{number} in named.items():",
                     fill(f"    {name} = torch.mm({name} * {{c}}, t{number})", scope)]  # fmt: skip
        elif kind == "fork":
            text = "f{n} = torch.jit.fork({h}, {a} * {c}, {w})"
            lines = [fill(text, scope, n=str(number), h=self.pick(FORKS[:1] if self.plain else FORKS)),
                     fill(f"{name} = torch.mm({{a}} * {{c}}, {{w}})", scope),
                     f"{name} = {name} + torch.jit.wait(f{number})"]  # fmt: skip
        else:
            lines = [fill(f"m{number}: Optional[Tensor] = {{w}} if flag else None", scope),
                     f"if m{number} is not None and m{number}.dim() > 1:",
                     fill(f"    {name} = torch.mm({{a}} * {{c}}, m{number})", scope)]  # fmt: skip
            if self.pick((True, False)):
                lines.append(f"    {self.give}")
        return self.kept(margin, [margin + line for line in lines], name)

    def leave(self, margin: str, scope: Scope) -> list[str]:
        how = self.pick(("break", "continue", self.give) if scope.in_loop else (self.give,))
        test = self.pick((f"n == {self.pick((0, 1, 2, 3))}", "n > 1 and v0.dim() > 1 and not flag"))
        return [f"{margin}if {test}:", f"{margin}    {how}"]

    def regions(self, scope: Scope) -> list[str]:
        found = [*REGIONS, *CLOSED * (self.holder in ("closure", "made module"))]
        found += INHERITED * (2 if scope.named else 0)
        if self.plain:
            found = [one for one in found if one.startswith("torch.autocast(")]
        return [region for region in found if region not in scope.entered]

    def names(self, region: str, scope: Scope) -> bool:
        """Whether a region without a dtype has the program's inside of this one."""
        if self.low == "torch.bfloat16":  # the default
            return True
        if "first" in region:  # one of the two is off, and has the default of where it was made
            return False
        return scope.named or any(word in region for word in ("LOW", "low", "REGION", "region"))

    def block(self, margin: str, scope: Scope) -> list[str]:
        lines: list[str] = []
        for _ in range(self.pick((1, 2, 3))):
            kinds = ["assign", "assign", "assign"] + ["with", "with", "if", "for", "leave"] * (scope.depth < 3)
            kinds += ["listed", "listed"] * (self.lists and scope.depth < 3)
            kind, inner = self.pick(kinds), f"{margin}    "
            within = replace(scope, depth=scope.depth + 1)
            if kind == "with":
                region = self.pick(self.regions(scope))
                entered = (*scope.entered, region) if region in OBJECTS else scope.entered
                within = replace(within, entered=entered, named=self.names(region, scope))
                lines += [f"{margin}with {region}:", *self.block(inner, within)]
            elif kind == "if":
                test = self.pick(("flag", "n > 1", "v0.sum() > 0", "not flag"))
                lines += [f"{margin}if {test}:", *self.block(inner, within)]
                if self.pick((True, False)):
                    lines += [f"{margin}else:", *self.block(inner, within)]
            elif kind == "for":
                lines += [f"{margin}for i{scope.depth} in range(n):"]
                lines += self.block(inner, replace(within, in_loop=True))
            else:
                lines += getattr(self, kind)(margin, scope)
        return lines


@st.composite
def functions(draw):
    """The source of a module with a `program`."""
    return Drawing(lambda options: draw(st.sampled_from(options))).drawn()


def numbered(number: int) -> str:
    """The program with a number: the same on every machine."""
    return Drawing(random.Random(number).choice).drawn()


def drawn(text: str) -> str:
    """The part of a program that is not in all of them."""
    return text[text.index("HELD, OUTERMOST =") :].partition("\n")[2].strip()


def uses_all(text: str) -> bool:
    """Whether every value that a program computes is an output."""
    return "kept.append" in text
