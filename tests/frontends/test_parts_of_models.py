"""Rules about modules where only a part of the model is called: by its paths in the model, and by its own."""

import pytest
import torch
from torch import nn

import narrowcast as nc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BF16, FP32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.encoder(x), self.head(x)


class Task(nn.Module):
    """As Lightning's: its own call is never made."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, x):
        return self._shared(x)

    def _shared(self, x):
        return self.net(x)


X = torch.randn(2, 4)


def ruled(path, op="aten.linear"):
    return nc.Policy.native().with_rules(nc.Rule(op, "full", module=path))


@pytest.mark.parametrize("op", ["aten.linear", "module.call"])
@pytest.mark.parametrize("path", ["net.encoder", "encoder", "net.enc*", "*.encoder"])
def test_a_rule_holds_by_the_path_in_the_model_and_in_the_part(path, op):
    """Eager code, the step compiled, and the part compiled."""
    policy = ruled(path, op)
    task = Task()
    with nc.autocast("cpu", BF16, policy=policy):
        eager = [y.dtype for y in task.training_step(X)]
    whole = nc.compile(task.training_step, under=policy, backend="aot_eager")
    assert eager == [FP32, BF16]
    assert [y.dtype for y in whole(X)] == eager
    task.net = nc.compile(task.net, under=policy, backend="aot_eager")
    assert [y.dtype for y in task.training_step(X)] == eager


@pytest.mark.parametrize("look", [nc.record, nc.watch, nc.capture])
@pytest.mark.parametrize("path", ["net.encoder", "encoder"])
def test_who_looks_changes_nothing(path, look):
    """A rule that holds by the path in the model holds while the calls are recorded, watched or captured."""
    with look(), nc.autocast("cpu", BF16, policy=ruled(path)):
        assert [y.dtype for y in Task().training_step(X)] == [FP32, BF16]


def test_fabric_s_wrapper_adds_nothing_to_the_path():
    """Around the model, and around DistributedDataParallel, whose name represents it here."""

    def wrapped(name, module):
        class Wrapper(nn.Module):
            def forward(self, x):
                return self.inner(x)

        Wrapper.__name__ = name
        made = Wrapper()
        made.inner = module
        return made

    model = wrapped("_FabricModule", wrapped("DistributedDataParallel", Net()))
    with nc.autocast("cpu", BF16, policy=ruled("encoder")):
        assert [y.dtype for y in model(X)] == [FP32, BF16]
    with nc.autocast("cpu", BF16, policy=ruled("encoder")):
        assert [y.dtype for y in wrapped("AnotherModule", Net())(X)] == [BF16, BF16]


@pytest.mark.parametrize("op", ["aten.linear", "module.call"])
def test_the_part_itself_has_a_path_in_the_model(op):
    """A layer that a method of the model calls first of all."""

    class Direct(Task):
        def training_step(self, x):
            return self.net.encoder(x)

    with nc.autocast("cpu", BF16, policy=ruled("net.encoder", op)):
        assert Direct().training_step(X).dtype is FP32


@pytest.mark.parametrize("file", ["<ipython-input-3-0f2b>", "<string>", "<stdin>"])
def test_a_model_that_was_typed_in_has_paths_as_one_of_a_file(file):
    """In IPython, or by exec; recorded or not."""
    source = "class Typed(Task):\n    def training_step(self, x):\n        return self.net.encoder(x)"
    program = {"Task": Task}
    exec(compile(source, file, "exec"), program)
    with nc.autocast("cpu", BF16, policy=ruled("net.encoder")):
        assert program["Typed"]().training_step(X).dtype is FP32
        with nc.record():
            assert program["Typed"]().training_step(X).dtype is FP32


def test_a_path_in_another_module_does_not_hold():
    """The part's own path and the model's: no others."""
    task = Task()
    for path in ("task.net.encoder", "net", "other.encoder"):
        with nc.autocast("cpu", BF16, policy=ruled(path)):
            found = [y.dtype for y in task.training_step(X)]
        assert found == ([FP32, FP32] if path == "net" else [BF16, BF16])


def distil(teacher, student):
    return student(X)


def test_a_model_that_a_function_of_another_runs_is_not_looked_for_by_name_at_each_call(monkeypatch):
    """Only what holds it has a name for it, and a module that is added later has one then."""
    asked = []
    named = nn.Module.named_modules
    monkeypatch.setattr(nn.Module, "named_modules", lambda self, *a, **k: asked.append(0) or named(self, *a, **k))
    teacher, student = Task(), Net()
    with nc.autocast("cpu", BF16, policy=ruled("part.encoder")):
        distil(teacher, student)
        first = len(asked)
        assert [y.dtype for y in distil(teacher, student)] == [BF16, BF16]
        assert len(asked) == first
        teacher.part = student
        assert [y.dtype for y in distil(teacher, student)] == [FP32, BF16]


def test_a_comparison_does_not_take_the_function_that_asks_for_a_model(monkeypatch):
    """What runs is a copy, which is nobody's part."""
    asked = []

    class Asked(Net):
        def named_modules(self, *args, **kwargs):
            asked.append(0)
            return super().named_modules(*args, **kwargs)

    def compared(model):
        return nc.compare(model, (X,), under=ruled("encoder"))

    compared(Asked())
    with_a_model = len(asked)
    asked.clear()
    nc.compare(Asked(), (X,), under=ruled("encoder"))
    assert with_a_model < 2 * len(asked)
