"""Small results of every kind that a page is made from."""

from __future__ import annotations

from dataclasses import replace

from narrowcast.analysis.diff.diff import diff
from narrowcast.analysis.explain.flow import with_row_and_flow
from narrowcast.core.ledger import Advice, CallKind, Cast, Refusal
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Action, Kind, Policy, Rule, Site
from narrowcast.formats import bf16, fp32
from narrowcast.programs.placement.place import PlacedCall, Placement
from narrowcast.reports.results.differences import CallError, Differences, GradientError, OutputError
from narrowcast.reports.results.explanation import Attempt, Comparison, Explanation, Failure
from narrowcast.reports.results.findings import Finding, GradientFigures, InspectedStep, Largest, Watching
from narrowcast.reports.results.graphs import CandidateTime, CompiledGraph
from narrowcast.reports.results.invariance import Invariance, Variant
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.parity import Cause, ModuleShare, Parity, Routed, distance_in_nats
from narrowcast.reports.results.profile import Profile
from narrowcast.reports.results.repair import RAISED, Matmuls, Repair, RepairRule, RepairStep
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_records import CallRecord, Histogram, TensorFacts
from narrowcast.reports.results.storage import StorageCheck, StoredGroup
from narrowcast.reports.results.verdicts import OUT_OF_IDEAS, REPAIRED

SCRIPT = "<script>alert(1)</script>"
FILE = "/home/me/<b>model</b>.py"
LINEAR, SOFTMAX, ADD = "aten.linear.default", "aten.softmax.int", "aten.add.Tensor"


def a_ledger(layers=3):
    """Alike layers, a head of another format, and a module whose name is markup."""
    made = Ledger()
    for n in range(layers):
        path = f"encoder.layer.{n}"
        _call(made, LINEAR, f"{path}.dense", "fp32", "bf16", "lower", "fast")
        _call(made, SOFTMAX, path, "bf16", "fp32", "full", "sums")
        _call(made, ADD, path, "fp32", "fp32", "no rule", "follows input dtype")
        made.add(_cast(LINEAR, f"{path}.dense", "weight", "fp32", "bf16", "weight", "lower", 600))
        made.add(_cast(LINEAR, f"{path}.dense", "input", "fp32", "bf16", "activation", "lower", 900, repeated=n > 0))
        made.add(_cast(SOFTMAX, path, "self", "bf16", "fp32", "activation", "full", 5000))
        made.count_match(f"{LINEAR}: lower (builtin/native_cpu.toml:29)", f"{path}.dense")
    _call(made, LINEAR, SCRIPT, "fp32", "bf16", "lower", SCRIPT)
    made.refusals.append(Refusal("aten.bce.default", SCRIPT, FILE, 9, "native", f"unsafe {SCRIPT}"))
    made.advice[Advice("no casts", f"nothing {SCRIPT}", "open a region", SCRIPT, FILE, 3)] = 2
    made.note(f"slow {SCRIPT}")
    return made


def _call(made, op, path, came, computes, action, reason):
    kind = CallKind(op, path, FILE, 7, came, computes, computes, action, reason, "native")
    made.count_call(kind, 4000, 1)


def _cast(op, path, argument, src, dst, kind, action, moved, repeated=False):
    return Cast(
        op, argument, path, FILE, 7, src, dst, 100, moved, "copied", "forward", kind, action, f"{op}: {action}", "fast",
        "torch", "native", repeated, 1,
    )  # fmt: skip


def a_run(layers=2):
    """A linear layer whose result is seen as a view, and an infinity that the next one passes on."""
    tensors, calls = [], []

    def tensor(format, low, high, shape=(2, 8), infinite=0.0):
        histogram = Histogram(-4, (1, 5, 9, 2))
        facts = TensorFacts(format, shape, "cpu", 16, low, high, rms=1.0, infinite=infinite, exponents=histogram)
        tensors.append(facts)
        return len(tensors) - 1

    x = tensor("fp32", -1.0, 1.0)
    for n in range(layers):
        path = f"layer.{n}"
        weight, y = tensor("fp32", -0.5 - n, 0.5), tensor("bf16", -2.0 - n, 2.0)
        view = tensor("bf16", -2.0 - n, 2.0, (4, 4))  # the same values, seen otherwise
        z = tensor("bf16", -3.0, 3.0 + n, infinite=0.25 if n == layers - 1 else 0.0)
        calls += [
            _record(LINEAR, path, "fp32", "bf16", (("input", x), ("weight", weight)), y, "rule", "products"),
            _record(ADD, path, "bf16", "bf16", (("self", view),), z, "", ""),
        ]
        x = z
    mask = tensor("i64", 0.0, 0.0)
    calls.append(_record("aten.ge.Scalar", "", "", "", (("self", mask),), mask, "", ""))
    environment = {
        "device": "a cpu",
        "device_type": "cpu",
        "policy": {"name": "native", "digest": "d" * 64, "low": "bf16"},
    }
    return Run(environment, calls, tensors, {}, [f"a note {SCRIPT}"])


def _record(op, path, came, computes, inputs, output, rule, reason):
    return CallRecord(CallId(path, op), FILE, 7, came, computes, rule, reason, inputs, (("result", output),))


def a_side(stack, activation, module_calls=1, off=0.0, **layer_1):
    """A run of an embedding, of three layers in `stack`, each with a product and an activation, and of a head whose
    name is markup. layer_1: of its product, which is off by that share.
    """
    run = Run({"device": "a cpu", "packages": {"torch": "2.13.0", stack: SCRIPT}}, notes=[f"a note {SCRIPT}"])

    def tensor(format, low, high):
        run.tensors.append(TensorFacts(format, (2, 8), "cpu", 16, low, high, 0.1, 1.0, inspected=16))
        return len(run.tensors) - 1

    def call(op, path, format, x, low, high, module_call=1, **given):
        y = tensor(format, low, high)
        named = tuple((name, value) for name, value in given.items())
        name = CallId(path, op, module_call=module_call)
        run.calls.append(CallRecord(name, FILE, 7, format, format, inputs=(("input", x),), outputs=(("result", y),),
                                    given=named))  # fmt: skip
        return y

    for module_call in range(1, module_calls + 1):
        x = call(LINEAR, "embed", "fp32", tensor("fp32", -1.0, 1.0), -1.5, 1.25, module_call)
        for n in range(3):
            more = 1 + off if n else 1.0
            given = layer_1 if n == 1 else {}
            path = f"{stack}.{n}"
            x = call(
                LINEAR, f"{path}.proj", "bf16" if given else "fp32", x, -2.5 - n, (2.0 + n) * more, module_call, **given
            )
            bounds = (-0.75, 0.875) if activation == "tanh" else (0.125, 0.9375)
            call(f"aten.{activation}.default", f"{path}.act", "fp32", x, *bounds, module_call)
        call(LINEAR, SCRIPT, "fp32", x, -9.0, 9.0 * (1 + off), module_call)
    return run


def two_runs():
    """A trainer and its engine: activations that are not paired by themselves, and a product given something else."""
    return a_side("blocks", "tanh", eps="1e-05"), a_side("layers", "sigmoid", 2, 0.25, eps="0.01")


def a_pair():
    """The comparison of the two."""
    return diff(*two_runs(), names=(SCRIPT, "engine"))


def saved(pair):
    """The same comparison as its file has it: without the runs."""
    return replace(pair, compared_runs=())


def differences():
    """One call at fault, one within round-off, one exact."""
    rows = [
        CallError(CallId("embed", "aten.embedding.default"), FILE, 3, "fp32", "fp32", "exact"),
        CallError(
            CallId("layer.0", LINEAR), FILE, 4, "bf16", "fp32", "round-off", local=2e-3, propagated=0.0, total=2e-3,
        ),
        CallError(CallId("layer.1", LINEAR), FILE, 5, "bf16", "fp32", "fault", f"beyond its band {SCRIPT}", local=0.5,
                  propagated=2e-3, total=0.5, alone=0.25),
    ]  # fmt: skip
    outputs = (OutputError("logits", "fp32 [2, 4]", "bf16", 6.0, 0.5, 3.0),)
    gradients = [GradientError("w", "bf16", 0.1, 0.9, 0.0, "round-off")]
    found = Differences(SCRIPT, "cpu", "native", "bf16", "fp32", rows, outputs, gradients, 0.01, "fault")
    found.unmatched, found.notes = ["only here #1"], [f"a note {SCRIPT}"]
    found.environment, found.runs = {"device": "a cpu"}, 6
    return found


def watching():
    """An overflow, and a trend."""
    facts = TensorFacts("fp16", (2,), "cpu", 2, -1.0, 65504.0, infinite=0.5)
    made = Finding(
        CallId("layer.1", "aten.mul.Tensor", 2), FILE, 12, "infinity", "format", "fp16", f"it overflows {SCRIPT}",
        "Its readers overflow, too.", (("self", facts),), (("result", facts),), 3,
        rules=(Rule("aten.mul.Tensor", "full", "layer.1"),),
    )  # fmt: skip
    trend = Finding(CallId("layer.0", "gradient.weight"), FILE, 0, "underflow", "trend", "", "it shrinks")
    figures = [GradientFigures(0.5 / n, 0.1 / n, 0.25) for n in (1, 2)]
    steps = [
        InspectedStep(n, {"layer.0.weight": row}, 1024.0, {"forward": 8.0 * n}) for n, row in enumerate(figures, 1)
    ]
    found = Watching([made, trend], {"a mask": 4}, [f"a note {SCRIPT}"], steps, 90, 5, 3)
    found.formats = {"fp32": 60, "fp16": 30}
    found.largest = {"forward": Largest(16.0, CallId("layer.0", "aten.linear.default"))}
    return found


def a_fit():
    """A run in fp32, one tensor of which is beyond fp16."""
    huge = TensorFacts("fp32", (2, 8), "cpu", 16, -1e6, 1e6, exponents=Histogram(18, (8, 8)), inspected=16)
    small = TensorFacts("fp32", (2, 8), "cpu", 16, -1.0, 1.0, exponents=Histogram(-4, (8, 8)), inspected=16)
    calls = [
        CallRecord(CallId("a", ADD), FILE, 1, "fp32", "fp32", inputs=(("self", 1),), outputs=(("result", 1),)),
        CallRecord(CallId("b", ADD), FILE, 2, "fp32", "fp32", inputs=(("self", 1),), outputs=(("result", 0),)),
    ]
    return Run({}, calls, [huge, small]).headroom()


def explained(ledger=None, **more):
    """An explanation of that ledger."""
    more["graphs"] = tuple(map(with_row_and_flow, more.get("graphs", ())))
    return Explanation(SCRIPT, "cpu", "bf16", "native", "d" * 64, "fake tensors", "", ledger or a_ledger(), **more)


def a_comparison():
    """Slower than fp32, with one call at fault."""
    return Comparison(
        differences(), {"accuracy": 0.5}, {"accuracy": 0.25}, 10.0, 20.0, 2.0, (1.5, 2.5), 3, 100, 200, 2.0
    )


def a_failure():
    """What raises under native, and not under safe."""
    tried = (Attempt("safe", ""), Attempt("ipex", "it raises, too"))
    return Failure("aten.lerp.Scalar", "bf16,fp32", SCRIPT, FILE, 5, "expected dtype", "native", tried)


def a_repair():
    """Two rules, one of which was priced and tried without, after three runs."""
    rules = [
        RepairRule(Rule(LINEAR, Action(Kind.FULL), module="layer.1", reason=f"overflows {SCRIPT}"), RAISED, 0.75, 2,
                   2e6, "infinity"),
        RepairRule(Rule(ADD, Action(Kind.ALIGN), module=SCRIPT, reason="mixed"), RAISED, 0.25),
    ]  # fmt: skip
    steps = [
        RepairStep("under native", f"raises {SCRIPT}", (str(rules[0].rule),), error=0.5, products=Matmuls(8, 8)),
        RepairStep("in fp32", "clean"),
        RepairStep("under native", "clean", (), ("a rule",), 0.01, {"auc": 0.5}, Matmuls(6, 8)),
    ]
    made = Repair(SCRIPT, "cpu", "fp16", "native", Policy.native(), "it runs", REPAIRED, rules, steps)
    made.before, made.after, made.reference = steps[0], steps[2], {"auc": 0.75}
    made.matmuls_before, made.matmuls_after = Matmuls(8, 8), Matmuls(6, 8)
    made.runs, made.dropped, made.untried, made.notes = 7, ["a rule"], [f"another {SCRIPT}"], [f"a note {SCRIPT}"]
    return made


def not_repaired():
    """What is left raises."""
    step = RepairStep("under native", "raises")
    return replace(a_repair(), verdict=OUT_OF_IDEAS, rules=[], before=step, after=step)


def a_profile():
    """Matmuls of which bf16 loses the small ones and wins the large ones, fp16 by less than what times are spread; a
    convolution that fp16 only emulates.
    """
    samples = {}
    for size, times in ((64, (10, 40, 11)), (256, (100, 200, 100)), (1024, (1e4, 2500, 9.9e3))):
        for name, us in zip(("fp32", "bf16", "fp16"), times, strict=True):
            shape = f"{name}[{size}, {size}]"
            samples[f"aten.mm.default({shape}, {shape})"] = a_sample("gemm", name, 2 * size**3, size**2, us)
    for name, us in (("fp32", 5.0), ("bf16", 4.0)):
        text = f"aten.mm.default({name}[1, 4096], {name}[4096, 4096])"
        samples[text] = {**a_sample("gemm", name, 2 * 4096**2, 4096**2, us), "moved_bytes": 4 * 4096.0**2}
    for name, us in (("fp32", 2e3), ("fp16", 9e3)):
        samples[f"aten.conv2d.default({name}[8])"] = a_sample("conv", name, 8, 8, us)
    samples["cast(fp32[16]) -> bf16"] = a_sample("copy", "bf16", 16, 16, 1)
    device = {"type": "cpu", "name": f"a cpu {SCRIPT}", "units": ["avx2"], "threads": 2, "torch": "2.13.0"}
    asked = [
        {"op": LINEAR, "format": "bf16", "direction": "forward", "state": "runs", "ratio": 0.0, "error": ""},
        {"op": LINEAR, "format": "fp16", "direction": "forward", "state": "raises", "ratio": 0.0, "error": SCRIPT},
    ]
    return Profile.of_data({"device": device, "samples": samples, "abilities": asked})


def a_sample(family, name, flops, elements, us):
    """One that is spread by 5 %."""
    ns = 1000.0 * us
    return {"family": family, "format": name, "backward": False, "flops": float(flops), "moved_bytes": 1.0,
            "elements": elements, "ns": ns, "lower_ns": 0.95 * ns, "upper_ns": 1.05 * ns, "rounds": 5}  # fmt: skip


def a_placed():
    """An explanation of a graph in which a goal chose fp32 for one of two calls."""
    calls = tuple(
        PlacedCall(n, LINEAR, Site(f"encoder.layer.{n}.dense", file=FILE, line=7), (2, 8), (bf16, fp32), (3e6, 1e6), to)
        for n, to in enumerate((fp32, bf16))
    )
    graph = CompiledGraph(0, Site(file=FILE, line=3), goal="fast", chosen="placed", candidates_seconds=1.5)
    graph.placement = Placement(calls, "ns", 4e6, 6e6, 4e6, "minimum cut")
    graph.candidates = (CandidateTime("placed", 1, 4e6, 0.5, 4.5e6), CandidateTime("policy", None, 6e6))
    broken = CompiledGraph(1, Site(file=FILE, line=9), broken_by=f"a call of {SCRIPT}", broken_at=f"{FILE}:8")
    return explained(graphs=(graph, broken), front_end="compile")


def not_finite():
    """The comparison of a run whose output is not finite."""
    found = differences()
    found.not_finite = Finding(CallId("layer.1", LINEAR), FILE, 5, "infinity", "format", "fp16", "it is too large")
    found.verdict = "not finite"
    return found


def a_parity():
    """Of a model with another epsilon and one token that is routed otherwise."""
    found = Parity(
        "trainer", "engine", distance_in_nats([-1.0, -2.0, -0.5], [-1.1, -2.3, -0.5], 0.2), limit=0.1, runs=7
    )
    eps = f"eps 1e-05 in a, 1e-06 in b: norm {SCRIPT}", "set eps of b to 1e-05"
    found.causes = [
        Cause("attribute", *eps, 0.18, 0.01, True, "layer.1.norm", f"{FILE}:7"),
        Cause("routing", "1 call chooses otherwise", "replay the choices", 0.01, 0.002, False, "layer.1.router"),
    ]
    found.shares = [
        ModuleShare("layer.0", "layer.0", "", 0.18, 0.17, f"{FILE}:3"),
        ModuleShare(SCRIPT, "b", "layer.0", 0.17, 0.0),
    ]
    found.routed = [Routed("layer.1.router", "aten.topk.default", f"{FILE}:9", 1, 3)]
    found.environment = [("packages.torch", "2.13.0", f"2.14.1 {SCRIPT}")]
    found.notes = [f"a note {SCRIPT}"]
    return found


def an_invariance():
    """Of a model whose kernel depends on the batch, with a mask that is wrong and a mean over the batch."""
    call = CallId(SCRIPT, LINEAR)
    variants = [
        Variant("batch of 2, place 1", "invariant"),
        Variant("batch of 8, place 3", "batch shape", 1e-7, 1e-6, call, f"{FILE}:3", ("[1, 8]", "[8, 8]")),
        Variant("padded left by 5 (token 0)", "cache or position", 0.3, 1e-6),
        Variant("batch of 17, place 9", "shared", call=call, place=f"{FILE}:3", shapes=("[1]", "[1]"), shared=(4, 12)),
    ]
    return Invariance(f"Model {SCRIPT}", variants, 31, ["a note"])


def a_storage():
    """Of weights in bf16 that lose updates, of fp32, and of what was not judged."""
    groups = [
        StoredGroup(0, "bf16", 4, 800, 1600, 1600, 0, 3200, "lost", 1e-5, 1e-5, 0.95, 0.86, 1.2e-4),
        StoredGroup(1, "fp32", 2, 40, 160, 160, 0, 320, "kept", 1e-3, 1e-3),
        StoredGroup(2, "fp16", 1, 8, 16, 16, 32, 0, "not judged"),
    ]
    lost = Advice("updates lost in rounding", f"updates {SCRIPT}", "Keep the weights in fp32.", "layer.0", "", 0)
    return StorageCheck("Model", "AdamW", groups, [lost], ["a note"])


def all_results():
    """One of each, by name."""
    return {
        "ledger": a_ledger(), "run": a_run(), "differences": differences(), "watching": watching(), "fit": a_fit(),
        "explanation": explained(), "compared": explained(comparison=a_comparison()),
        "failed": explained(failure=a_failure()), "empty": Ledger(), "empty run": Run(),
        "empty watching": Watching(), "not finite": not_finite(), "pair": a_pair(), "saved pair": saved(a_pair()),
        "repair": a_repair(), "not repaired": not_repaired(), "profile": a_profile(), "placed": a_placed(),
        "parity": a_parity(), "invariance": an_invariance(), "storage": a_storage(),
        "no parity": Parity("a", "b", distance_in_nats([], [])),
    }  # fmt: skip
