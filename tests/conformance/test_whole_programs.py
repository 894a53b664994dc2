"""Random programs give the same in every front end as in eager code: dtypes, bits, gradients, buffers.

Every program runs in eager regions, ours and torch's, and in the other front ends in which its elements are legal; each
has at least half of the programs. Compiling takes longest: only `make conformance` compiles those that were not drawn
for it.
"""

import contextlib
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

import narrowcast as nc
from narrowcast.frontends.eager.registered import install_visiting, remove_visiting
from narrowcast.frontends.graphs.compiled import watch_graphs
from narrowcast.observation.observer.mode import _native_ops

sys.path.insert(0, str(Path(__file__).parent))
from sources import load
from whole_programs import FAULTS, FRONT_ENDS, block, programs, small, source, tolerance_of

SHARD = os.environ.get("NARROWCAST_SHARD", "")  # "3/8": the third eighth of 10,000 programs
EXAMPLES = int(os.environ.get("NARROWCAST_PROGRAMS", "7"))
if SHARD:
    EXAMPLES = 10_000 // int(SHARD.partition("/")[2])
SAME = not SHARD and "NARROWCAST_PROGRAMS" not in os.environ  # the same each time; `make conformance` tries new ones
seeded = seed(int(SHARD.partition("/")[0])) if SHARD else lambda test: test


def inputs(program):
    torch.manual_seed(1)
    x, y = torch.randn(4, 8, requires_grad=program.gradients), torch.randn(4, 8)
    return x, y.to(getattr(torch, program.y))


def made(module, parts=True):
    """A model with its weights, the same each time. parts: as the scripts and traces that they are."""
    module.PARTS = parts
    torch.manual_seed(0)
    return module.Program()


def region_of(program, module):
    """The region around a program, as arguments; none if there is none."""
    given = eval(f"dict({program.around})", {"POLICY": getattr(module, "POLICY", None)})
    return {**given, "dtype": module.LOW} if given else {}


def entered(region, autocast=nc.autocast):
    if autocast is torch.autocast:
        region = {name: value for name, value in region.items() if name != "policy"}
    return autocast("cpu", **region) if region else contextlib.nullcontext()


# -- front ends: each gives a model, and what runs it


def _native(program, module):
    """What all are compared with: parts in Python; torch's own regions, where no policy is another."""
    model, region = made(module, parts=False), region_of(program, module)
    native = region.get("policy") == "native" and not any(word in source(program) for word in ("POLICY", "safe"))
    return model, _inside(model, region, torch.autocast if native else nc.autocast)


def _inside(run, region, autocast=nc.autocast):
    def call(*values):
        with entered(region, autocast):
            return run(*values)

    return call


def _ways(program, module):
    """The region as arguments, and the one to open around: a program says which of the two it is."""
    region = region_of(program, module)
    if not program.given:
        return {}, region
    return ({"under": nc.autocast("cpu", **region)} if region else {}), {}


def _eager(program, module):
    """Torch's own scripts are left out: torch's pass casts them, by lists of its own (docs/limits.md, TorchScript)."""
    model = made(module, parts="part(t" not in source(program))
    return model, _inside(model, region_of(program, module))


def _compiled(program, module):
    torch._dynamo.reset()
    model, (arguments, around) = made(module), _ways(program, module)
    return model, _inside(nc.compile(model, backend="aot_eager", **arguments), around)


def _exported(program, module):
    model, (arguments, around) = made(module), _ways(program, module)
    with entered(around):
        run = nc.export(model, inputs(program), **arguments).module()
    return run, run


def _scripted(program, module):
    model, (arguments, around) = made(module), _ways(program, module)
    run = nc.script(model, **arguments)
    return run, _inside(run, around)


def _traced(program, module):
    model, (arguments, around) = made(module), _ways(program, module)
    with entered(around):
        run = nc.trace(model, inputs(program), check_trace=False, **arguments)
    return run, _inside(run, around)


def _converted(program, module):
    model, (arguments, around) = made(module), _ways(program, module)
    run = nc.script(torch.jit.trace(model, inputs(program), check_trace=False), **arguments)
    return run, _inside(run, around)


RUNS = {
    "native": _native, "eager": _eager, "compile": _compiled, "export": _exported, "script": _scripted,
    "trace": _traced, "convert": _converted,
}  # fmt: skip


def front_ends(program, every):
    """Where a program runs: wherever it is legal; compiled only if it was drawn for that, or if every is asked for."""
    chosen = [name for name in FRONT_ENDS if name in (program.legal if every or name != "compile" else program.wanted)]
    inside = any(
        word in source(program) for word in ("autocast", "nc.script", "traced_by_us", "function=", "dtype", "Cell")
    )
    return ["eager", *chosen, *["convert"] * ("trace" in chosen and not inside)]


# -- runs


def outcome(model, call, program, clean):
    """Outputs, gradients and buffers by name. clean: what buffers are before a run."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(clean[name])
    x, y = inputs(program)
    torch.manual_seed(2)
    values = call(x, y)
    torch.manual_seed(3)
    parts = [(v.double() * torch.randn(v.shape).double()).sum() for v in values if v.requires_grad]
    found = {f"output {n}": v.detach().clone() for n, v in enumerate(values)}
    if parts:
        torch.stack(parts).sum().backward()
    found["gradient of x"] = x.grad
    for name, weight in model.named_parameters():
        found[f"gradient of {name}"] = weight.grad
        weight.grad = None
    return {**found, **{f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}}


def runs(front_end, program, module, times=1):
    """The outcomes of several runs; what an error said in place of them."""
    clean = dict(made(module, parts=False).named_buffers())
    gradients = contextlib.nullcontext() if program.gradients else torch.no_grad()
    try:
        with warnings.catch_warnings(), gradients, watch_graphs() as graphs:
            warnings.simplefilter("ignore")
            model, call = RUNS[front_end](program, module)
            found = [outcome(model, call, program, clean) for _ in range(times)]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    fallbacks = [f"fallback: {graph.fallback}" for graph in graphs if graph.fallback]
    return fallbacks or found


def differences(expected, found, tolerance=0.0):
    """What differs, in words. tolerance: of gradients, in relation to their size; None for all of them.

    Within a tolerance zeros are no gradient: a graph makes them for outputs that nothing reads in the end.
    """
    if isinstance(expected, str) or isinstance(found, str):
        return [] if isinstance(expected, str) == isinstance(found, str) else [f"expected {expected}, found {found}"]
    wrong = []
    for name in (name for name in expected if name in found):
        a, b = expected[name], found[name]
        is_gradient = name.startswith("gradient")
        if is_gradient and tolerance is None:
            continue
        if a is None or b is None:
            is_zero = is_gradient and tolerance > 0 and a is None and b is not None and not b.any()
            wrong += [f"{name}: expected {kind(a)}, found {kind(b)}"] * (a is not b and not is_zero)
        elif a.dtype is not b.dtype or a.shape != b.shape:
            wrong.append(f"{name}: expected {kind(a)}, found {kind(b)}")
        elif not torch.equal(a.nan_to_num(), b.nan_to_num()):
            a, b = a.double().nan_to_num(), b.double().nan_to_num()
            if not is_gradient or not (a - b).norm() <= tolerance * a.norm():
                wrong.append(f"{name}: differs by {(a - b).abs().max():.2g}, of {a.abs().max():.2g}")
    return wrong


def kind(value):
    return "None" if value is None else f"{value.dtype} {list(value.shape)}"


TORCHS = {
    "script": "Expected Tensor but got None",  # loops in a loop, which set a variable that nothing read yet
    "compile": "exception table entry start instruction has no offset",  # a script called before regions in regions
}
"""What torch's own front ends raise of some programs (docs/limits.md)."""


def torch_raises(front_end, program, module):
    """Whether `torch.jit.script` or `torch.compile` alone raises that."""
    try:
        if front_end == "script":
            torch.jit.script(made(module, parts=False))(*inputs(program))
        else:
            _inside(torch.compile(made(module), backend="eager"), region_of(program, module))(*inputs(program))
    except Exception as error:
        return TORCHS[front_end] in str(error)
    return False


def compare(program, front_end, module, expected, tolerance=0.0):
    """What a front end gives otherwise than eager code does; nothing where eager code raises."""
    if tolerance == "left out" or (isinstance(expected, str) and front_end != "eager"):
        return []
    times = (
        2 if front_end in ("script", "trace", "convert") else 1
    )  # TorchScript's executor is another after a first run
    found = runs(front_end, program, module, times)
    if TORCHS.get(front_end, "\0") in str(found[0]) and torch_raises(front_end, program, module):
        return []
    return [line for one in found for line in differences(expected, one, tolerance)]


@pytest.fixture(autouse=True)
def one_weight_cache():
    """Tests before this one may have left kernels of ours on some ops, whose weight cache is another than torch's."""
    install_visiting(_native_ops("cpu").values(), "cpu")
    yield
    remove_visiting("cpu")
    torch._dynamo.reset()


@seeded
@settings(max_examples=EXAMPLES, derandomize=SAME, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_random_programs_are_the_same_in_every_front_end(program):
    """A program that differs is shrunk to a small one."""
    module = load(program.text)
    (expected,) = runs("native", program, module)
    for front_end in front_ends(program, every=not SAME):
        wrong = compare(program, front_end, module, expected, tolerance_of(program, front_end))
        assert not wrong, f"{front_end}: {wrong}\n{program}"


@pytest.mark.parametrize("known", [known for known in FAULTS if known.shown], ids=lambda known: known.name)
def test_what_is_left_out_is_still_wrong(known):
    """Once a fault is fixed this fails, and its line in FAULTS goes."""
    front_end, program = known.shown
    module = load(program.text)
    (expected,) = runs("native", program, module)
    assert not isinstance(expected, str) and known.holds(front_end, repr(program))
    assert compare(program, front_end, module, expected)


def test_a_script_inside_compiled_code_is_one_graph_break():
    """Dynamo does not follow the call into the code that converts scripts: hundreds of frames, and seconds."""
    part = block("self.m0 = nn.Linear(8, 8)", "return self.m0(v0)")
    program = small("self.b0 = part(nc.script, Block0())", "return (self.b0(x * 1.5, y) * 1.25,)", above=part)
    torch._dynamo.utils.counters.clear()
    runs("compile", program, load(program.text))
    assert torch._dynamo.utils.counters["frames"]["total"] < 10


def test_the_comparison_sees_what_differs():
    """Another dtype, another bit, another shape, a gradient that is none, an error."""
    one = {"output 0": torch.ones(2), "gradient of x": torch.ones(2)}
    assert not differences(one, {name: value.clone() for name, value in one.items()})
    for name, other in (
        ("output 0", torch.ones(2, dtype=torch.bfloat16)), ("output 0", torch.ones(2) + 1e-7),
        ("output 0", torch.ones(1)),
        ("gradient of x", None), ("gradient of x", torch.ones(2) + 1e-7), ("gradient of x", torch.ones(2).double()),
    ):  # fmt: skip
        assert differences(one, {**one, name: other}), name
    assert differences(one, "error") and differences("error", one) and not differences("error", "another error")
    close = {**one, "gradient of x": torch.ones(2) + 1e-3, "output 0": torch.ones(2)}
    assert differences(one, close, 1e-5) and not differences(one, close, 0.05) and not differences(one, close, None)
    none, zeros = {"gradient of x": None}, {"gradient of x": torch.zeros(2)}
    assert not differences(none, zeros, 0.05) and not differences(none, none)
    assert differences(none, zeros) and differences(zeros, none, 0.05) and differences(none, one, 0.05)


def test_a_run_that_differs_is_found():
    """A program that is run in another region than it is compared with."""
    program = small("self.m0 = nn.Linear(8, 8)", "return (self.m0(x * 1.5),)")
    module = load(program.text)
    (expected,) = runs("native", replace(program, around=""), module)
    for front_end in front_ends(program, every=True):
        assert compare(program, front_end, module, expected), front_end
