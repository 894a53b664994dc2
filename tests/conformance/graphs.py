"""The equality table: eager, compiled and exported code compute the same bits, forward and backward.

    python tests/conformance/graphs.py [--models minilm,gpt] [--inductor] [--json FILE]

For each model, low format and policy: `nc.autocast` in eager mode, `nc.compile(backend="aot_eager")` and `nc.export`,
on copies of the model with the same weights, inputs and random numbers. Outputs, every gradient and every buffer are
compared: same dtypes, equal bits. With --inductor besides that Inductor gets the same explicit graphs, and its outputs
are compared within a tolerance: it fuses casts into its loops and rounds intermediate results less often.
"""

import argparse
import copy
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import models

import narrowcast as nc
from narrowcast.frontends.graphs.compiled import watch_graphs
from narrowcast.programs.program import print_program
from narrowcast.reports.results.graphs import CompiledGraph

CUSTOM = nc.Policy.native().with_rules(
    nc.Rule("aten.gelu", "full", reason="activations in fp32"),
    nc.Rule("aten.softmax", "lower", reason="a listed op lowered"),
    nc.Rule("aten.layer_norm", "inside", reason="fp32 inside"),
    nc.Rule("aten.relu", "full", reason="an unlisted op in fp32"),
    nc.Rule("aten.max_pool2d", "full", reason="a composite op in fp32"),
    nc.Rule("aten.silu", "to(fp16)", reason="a third format"),
    nc.Rule("aten.linear", "full", module="*.1", reason="by place: what the second of a list holds"),
    name="custom",
)
POLICIES = {"native": None, "safe": "safe", "custom": CUSTOM}
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
INDUCTOR_TOLERANCE = 0.05  # of the largest output: some twenty bf16 roundings (2^-9 each) that one side does not make


class Run:
    """What one run gave: outputs, gradients by name, buffers by name; or the error that it ended with."""

    def __init__(self, model: torch.nn.Module, call: Callable, buffers_of: torch.nn.Module | None = None) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.error = ""
        torch.manual_seed(0)
        try:
            outputs = call()
        except RuntimeError as error:
            self.error = str(error).splitlines()[0]
            return
        leaves = [t for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        self.values.update({f"output {n}": t.detach().clone() for n, t in enumerate(leaves)})
        torch.manual_seed(1)  # dense gradients: sum() would send expanded ones, for which kernels take other paths
        loss = [(t.float() * torch.randn(t.shape)).sum() for t in leaves if t.requires_grad]
        if loss:
            torch.stack(loss).sum().backward()
        self.values.update({f"d {n}": p.grad for n, p in model.named_parameters() if p.grad is not None})
        self.values.update({f"buffer {n}": b.clone() for n, b in (buffers_of or model).named_buffers()})

    def differences(self, other: "Run") -> list[str]:
        """Names of values that differ in dtype or in a bit."""
        if self.error or other.error:
            return [] if bool(self.error) == bool(other.error) else [f"error: {self.error or other.error}"]
        found = list(self.values.keys() ^ other.values.keys())
        for name in self.values.keys() & other.values.keys():
            a, b = self.values[name], other.values[name]
            if a.dtype != b.dtype or not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
                found.append(f"{name} ({a.dtype}, {b.dtype}, {(a.float() - b.float()).abs().max().item():.1e})")
        return found


def check(loaded: Callable, dtype: torch.dtype, policy: nc.Policy | str | None, inductor: bool) -> dict[str, object]:
    """One row of the table."""
    torch.manual_seed(0)
    model, args, kwargs = loaded()
    region = {"under": nc.autocast("cpu", dtype, policy=policy)}
    row: dict[str, object] = {}

    def eager(model: torch.nn.Module) -> object:
        with nc.autocast("cpu", dtype, policy=policy):
            return model(*args, **kwargs)

    first, second, third = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    reference = Run(first, lambda: eager(first))
    torch._dynamo.reset()
    compiled = nc.compile(second, backend="aot_eager", **region)
    with watch_graphs() as graphs:
        found = Run(second, lambda: compiled(*args, **kwargs))
    row["compiled"] = reference.differences(found)
    row["graphs"] = len(graphs)
    row["fallbacks"] = [g.fallback for g in graphs if g.fallback]
    row["casts"] = sum(len(g.after.casts()) for g in graphs if g.after)
    try:
        exported = nc.export(third, (args, kwargs), **region)
    except Exception as error:
        row["exported"] = [] if reference.error else [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
    else:
        module = exported.module()
        row["exported"] = reference.differences(Run(module, lambda: module(*args, **kwargs)))
    row["refused in eager"] = reference.error
    if inductor and not reference.error:
        row["inductor"] = _inductor(model, args, kwargs, region, reference, _programs(graphs))
    return row


def _programs(graphs: list[CompiledGraph]) -> list[str]:
    """The programs after the passes as text, without source lines: the two backends are called from different ones."""
    texts = [print_program(graph.after) for graph in graphs if graph.after is not None]
    return [re.sub(r" at \d+: .*|^site .*", "", text, flags=re.MULTILINE) for text in texts]


def _inductor(
    model: torch.nn.Module, args: tuple, kwargs: dict, region: dict, reference: Run, programs: list[str]
) -> list[str]:
    """Differences of Inductor: other explicit graphs, other dtypes, or outputs beyond the tolerance."""
    torch._dynamo.reset()
    fourth = copy.deepcopy(model)
    compiled = nc.compile(fourth, backend="inductor", **region)
    with watch_graphs() as graphs, torch._inductor.config.patch(fallback_random=True):
        found = Run(fourth, lambda: compiled(*args, **kwargs))
    differences = [] if _programs(graphs) == programs else ["other explicit graphs"]
    for name, a in reference.values.items():
        b = found.values.get(name)
        if b is None or a.dtype != b.dtype:
            differences.append(f"{name}: {a.dtype} {b.dtype if b is not None else 'missing'}")
        elif a.is_floating_point() and name.startswith("output"):
            error = (a.float() - b.float()).abs().max() / a.float().abs().max().clamp(min=1e-6)
            if error > INDUCTOR_TOLERANCE:
                differences.append(f"{name}: off by {error:.1e} of the largest")
    return differences


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="")
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--json")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [m for m in (*models.REAL, *models.RANDOM) if not asked.models or m.__name__ in asked.models.split(",")]
    rows = {}
    bad = 0
    for loaded in chosen:
        for low, dtype in FORMATS.items():
            for name, policy in POLICIES.items():
                with_inductor = asked.inductor and (low, name) == ("bf16", "custom")
                row = rows[f"{loaded.__name__} {low} {name}"] = check(loaded, dtype, policy, with_inductor)
                wrong = [*row["compiled"], *row["exported"], *row.get("inductor", []), *row["fallbacks"]]
                bad += bool(wrong)
                note = f"refused alike: {row['refused in eager']}" if row["refused in eager"] else ""
                print(f"{loaded.__name__:13} {low} {name:7} {row['graphs']:3} graphs {row['casts']:4} casts  "
                      f"{'equal' if not wrong else wrong[:4]} {note}", flush=True)  # fmt: skip
    if asked.json:
        Path(asked.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} rows, {bad} with differences")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
