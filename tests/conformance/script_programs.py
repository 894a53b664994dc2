"""Random functions, as Python source: regions, control flow, calls and policies in any combination.

Each is run as Python in eager mode and as a script; see test_script_programs.py. No expression occurs twice:
TorchScript makes one of equal ones, and gradients then add up in another order than in eager code. Two faults of
torch.autocast in eager code are kept out: low formats are not mixed in one program (it reuses a weight's cast in the
other format, or crashes), and no region object is entered inside itself (autocast then stays on for good). Half of them
give every value that they compute: TorchScript drops what nothing uses, errors included.
"""

from hypothesis import strategies as st

HEADER = """
from typing import List, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

import narrowcast as nc

LOW = {low}
POLICY = nc.Policy.native().with_rules(
    nc.Rule("aten.softmax", "lower"), nc.Rule("aten.relu", "full"), nc.Rule("aten.layer_norm", "inside"), name="custom"
)
REGION = torch.autocast("cpu", dtype=LOW)


def plain(a, w):
    return torch.mm(a, w)


def off(a, w):
    with torch.autocast("cpu", enabled=False):
        return torch.mm(a.float(), w) + 1


@torch.autocast("cpu", dtype=LOW)
def decorated(a, w):
    return torch.softmax(torch.mm(a, w), -1)


@nc.autocast("cpu", LOW, policy="{policy}")
def ours(a, w):
    return F.relu(torch.mm(a, w))


def leaving(a, w, n: int):
    with torch.autocast("cpu", dtype=LOW):
        if n > 1:
            return torch.mm(a, w)
        a = torch.mm(a + 1, w)
    return a.float()
"""
NAMES = ("v0", "v1", "v2")
OPS = (
    "torch.mm({a} * {c}, w)", "F.linear({a} * {c}, w, b)", "torch.matmul({a} * {c}, {b})", "({a} * {c} + {b})",
    "torch.cat([{a} * {c}, {b}])[:4]", "torch.stack([{a} * {c}, {b}])[0]", "torch.softmax({a} * {c}, -1)",
    "F.layer_norm({a} * {c}, [4])", "F.relu({a} * {c})", "torch.tanh({a} * {c}).exp()", "({a} * {c}).float()",
    "({a} * {c}).clone().mul_(0.5)", "F.gelu({a} * {c})", "torch.einsum('ij,jk->ik', {a} * {c}, {b})",
    "torch.addmm({a} * {c}, {b}, w)", "torch.where({b} > 0, {a} * {c}, {b})", "({a} * {c}).sum(0, keepdim=True) * {b}",
    "F.mse_loss({a} * {c}, {b}) * {b}", "torch.bmm(({a} * {c})[None], {b}[None].to({a}.dtype))[0]",
    "plain({a} * {c}, w)", "off({a} * {c}, w)", "decorated({a} * {c}, w)", "ours({a} * {c}, w)",
    "leaving({a} * {c}, w, n)", "torch.jit.wait(torch.jit.fork(plain, {a} * {c}, w))",
)  # fmt: skip
REGIONS = (
    'torch.autocast("cpu", dtype=LOW)', 'torch.autocast("cpu", enabled=False)', "REGION2",
    'torch.autocast("cpu", dtype=LOW, enabled=flag)', 'nc.autocast("cpu", LOW, policy=POLICY)',
    'nc.autocast("cpu", LOW, policy="safe")', "torch.cpu.amp.autocast(dtype=LOW)",
    'torch.autocast("cpu", dtype=LOW, cache_enabled=False)', "first if flag else second",
)  # fmt: skip

OBJECTS = ("REGION2", "first if flag else second")


@st.composite
def functions(draw):
    """The source of a module with a function `program(x, w, b, flag: bool, n: int)`, and whether it is native only."""
    counter = [0]
    keeps = draw(st.booleans())
    give = "return kept + [v0, v1, v2]"

    def constant():
        counter[0] += 1
        return f"{1 + counter[0] / 64}"

    def assign(margin):
        text = draw(st.sampled_from(OPS))
        a, b = draw(st.sampled_from(NAMES)), draw(st.sampled_from(NAMES))
        name = draw(st.sampled_from(NAMES))
        line = f"{margin}{name} = {text.format(a=a, b=b, c=constant())}"
        return [line, f"{margin}kept.append({name})"] if keeps else [line]

    def block(margin, depth, in_loop, entered=()):
        lines = []
        for _ in range(draw(st.integers(1, 3))):
            kinds = ["assign", "assign", "assign"] + ["with", "if", "for", "leave"] * (depth < 3)
            kind = draw(st.sampled_from(kinds))
            inner = margin + "    "
            if kind == "assign":
                lines += assign(margin)
            elif kind == "with":
                region = draw(st.sampled_from([region for region in REGIONS if region not in entered]))
                within = (*entered, region) if region in OBJECTS else entered
                lines += [f"{margin}with {region}:", *block(inner, depth + 1, in_loop, within)]
            elif kind == "if":
                test = draw(st.sampled_from(["flag", "n > 1", "v0.sum() > 0", "not flag"]))
                lines += [f"{margin}if {test}:", *block(inner, depth + 1, in_loop, entered)]
                if draw(st.booleans()):
                    lines += [f"{margin}else:", *block(inner, depth + 1, in_loop, entered)]
            elif kind == "for":
                lines += [f"{margin}for i{depth} in range(n):", *block(inner, depth + 1, True, entered)]
            else:
                how = draw(st.sampled_from(["break", "continue", give] if in_loop else [give]))
                lines += [f"{margin}if n == {draw(st.integers(0, 3))}:", f"{inner}{how}"]
        return lines

    low = draw(st.sampled_from(["torch.bfloat16", "torch.float16"]))
    policy = draw(st.sampled_from(["native", "safe"]))
    body = block("    ", 0, False)
    text = HEADER.format(low=low, policy=policy) + "\n\n" + "\n".join(
        [
            "def program(x: Tensor, w: Tensor, b: Tensor, flag: bool, n: int):",
            '    first = torch.autocast("cpu", dtype=LOW)',
            '    second = torch.autocast("cpu", enabled=False)',
            "    kept: List[Tensor] = []",
            "    v0, v1, v2 = x * 1.5, x * 0.75, x * 1.25",
            *body,
            f"    {give}",
        ]
    )  # fmt: skip
    head, tail = text.replace("with REGION2", "with REGION").split("POLICY =", 1)
    return f"{head}POLICY ={tail.replace('LOW', low)}\n"


def uses_all(text: str) -> bool:
    """Whether every value that a program computes is an output."""
    return "kept.append" in text


def rounding(text: str) -> float:
    """How much of a gradient may differ because it adds up otherwise than in eager code: 0 is bit for bit.

    Sums in the low format differ where kernels of ours keep a second weight cache in eager code, where forks have their
    own, and where only the running script knows whether a region is on: its casts are kept apart from those around it.
    Sums in fp32 differ where a weight is used as it is and, in a loop or a branch, cast: the cast moves out of there.
    """
    program = text[text.index("def program") :]
    if any(word in program for word in ("nc.autocast", "ours(", "fork", "enabled=flag", "first if")):
        return 0.05
    uncast = any(word in program for word in ("off(", "enabled=False)", "second"))
    return 1e-5 if uncast and any(word in program for word in (" for ", " if ", "leaving(")) else 0.0
