"""Who looks at a program leaves it as it is: its tensors of every kind, its state, and its course where we fail."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

import narrowcast as nc
from narrowcast.analysis.capture import capture
from narrowcast.analysis.compare import bands, reference
from narrowcast.analysis.record import advice
from narrowcast.analysis.record.record import Recorder
from narrowcast.analysis.watch import culprit, watch as watching, watch_calls
from narrowcast.observation.observer.module_calls import ModuleCalls
from narrowcast.observation.statistics import statistics
from narrowcast.observation.trial import finiteness
from narrowcast.reports.results.findings import Watching
from narrowcast.training.check import looking

sys.path.insert(0, str(Path(__file__).parent))

import kinds_of_tensors as kinds

pytestmark = pytest.mark.filterwarnings("ignore")


def in_block(make):
    def observe(program):
        with make() as found:
            given = program()
        return given, found

    return observe


def checked(program):
    given = []
    found = nc.check_training(lambda: given.append(program()), steps=1)
    return given[0], found


OBSERVERS = {
    "watch": in_block(nc.watch),
    "watch by steps": in_block(lambda: nc.watch(at="step")),
    "capture": in_block(nc.capture),
    "capture all": in_block(lambda: nc.capture(statistics="whole", checksums=True, times=True)),
    "record": in_block(nc.record),
    "check_training": checked,
}


def run_again(program, observe=lambda program: (program(), None)):
    """What it gives and leaves, from the same random numbers on, and what was found."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    given, found = observe(program)
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return [as_bits(value) for value in given], drawn, found


def as_bits(value):
    if not isinstance(value, torch.Tensor):
        return value
    return type(value), value.dtype, value.shape, value.numpy(force=True).tobytes()


def hooks_and_modes():
    optimizers = vars(sys.modules[torch.optim.Optimizer.__module__])
    hooks = [
        len(v)
        for k, v in (*vars(modules).items(), *optimizers.items())
        if k.startswith("_global") and hasattr(v, "__len__")
    ]
    return (
        hooks,
        len(dispatch_modes()),
        len(function_modes()),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


@pytest.fixture(scope="module", autouse=True)
def _first_use():
    """What a recording and a look at modules set once for the whole process is there."""
    for observe in OBSERVERS.values():
        observe(lambda: nn.Linear(1, 1)(torch.ones(1)))


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("program", kinds.PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_is_the_same_whoever_looks_on(program, observer):
    """Bits, gradients, versions, dead storage, random numbers, hooks and modes; nothing of ours fails meanwhile."""
    before, (plain, drawn, _) = hooks_and_modes(), run_again(program)
    given, drawn_then, found = run_again(program, OBSERVERS[observer])
    assert given == plain
    assert drawn_then == drawn or observer == "check_training"  # which gives the numbers back
    assert hooks_and_modes() == before
    assert not [note for note in found.notes if note.startswith("not inspected")]
    assert str(found) and found.to_json()


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("program", kinds.PROGRAMS, ids=lambda program: program.__name__)
def test_comparing_takes_tensors_of_every_kind(program):
    """It raises what the program raises itself in the region, and errors for the user; nothing else."""
    try:
        with nc.autocast("cpu", torch.bfloat16):
            program()
    except NotImplementedError:
        with pytest.raises(NotImplementedError):
            nc.compare(lambda x: program(), (torch.ones(1),), under="bf16", isolate=0)
        return
    try:
        found = nc.compare(lambda x: program(), (torch.ones(1),), under="bf16", isolate=0)
    except nc.errors.RunError as error:
        assert "returned no floating-point tensor" in str(error)
    else:
        assert not [note for note in found.notes if note.startswith("not inspected")]


def test_the_first_use_in_a_process_draws_no_random_number():
    """What each verb stands in is imported when it is first asked for, and imports what draws numbers."""
    text = "import random, narrowcast as nc; s = random.getstate(); nc.check_training; assert s == random.getstate()"
    subprocess.run([sys.executable, "-c", text], check=True)


# -- sharded models ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh(process_group):
    return init_device_mesh("cpu", (1,))


def sharded(mesh, how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    if how == "fully_shard":
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return parallelize_module(model, mesh, {"0": ColwiseParallel()}) if how == "tensor parallel" else model


@pytest.mark.parametrize("how", ["fully_shard", "tensor parallel"])
def test_sharded_models_train_the_same_whoever_looks_on(mesh, how):
    """Storages are freed and gathered again, trends are read off this rank's part, and gradients are compared."""

    def program():
        model = sharded(mesh, how)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            model(kinds.numbers(3, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]

    plain, _, _ = run_again(program)
    for observe in OBSERVERS.values():
        given, _, found = run_again(program, observe)
        assert given == plain and not [note for note in found.notes if note.startswith("not inspected")]
    _, _, found = run_again(program, OBSERVERS["watch"])
    assert found.history[0].gradients["2.weight"].rms > 0
    found = nc.compare(sharded(mesh, how), (torch.randn(2, 4),), under="bf16", backward=True, isolate=0)
    assert {row.parameter for row in found.gradients} >= {"0.weight", "0.bias"} and not found.faults


# -- runs in which everything moves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("observer", OBSERVERS.values(), ids=OBSERVERS)
def test_parameters_may_be_swapped_whoever_looks_on(observer):
    """As conversions of a model do on demand, and those of wrapped tensors always: nobody may refer to them then."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)

    def program():
        with torch.autocast("cpu", torch.bfloat16):
            model(x).sum().backward()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double().float()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).detach()

    given, _ = observer(program)
    assert given.dtype is torch.bfloat16


TRIALS = {
    "explain": lambda step: nc.explain(step, under="bf16"),
    "explain, run": lambda step: nc.explain(step, under="bf16", run=True),
    "compare": lambda step: nc.compare(step, under="bf16"),
    "capture": lambda step: nc.capture(step, under="bf16"),
    "repair": lambda step: nc.repair(step, under="bf16"),
}


class Training:
    """A step that reaches its weights by another function."""

    def __init__(self):
        torch.manual_seed(0)
        self.inner, self.outer, self.scale = nn.Linear(8, 8), nn.Linear(8, 4), nn.Parameter(torch.tensor(0.5))
        self.trained = [*self.inner.parameters(), *self.outer.parameters(), self.scale]
        self.optimizer, self.x = torch.optim.AdamW(self.trained, 0.01), torch.randn(4, 8)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def loss(self):
        return (self.outer(self.inner(self.x)) * self.scale).square().mean()

    def step(self):
        self.optimizer.zero_grad()
        loss = self.loss()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss.detach()

    def state(self):
        moments = [t for row in self.optimizer.state.values() for t in row.values()]
        return [*self.trained, *(p.grad for p in self.trained if p.grad is not None), *moments]

    def rest(self):
        return self.scaler.state_dict(), self.schedule.state_dict(), self.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("ask", TRIALS.values(), ids=TRIALS)
def test_a_step_of_an_optimizer_leaves_everything_as_it_was(ask, is_first):
    """Where a program runs several times, or on fake tensors: weights, gradients, moments, the rate and the scale."""
    training = Training()
    if not is_first:
        training.step()
    before = [(t, t.detach().clone()) for t in training.state()], training.rest()
    assert ask(lambda: training.step()).verdict in ("round-off", "finite", "explained", "nothing to repair")
    assert training.rest() == before[1]
    now = training.state()
    assert all(t is kept and torch.equal(t, values) for t, (kept, values) in zip(now, before[0], strict=True))


def test_a_program_may_step_an_optimizer_of_its_own():
    """As one that adapts a copy of its weights to its input does."""
    model = nn.Linear(4, 4)

    def adapted(x):
        own = nn.Parameter(model.weight.detach().clone())
        optimizer = torch.optim.SGD([own], 0.1)
        with torch.enable_grad():
            torch.nn.functional.linear(x, own).square().mean().backward()
        optimizer.step()
        return torch.nn.functional.linear(x, own.detach())

    torch.manual_seed(0)
    assert nc.compare(adapted, (torch.randn(2, 4),), under="bf16").verdict == "round-off"


class Frames(nn.Module):
    """Pads to whole frames, whose number it computes from tensors without dimensions, as audio codecs do."""

    def __init__(self):
        super().__init__()
        self.convolution, self.linear = nn.Conv1d(1, 4, 4, stride=4), nn.Linear(10, 3)
        self.register_buffer("size", torch.tensor(4))

    def forward(self, x):
        for _ in range(8):
            frames = torch.ceil((x.shape[-1] - self.size) / self.size + 1).to(torch.int64) - 1
            extra = frames * self.size + self.size - x.shape[-1]
            x = nn.functional.pad(x, (0, int(extra)))
        return self.linear(self.convolution(x))


def test_what_comes_of_whole_numbers_alone_does_not_move():
    """A length that is computed is the same in each run: its rounding is no rounding of the policy's."""
    found = nc.compare(Frames(), (torch.randn(2, 1, 40),), under="bf16", isolate=0)
    assert found.round_off_bound and not found.notes and not found.faults
    assert "RAISED" not in str(nc.explain(Frames(), (torch.randn(2, 1, 40),), run=True))


def test_a_trial_that_raises_is_a_note():
    """The runs that are compared went through; nothing says then how far round-off may go, and no fault is told."""
    known = []

    def model(x, layer=nn.Linear(8, 8)):  # noqa: B008 (one for all runs)
        y = layer(x)
        if y.dtype is torch.float32:
            known.append(float(y.sum()))
            if known[-1] != known[0]:
                raise ValueError("another number of peaks")
        return y * 2

    found = nc.compare(model, (torch.randn(4, 8),), under="bf16", isolate=0)
    assert found.verdict == "not judged" and not found.faults
    assert [note for note in found.notes if "the model raises ValueError: another number of peaks" in note]


# -- our own errors ----------------------------------------------------------------------------------------------------


class Planted(Exception):
    """Raised in our own code."""


def planted(*args, **kwargs):
    raise Planted("in our own code")


def step():
    """A step that has everything: a NaN, casts, a backward, an optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nc.autocast("cpu", torch.bfloat16):
        y = model(kinds.numbers(2, 4))
    bad = torch.log(y.float() - 1e9)
    (y.float().pow(2).mean() + 0 * bad.nan_to_num().sum()).backward()
    optimizer.step()
    return y.detach().float(), bad.detach(), model.weight.detach(), model.weight.grad


WATCHED, CAPTURED, RECORDED = OBSERVERS["watch"], OBSERVERS["capture"], OBSERVERS["record"]
PLACES = {
    "the statistics of a finding": (WATCHED, statistics.Statistics, "number"),
    "whether a value is finite": (WATCHED, finiteness, "total_of"),
    "who made it": (WATCHED, culprit, "find_culprit"),
    "the text of a finding": (WATCHED, culprit, "finding_of"),
    "its replay": (WATCHED, watch_calls.Replay, "of"),
    "trends": (WATCHED, watching, "_figures"),
    "history": (WATCHED, watching.Trends, "look"),
    "the end": (WATCHED, watch_calls.WatchCalls, "settle"),
    "who is called": (WATCHED, ModuleCalls, "who"),
    "calls of modules": (WATCHED, ModuleCalls, "begin"),
    "a row of a run": (CAPTURED, capture, "CallRecord"),
    "statistics of a run": (CAPTURED, statistics.Statistics, "_look"),
    "statistics at the end": (CAPTURED, statistics, "facts_of"),
    "parameters of a run": (CAPTURED, capture.Parameters, "enter"),
    "a step of a run": (CAPTURED, capture.Parameters, "_begin_step"),
    "the environment of a run": (CAPTURED, capture, "environment"),
    "a line of a ledger": (RECORDED, Recorder, "_count"),
    "a cast of a ledger": (RECORDED, Recorder, "_add_cast"),
    "slow formats": (RECORDED, Recorder, "_note_slow"),
    "advice about regions": (RECORDED, advice.Adviser, "_entered"),
    "advice at the end": (RECORDED, advice.Adviser, "_judge"),
    "what a check sees": (checked, looking.LoopObserver, "after"),
    "what a check sees of gradients": (checked, looking.Gradients, "computed"),
    "what a check is told of steps": (checked, looking.LoopObserver, "steps"),
    "what a check judges": (checked, looking.LoopObserver, "judge"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_ours_is_a_note_and_the_program_goes_on(place, monkeypatch):
    """The same bits, and the error once with its traceback, wherever in our code it is raised and however often."""
    observe, owner, name = PLACES[place]
    plain, _, _ = run_again(step)
    monkeypatch.setattr(owner, name, planted)
    given, _, found = run_again(step, observe)
    assert given == plain
    getattr(found, "tensors", None)  # a run's are put together when they are first read
    [note] = [note for note in found.notes if note.startswith("not inspected: ")]
    assert "a bug of Narrowcast" in note and "Traceback" in note and "Planted: in our own code" in note, note
    monkeypatch.undo()
    assert "a bug of Narrowcast" in " ".join(str(found).split()) and found.to_json()
    if isinstance(found, Watching):
        assert found.not_inspected and (found.first is not None or "inspecting failed" in str(found))


@pytest.mark.parametrize(("owner", "name"), [(reference, "kept_of"), (bands.Moved, "gives"), (reference.Keep, "after")])
def test_an_error_of_what_looks_for_a_comparison_is_a_note(owner, name, monkeypatch):
    """The comparison finishes, and one note counts the errors and shows the first."""
    monkeypatch.setattr(owner, name, planted)
    found = nc.compare(nn.Linear(4, 4), (torch.randn(2, 4),), under="bf16", isolate=0)
    [note] = [note for note in found.notes if note.startswith("not inspected: ")]
    assert "times, this is the first" in note and "Planted" in note


def test_an_explanation_says_what_was_not_inspected(monkeypatch):
    """An error while calls are recorded appears in the note, and the explanation is still returned."""
    monkeypatch.setattr(Recorder, "_count", planted)
    assert "not inspected" in nc.explain(nn.Linear(4, 4), (torch.randn(2, 4),), under="bf16").note


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), torch.OutOfMemoryError("out of memory")])
def test_interrupts_and_memory_that_has_run_out_pass(error, monkeypatch):
    """They are no bugs of ours."""

    def interrupted(*args):
        raise error

    monkeypatch.setattr(finiteness, "total_of", interrupted)
    with pytest.raises(type(error)), nc.watch():
        torch.ones(2) + 1


def test_what_is_the_users_passes():
    """`stop=True`, and whatever a callback of theirs raises, also one that raises as our own code may."""
    with pytest.raises(nc.errors.NotFiniteError), nc.watch(stop=True):
        torch.log(torch.tensor(-1.0))
    with pytest.raises(Planted) as raised, nc.watch(callback=planted) as found:
        torch.log(torch.tensor(-1.0))
    assert str(raised.value) == "in our own code" and not found.notes and found.first is not None


def test_whoever_looks_on_outside_of_one_that_stops_goes_on():
    """A call that ends in an error of an inner look has ended for the outer one, too."""
    with nc.record() as ledger, nc.autocast("cpu", torch.bfloat16):
        with pytest.raises(nc.errors.NotFiniteError), nc.watch(stop=True):
            torch.log(torch.mm(torch.ones(2, 2), torch.ones(2, 2)) - 9)
        with pytest.raises(nc.errors.NotFiniteError), nc.watch(stop=True):
            torch.mm(torch.full((2, 2), 3.4e38), torch.ones(2, 2))
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert sum(tally.calls for kind, tally in ledger.calls.items() if kind.op == "aten.mm.default") == 2
    assert not [note for note in ledger.notes if note.startswith("not inspected")]
