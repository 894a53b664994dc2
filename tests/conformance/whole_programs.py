"""Random programs, as Python source: modules, parts, regions, policies and control flow in any combination.

Each runs as eager code, compiled, exported, as a script and as a trace; see test_whole_programs.py. The front ends
wanted are drawn first, then elements that are legal in all of them. No expression occurs twice, for TorchScript makes
one of equal ones (docs/limits.md), and low formats are not mixed, for torch.autocast in eager code reuses a weight's
cast in the other format. What is known to differ stands in LIMITS, with the document that says so, and in
FAULTS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations

from hypothesis import strategies as st

FRONT_ENDS = ("compile", "export", "script", "trace")  # beside eager code, in which every program runs
EVERYWHERE = frozenset(FRONT_ENDS)
SETS = [frozenset(chosen) for size in (1, 2, 3, 4) for chosen in combinations(FRONT_ENDS, size)]  # each in 8 of 15

HEADER = """
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

LOW = {low}
PARTS = True  # False: parts that would be scripts or traces are Python


def part(make, module):
    return make(module) if PARTS else module


def traced(module):
    return torch.jit.trace(module, (torch.ones(4, 8), torch.ones(4, 8)), check_trace=False)


def traced_by_us(module):
    return nc.trace(module, (torch.ones(4, 8), torch.ones(4, 8)), check_trace=False)

"""


@dataclass(frozen=True, slots=True)
class Program:
    """Source of a module `Program` with `forward(x, y)`, and where it is to run.

    wanted: the front ends for which it was drawn. legal: all in which its elements are legal. around: the arguments of
    the region around it all, as source; empty for none. given: whether front ends are given them, or run in the region.
    gradients: whether it runs with gradients. y: the dtype of the second input.
    """

    text: str
    wanted: frozenset[str]
    legal: frozenset[str]
    around: str
    given: bool
    gradients: bool
    y: str

    def __repr__(self) -> str:
        around = f"{self.around or 'nothing'}, {'given' if self.given else 'open'}"
        return (
            f"# around: {around}; gradients: {self.gradients}; y: {self.y}; legal: {sorted(self.legal)}\n{source(self)}"
        )


def source(program: Program) -> str:
    """The part of the text that was drawn."""
    return program.text.partition(MARK)[2]


MARK = "# the program\n"


@dataclass(frozen=True, slots=True)
class Element:
    """An expression or constructor, and the front ends in which it is legal.

    {a}, {b}: values as they are; {A}, {B}: in fp32 where no region may be on; {c}: a number that occurs once; {w}: an
    8 by 8 weight; {m}: a module.
    """

    text: str
    legal: frozenset[str] = EVERYWHERE
    make: str = ""
    inner: bool = True  # legal in traces inside of regions of the program


def _not(*front_ends: str) -> frozenset[str]:
    return EVERYWHERE - {*front_ends}


EXPRESSIONS = [
    Element(text)
    for text in (
        "{a} * {c} + {b}", "F.relu({a} * {c})", "F.gelu({a} * {c})", "torch.tanh({a} * {c})", "({a} * {c}).float()",
        "({a} * {c}).detach()", "({a} * {c}).to({b}.dtype)", "torch.softmax({a} * {c}, -1)",
        "F.log_softmax({a} * {c}, 1)", "F.layer_norm({a} * {c}, [8])", "torch.cat([{a} * {c}, {b}])[:4]",
        "torch.stack([{a} * {c}, {b}])[0]", "torch.where({b} > 0, {a} * {c}, {b})",
        "({a} * {c}).sum(0, keepdim=True) * {b}",
        "F.mse_loss({a} * {c}, {b}) * {b}", "F.cross_entropy({a} * {c}, ({b} > 0).sum(1).clamp(0, 7)) * {b}",
        "F.nll_loss({a} * {c}, ({b} > 0).sum(1).clamp(0, 7)) * {b}", "F.smooth_l1_loss({a} * {c}, {b}) * {b}",
        "F.binary_cross_entropy_with_logits({a} * {c}, ({b} > 0).to({a}.dtype)) * {b}",
        "({a} * {c}).masked_fill({b} > 0, 0.5)",
        "({a} * {c}).transpose(0, 1).reshape(4, 8)", "torch.cat([({a} * {c})[:, 4:], {b}[:, :4]], 1)",
        "torch.cat(({a} * {c}).chunk(2, 1), 0).view(4, 8)", "({a} * {c}).double().tanh().float()",
        "({a} * {c}).norm() * {b}", "({a} * {c}).std(1, keepdim=True) + {b}", "({a} * {c}).cumsum(1)",
        "({a} * {c}).prod(1, keepdim=True) * {b}", "({a} * {c}).amax(1, keepdim=True) * {b}",
        "torch.sort({a} * {c}, 1)[0]", "F.pad({a} * {c}, (1, 1), mode='reflect')[:, 1:9]",
        "F.pad({a} * {c}, (1, 1))[:, 2:]",
        "F.interpolate(({a} * {c})[None], scale_factor=2.0)[0, :, ::2]", "F.normalize({a} * {c}, dim=1)",
        "F.glu(torch.cat([{a} * {c}, {b}], 1))", "torch.logsumexp({a} * {c}, 1, keepdim=True) + {b}",
        "F.pairwise_distance({a} * {c}, {b})[:, None] * {b}", "F.cosine_similarity({a} * {c}, {b}).mean() + {b}",
        "F.avg_pool1d(({a} * {c})[None], 3, 1, 1)[0]", "F.adaptive_avg_pool1d(({a} * {c})[None], 8)[0]",
        "torch.mm({A} * {c}, {w})", "F.linear({A} * {c}, {w})", "torch.matmul({A} * {c}, {w})", "({A} * {c}) @ {w}.t()",
        "torch.addmm({B}, {A} * {c}, {w})", "torch.bmm(({A} * {c})[None], {w}[None])[0]",
        "torch.baddbmm({B}[None], ({A} * {c})[None], {w}[None])[0]", "({a} * {c}) * {w}[:4]",
        "({a} * {c}) + {w}.sum(0)",
        "({a} * {c}).to(LOW) @ {w}.to(LOW)", "(({A} * {c}) @ ({B}.t() @ {w}[:4])) / 8",
        "torch.mv({w}, ({A} * {c})[0]) * {b}",
        "(({a} * {c}).double() @ {w}.double()).to({b}.dtype)", "F.linear({A} * {c}, {w}, {w}[0])",
        "torch.tensordot({A} * {c}, {w}, dims=1)", "torch.inner({A} * {c}, {w})",
        "torch.linalg.multi_dot([{A} * {c}, {w}, {w}])", "torch.linalg.vector_norm({a} * {c}) * {b}",
        "F.scaled_dot_product_attention(({A} * {c})[None], {B}[None].to({A}.dtype), {B}[None].to({A}.dtype))[0]",
        "torch.cdist({A} * {c}, {B}) @ ({b} * {c}).to(torch.float32)", "(({a} * {c}) > 0).to({b}.dtype) * {b}",
    )
] + [Element("torch.einsum('ij,kj->ik', {A} * {c}, {w})", inner=False)]  # fmt: skip

LAYERS = [
    Element("{m}({A} * {c})", make="nn.Linear(8, 8)"),
    Element("{m}({A} * {c})", make="nn.Linear(8, 8, bias=False)"),
    Element("{m}({a} * {c})", make="nn.LayerNorm(8)"),
    Element("{m}({A} * {c})", make="nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))"),
    Element("{m}({A} * {c})", make="nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))"),
    Element("{m}(({A} * {c})[:, None]).mean(1)", make="nn.Conv1d(1, 2, 3, padding=1)"),
    Element("{m}(({A} * {c}).reshape(4, 2, 2, 2)).flatten(1)", make="nn.Conv2d(2, 2, 3, padding=1)"),
    Element("{m}(({a} > {c}).sum(1)) * {b}", make="nn.Embedding(9, 8)"),
    Element("{m}({a} * {c})", make="nn.BatchNorm1d(8)"),
    Element("{m}({A} * {c})", make="nn.RNNCell(8, 8)"),
    Element("{m}({A} * {c})[0]", make="nn.LSTMCell(8, 8)"),
    Element("{m}(({A} * {c})[None], {B}[None].to({A}.dtype), {B}[None].to({A}.dtype))[0][0]",
            make="nn.MultiheadAttention(8, 2, batch_first=True)"),
]  # fmt: skip

IN_PLACE = (
    "{t}.mul_(0.5)", "{t}.add_({b})", "{t} += {b}", "{t}[:, 0] = {b}[:, 1]", "{t}[:, ::2] = {b}[:, ::2] * {c}",
    "{t}.view(2, 16).add_(1)", "{t}[0].zero_()", "{t}.t().mul_(2)", "{t}[{b} > 0] = 0.5", "{t}.clamp_(max=1)",
    "{t}.relu_()",
)  # fmt: skip

REGIONS = [
    Element('torch.autocast("cpu", dtype=LOW)'),
    Element('torch.autocast("cpu", enabled=False)'),
    Element('nc.autocast("cpu", LOW)'),
    Element('torch.autocast("cpu", dtype=LOW, cache_enabled=False)'),
    Element('nc.autocast("cpu", LOW, policy=POLICY)'),
    Element('nc.autocast("cpu", LOW, policy="safe")'),
    Element('nc.autocast("cpu", enabled=False)'),
]

RULES = (
    'nc.Rule("aten.softmax", "lower")', 'nc.Rule("aten.relu", "full")', 'nc.Rule("aten.layer_norm", "inside")',
    'nc.Rule("aten.linear", "full")', 'nc.Rule("aten.mm", "full")', 'nc.Rule("aten.matmul", "follow")',
    'nc.Rule("aten.gelu", "lower")', 'nc.Rule("aten.cat", "full")', 'nc.Rule("aten.sum", "full")',
    'nc.Rule("aten.linear", "full", module="m0")', 'nc.Rule("aten.linear", "full", module="b0.*")',
    'nc.Rule("aten.*", "full", module_class="Block0")', 'nc.Rule("aten.linear", "to(fp32)", argument="result")',
    'nc.Rule("aten.mul", "lower", module="b0")', 'nc.Rule("module.call", "to(fp32)", module="m0")',
    'nc.Rule("module.call", "full", module_class="Block0")',
    'nc.Rule("module.call", "inside", module_class="*LayerNorm")',
    'nc.Rule("aten.tanh", "full", function="*helper0")',
)  # fmt: skip

PARTS = {
    "Block{n}()": EVERYWHERE,
    "part(torch.jit.script, Block{n}())": frozenset({"script", "trace"}),
    "part(nc.script, Block{n}())": _not("export"),
    "part(traced, Block{n}())": frozenset({"script", "trace"}),
    "part(traced_by_us, Block{n}())": _not("export"),
}


@dataclass(slots=True)
class Body:
    """Where lines are being written.

    on: whether a region is on, None if that depends on the caller. own: lines of the constructor; None in a function.
    legal: what the body must be legal in. give: how it returns. fixed: it is traced with other formats than it
    is called with. inner: in a region that a trace is not given. again: it is run again in the backward, side
    effects included. weights: those of 8 by 8.
    """

    on: bool | None
    own: list[str] | None
    legal: frozenset[str]
    give: str
    fixed: bool = False
    inner: bool = False
    again: bool = False
    weights: list[str] = field(default_factory=list)
    names: tuple[str, ...] = ("v0", "v1", "v2")


class Writer:
    """Draws a program, element by element."""

    def __init__(self, draw, wanted):
        self.draw, self.wanted, self.legal = draw, wanted, EVERYWHERE
        self.counter = self.temporaries = self.blocks = self.helpers = 0
        self.in_torchs_script = False  # torch.jit.script compiles no decorated function
        self.above: list[str] = []  # classes and functions

    def pick(self, choices):
        return self.draw(st.sampled_from(list(choices)))

    def often(self, of):
        return self.draw(st.integers(0, of)) == of

    def constant(self):
        self.counter += 1
        return f"{1 + self.counter / 64}"

    def take(self, body, elements):
        """One of those that are legal here."""

        def fits(element):
            asks = body.fixed and ("dtype" in element.text or "Cell" in element.make)
            counts = body.again and "BatchNorm" in element.make
            traced = element.inner or not body.inner or "trace" not in body.legal
            return body.legal <= element.legal and traced and not asks and not counts

        found = self.pick([element for element in elements if fits(element)])
        self.legal &= found.legal if found.inner or not body.inner else found.legal - {"trace"}
        return found

    def expression(self, body):
        layer = body.own is not None and self.draw(st.booleans())
        element = self.take(body, LAYERS if layer else EXPRESSIONS)
        a, b = self.pick(body.names), self.pick(body.names)
        up = "" if body.on else ".float()"
        values = {"a": a, "b": b, "A": a + up, "B": b + up, "c": self.constant()}
        if "{w}" in element.text:
            values["w"] = self.weight(body)
        if layer:
            values["m"] = self.module(body, element.make)
        return element.text.format(**values)

    def weight(self, body):
        """A weight by its name: one of those that are there, or a new one."""
        if body.own is None:
            return "w"
        if body.weights and self.draw(st.booleans()):
            return self.pick(body.weights)
        name = f"self.w{len(body.own)}"
        body.own.append(f"{name} = nn.Parameter(torch.randn(8, 8) / 3)")
        body.weights.append(name)
        return name

    def module(self, body, make):
        """A module by its name: one that is there, or a new one; a layer's weight may be another's, or frozen."""
        known = [line.partition(" = ")[0] for line in body.own if line.endswith(f" = {make}")]
        if known and self.draw(st.booleans()):
            return self.pick(known)
        name = f"self.m{sum(line.startswith('self.m') and '= nn.' in line for line in body.own)}"
        body.own.append(f"{name} = {make}")
        if make.startswith("nn.Linear"):
            weights = [weight for weight in body.weights if weight.endswith(".weight")]
            kind = self.pick(["its own"] * 8 + ["frozen", "tied"])
            if kind == "tied" and weights:
                body.own.append(f"{name}.weight = {self.pick(weights)}")
            elif kind == "frozen":
                body.own.append(f"{name}.weight.requires_grad_(False)")
            body.weights.append(f"{name}.weight")
        return name

    # -- statements

    def block(self, body, depth, in_loop):
        lines = []
        kinds = ["assign"] * 4 + ["in_place", "helper", "part", "attention", "layers", "buffer"]
        kinds += ["region", "region", "branch", "loop", "no_grad", "leave"] * (depth < 3)
        for _ in range(self.draw(st.integers(1, 3 if depth else 5))):
            kind = self.pick(kinds)
            in_function = body.own is None and kind in ("part", "attention", "layers", "buffer")
            lost = kind == "no_grad" and "trace" in body.legal  # torch.jit.trace does not record it
            if in_function or lost or (kind == "buffer" and body.again):
                kind = "assign"
            lines += getattr(self, f"_{kind}")(body, depth, in_loop)
        return lines

    def within(self, body, depth, in_loop, **changes):
        before = {name: getattr(body, name) for name in changes}
        for name, value in changes.items():
            setattr(body, name, value)
        lines = ["    " + line for line in self.block(body, depth + 1, in_loop)]
        for name, value in before.items():
            setattr(body, name, value)
        return lines

    def _assign(self, body, depth, in_loop):
        return [f"{self.pick(body.names)} = {self.expression(body)}"]

    def _in_place(self, body, depth, in_loop):
        t = f"t{self.temporaries}"
        self.temporaries += 1
        lines = [f"{t} = {self.pick(body.names)} * {self.constant()}"]
        for _ in range(self.draw(st.integers(1, 2))):
            lines.append(self.pick(IN_PLACE).format(t=t, b=self.pick(body.names), c=self.constant()))
        return [*lines, f"{self.pick(body.names)} = {t}"]

    def _region(self, body, depth, in_loop):
        region = self.take(body, REGIONS).text
        return [f"with {region}:", *self.within(body, depth, in_loop, on="enabled=False" not in region, inner=True)]

    def _no_grad(self, body, depth, in_loop):
        self.legal -= {"trace"}
        return ["with torch.no_grad():", *self.within(body, depth, in_loop)]

    def _loop(self, body, depth, in_loop):
        count = "2" if body.own is None else self.pick(["2", "self.count"])
        return [f"for i{depth} in range({count}):", *self.within(body, depth, True)]

    def _branch(self, body, depth, in_loop):
        tests = ["{v}.shape[0] > 2", "{v}.dim() == 2"]
        if body.own is not None:
            tests += ["self.flag", "self.count > 2", "not self.flag"]
        if not body.fixed:
            tests += ["{v}.dtype == LOW"]
        lines = [f"if {self.pick(tests).format(v=self.pick(body.names))}:", *self.within(body, depth, in_loop)]
        if self.draw(st.booleans()):
            lines += ["else:", *self.within(body, depth, in_loop)]
        return lines

    def _leave(self, body, depth, in_loop):
        how = self.pick(["break", "continue", body.give] if in_loop else [body.give])
        test = self.pick(["self.flag", "self.count == 3", "not self.flag"]) if body.own is not None else "v0.dim() == 1"
        return [f"if {test}:", f"    {how}"]

    def _layers(self, body, depth, in_loop):
        name = self.pick(body.names)
        module = self.module(body, "nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])")
        up = "" if body.on else ".float()"
        layer = f"layer{self.temporaries}"
        self.temporaries += 1
        return [f"for {layer} in {module}:", f"    {name} = {layer}({name}{up} * {self.constant()})"]

    def _attention(self, body, depth, in_loop):
        q, k, v = (self.module(body, "nn.Linear(8, 8)") for _ in range(3))
        source, up, n = self.pick(body.names), "" if body.on else ".float()", self.temporaries
        self.temporaries += 1
        heads = ".view(4, 2, 4).transpose(0, 1)"
        lines = [f"{p}{n} = {m}({source}{up} * {self.constant()}){heads}" for p, m in (("q", q), ("k", k), ("u", v))]
        if not body.fixed and self.draw(st.booleans()):
            lines += [f"s{n} = torch.softmax(q{n} @ k{n}.transpose(1, 2) / 2, -1) @ u{n}" if body.on else
                      f"s{n} = torch.softmax(q{n} @ k{n}.transpose(1, 2) / 2, -1).to(u{n}.dtype) @ u{n}"]  # fmt: skip
        else:
            lines += [f"s{n} = F.scaled_dot_product_attention(q{n}, k{n}, u{n})"]
        return [*lines, f"{self.pick(body.names)} = s{n}.transpose(0, 1).reshape(4, 8)"]

    def _buffer(self, body, depth, in_loop):
        line = 'self.register_buffer("count0", torch.ones(8))'
        if line not in body.own:
            body.own.append(line)
        name = self.pick(body.names)
        change = self.pick(
            ["self.count0.mul_(0.5)", f"self.count0.add_(({name} * {self.constant()}).float().mean(0).detach())"]
        )
        return [change, f"{self.pick(body.names)} = {name} * {self.constant()} + self.count0"]

    def _helper(self, body, depth, in_loop):
        """A function of its own, maybe with a decorator."""
        if depth > 2:
            return self._assign(body, depth, in_loop)
        decorator = self.take(body, REGIONS).text if not self.in_torchs_script and self.draw(st.booleans()) else ""
        on = "enabled=False" not in decorator if decorator else None
        inner = Body(on, None, body.legal, "return v0", body.fixed, body.inner or bool(decorator), body.again)
        lines = [
            f"    {line}" for line in ["v2 = v0 * v1", *self.block(inner, 2, False), f"return {self.pick(inner.names)}"]
        ]
        name = f"helper{self.helpers}"
        self.helpers += 1
        self.above += [f"@{decorator}"] * bool(decorator) + [f"def {name}(v0, v1, w):", *lines, "", ""]
        a, b = self.pick(body.names), self.pick(body.names)
        call = f"{name}({a} * {self.constant()}, {b}, {self.weight(body)})"
        return [f"{self.pick(body.names)} = {call}"]

    def _part(self, body, depth, in_loop):
        """A module of its own: plain, checkpointed, a script, a trace."""
        if depth > 1:
            return self._assign(body, depth, in_loop)
        how = self.pick([h for h, legal in PARTS.items() if body.legal <= legal])
        self.legal &= PARTS[how]
        also = {"script"} if "script" in how else {"trace"} if "traced" in how else set()
        fixed = body.fixed or "traced" in how
        again = not also and "script" not in body.legal and self.draw(st.booleans())
        own: list[str] = []
        inner = Body(None, own, body.legal | also, "return v0", fixed, body.inner, body.again or again)
        decorator = self.take(inner, REGIONS).text if not also and self.often(3) else ""
        if decorator:
            inner.on, inner.inner = "enabled=False" not in decorator, True
        self.in_torchs_script = "torch.jit.script" in how
        lines = ["v2 = v0 * v1", *self.block(inner, 2, False), f"return {self.pick(inner.names)} * {self.constant()}"]
        self.in_torchs_script = False
        n = self.blocks
        self.blocks += 1
        self.above += [*class_of(f"Block{n}", own, lines, "v0, v1", decorator), "", ""]
        body.own.append(f"self.b{n} = {how.format(n=n)}")
        a, b, to = self.pick(body.names), self.pick(body.names), self.pick(body.names)
        up = ".float()" if fixed else ""
        arguments = f"({a} * {self.constant()}){up}, {b}{up}"
        if again:
            self.legal -= {"script"}
            return [f"{to} = checkpoint(self.b{n}, {arguments}, use_reentrant=False)"]
        return [f"{to} = self.b{n}({arguments})"]


def class_of(name, own, lines, arguments, decorator=""):
    """Source of a class of modules."""
    return [
        f"class {name}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.flag, self.count = True, 2",
        *[f"        {line}" for line in own],
        "",
        *[f"    @{decorator}"] * bool(decorator),
        f"    def forward(self, {arguments}):",
        *[f"        {line}" for line in lines],
    ]


@st.composite
def programs(draw):
    """A Program."""
    wanted = draw(st.sampled_from(SETS))
    writer = Writer(draw, wanted)
    low = draw(st.sampled_from(["torch.bfloat16", "torch.float16"]))
    around = draw(
        st.sampled_from(
            ['policy="native"', "", 'policy="safe"', "policy=POLICY", 'policy="native", cache_enabled=False']
        )
    )
    given, gradients = draw(st.booleans()), draw(st.integers(0, 3)) > 0
    y = draw(st.sampled_from(["float32", low.partition(".")[2], "float64"]))
    own: list[str] = []
    body = Body(bool(around), own, wanted, "return v0, v1, v2", inner=not given)
    lines = writer.block(body, 0, False)
    rules = draw(st.lists(st.sampled_from(RULES), min_size=1, max_size=3, unique=True))
    forward = ["v0, v1, v2 = x * 1.5, y.to(x.dtype) * 0.75, x * 1.25", *lines, body.give]
    policy = f'POLICY = nc.Policy.native().with_rules({", ".join(rules)}, name="custom")'
    whole = "\n".join([*writer.above, *class_of("Program", own, forward, "x, y")])
    if "POLICY" in whole or "POLICY" in around:
        whole = f"{policy}\n\n\n{whole}"
    text = f"{HEADER.replace('{low}', low)}\n{MARK}{whole.replace('LOW', low)}\n"
    return Program(
        text,
        wanted,
        writer.legal | wanted,
        around,
        given,
        gradients,
        y,
    )


# -- where a front end gives something else


@dataclass(frozen=True, slots=True)
class Known:
    """What a front end gives otherwise than eager code.

    holds: whether a program may show it there, by the program as it is printed. tolerance: of gradients, in relation to
    their size; None: they are not compared; "left out": nothing is. shown: a front end and a small program that show
    it.
    """

    name: str
    holds: Callable[[str, str], bool]
    tolerance: float | str | None = "left out"
    shown: tuple[str, Program] | None = None


def small(own: str, *forward: str, above: str = "", around: str = 'policy="native"', gradients: bool = True) -> Program:
    """A program by hand. own: a statement of the constructor."""
    whole = "\n".join([*([above] if above else []), *class_of("Program", [own], forward, "x, y")])
    text = f"{HEADER.replace('{low}', 'torch.bfloat16')}\n{MARK}{whole.replace('LOW', 'torch.bfloat16')}\n"
    return Program(text, EVERYWHERE, EVERYWHERE, around, True, gradients, "float32")


def block(own: str, *forward: str) -> str:
    """A part of such a program."""
    return "\n".join([*class_of("Block0", [own], forward, "v0, v1"), "", ""])


SCRIPTS, TRACES = ("script", "convert"), ("script", "trace", "convert")
OFF = 'with torch.autocast("cpu", enabled=False):'

COMPOSITES = ("reflect", "nll_loss", "tensordot", "inner(", "multi_dot", "einsum")
LIMITS = [
    Known("docs/limits.md, graphs: a weight used in two graphs (a part breaks them), or inside and outside of a "
          "checkpointed part, is cast in each, so its gradients add up in fp32; PyTorch's: they are zeros in place of "
          "None where a later graph drops an output",
          lambda front, text: front == "compile" and ("part(" in text or "checkpoint(" in text), 0.05),
    Known("docs/internals/torchscript.md: the weight cache holds for one call of a script",
          lambda front, text: front in ("eager", "trace") and "part(nc.script" in text, 0.05),
    Known("docs/internals/torchscript.md: a trace knows no calls of modules and functions inside it",
          lambda front, text: "part(traced" in text and ("module.call" in text or "function=" in text), "left out"),
    Known("docs/limits.md, TorchScript: what composite ops cast is not recorded in regions inside traced code",
          lambda front, text: (front == "trace" or "part(traced" in text) and any(name in text for name in COMPOSITES),
          "left out"),
    Known("docs/limits.md, TorchScript: a trace made outside of a region takes a conversion to its format for a tensor",
          lambda front, text: "part(traced" in text and ".float()" in text, "left out"),
    Known("docs/limits.md, TorchScript: a weight used both cast and uncast in a loop is cast before it",
          lambda front, text: front in SCRIPTS and (" for " in text or " if " in text) and "autocast(" in text, 1e-5),
]  # fmt: skip

FAULTS = [
    Known("the gradient of prod in compiled code (torch.compile's)",
          lambda front, text: front == "compile" and ".prod(" in text, 1e-5,
          ("compile", small("pass", "return ((x * 1.5).prod(1, keepdim=True),)", around=""))),
    Known("docs/limits.md, torch.compile: a backward computes again from a buffer that the forward has changed",
          lambda front, text: front == "compile" and "self.count0." in text, None,
          ("compile", small('self.m0, self.count0 = nn.Linear(8, 8), nn.Buffer(torch.ones(8))', "v0 = self.m0(x * 1.5)",
                            "for _ in range(2):", "    self.count0.mul_(0.5)",
                            "    v0 = F.normalize(v0 * 1.25 + self.count0, dim=1)", "return (v0,)"))),
]  # fmt: skip


def tolerance_of(program: Program, front_end: str) -> float | str | None:
    """The tolerance of gradients, None if they are not compared, "left out" if nothing is."""
    found = [known.tolerance for known in (*LIMITS, *FAULTS) if known.holds(front_end, repr(program))]
    if "left out" in found:
        return "left out"
    return None if None in found else max(found, default=0.0)
