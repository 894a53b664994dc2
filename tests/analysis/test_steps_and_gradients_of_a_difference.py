"""Differences of training loops: the first step, factors of gradients, and what is done to them after a backward."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc

LINES = Path(__file__).read_text().split("\n")


class Head(nn.Module):
    """A product and a step by hand; a head after it. factor: of the step."""

    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.factor = nn.Linear(16, 16), nn.Linear(16, 4), factor

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x)) * self.factor)


def trained(model, steps=3, parts=1, averaged=True, clip=None):
    """Return the run of some steps on one batch, in micro-batches; clip: called with the parameters before each."""
    torch.manual_seed(1)
    x, y = torch.randn(16, 16), torch.arange(16) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with nc.capture() as run:
        for _ in range(steps):
            optimizer.zero_grad()
            for inputs, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
                loss = F.cross_entropy(model(inputs), labels)
                (loss / parts if averaged and parts > 1 else loss).backward()
            if clip is not None:
                clip(list(model.parameters()))
            optimizer.step()
    return run


def test_first_step_of_a_loop_is_kept(tmp_path):
    """The run knows what came before the first step, with the gradients that it used; its file does, too."""
    run = trained(Head())
    assert run.steps == 3 and 0 < run.calls_before_step < len(run.calls) / 2
    assert run.first_gradients.keys() == run.parameters.keys()
    loaded = nc.load(run.save(tmp_path / "run"))
    assert (loaded.steps, loaded.calls_before_step) == (3, run.calls_before_step)
    first = loaded.before_first_step()
    assert all("before" not in row for row in first.parameters.values()) and len(first.calls) == run.calls_before_step
    same = nc.diff(first, trained(Head(), steps=1).before_first_step())
    assert same.verdict == "alike" and len(same.gradients) == 4 and not same.unaligned, str(same)


def test_runs_without_steps_say_nothing_of_them(tmp_path):
    """A file of a forward has no word of steps, and an older file of a loop, which has none either, is read."""
    run = nc.capture(Head(), (torch.randn(2, 16),))
    assert not {"steps", "calls_before_step", "first_gradients"} & run.data().keys()
    assert nc.load(run.save(tmp_path / "run")).steps == 0


def test_difference_of_a_loop_is_the_first_steps():
    """Later steps start from other weights, in which everything differs."""
    found = nc.diff(trained(Head()), trained(Head(factor=0.5)))
    assert found.verdict == "values differ" and any("precedes the first step" in note for note in found.notes), str(
        found
    )
    assert len(found.rows) < 16 and "aten.tanh" in str(found) + str(found.rows[1].a), str(found)
    assert nc.diff(trained(Head()), trained(Head())).verdict == "alike"


def test_reader_of_what_only_one_program_calls():
    """It is named with its line, beside that of the call which one program alone makes."""

    class Without(Head):
        def forward(self, x):
            return self.head(self.layer(x))

    x = torch.randn(8, 16)
    found = nc.diff(nc.capture(Head(), (x,)), nc.capture(Without(), (x,)))
    assert [str(one.read_by) for one in found.alone] == ["head aten.linear.default #1"] * len(found.alone) != []
    first = {one.run: str(one.id) for one in reversed(found.front)}
    assert first == {"a": "aten.tanh.default #1", "b": "head aten.linear.default #1"}, found.front


@pytest.mark.parametrize(("parts", "averaged", "factor"), [(4, False, "4"), (4, True, ""), (1, True, "")])
def test_factor_of_all_gradients(parts, averaged, factor):
    """Losses of micro-batches that are not divided make gradients larger by one number."""
    found = nc.diff(trained(Head(), 1), trained(Head(), 1, parts, averaged))
    told = [note for note in found.notes if "every gradient of b" in note]
    assert bool(factor) == bool(told) == (found.verdict == "values differ"), str(found)
    assert all(f"is {factor} times" in note for note in told), told


def test_what_is_done_to_gradients_after_a_backward():
    """Gradients that one program alone clips: its own calls are named, not "how gradients are made"."""

    def clip(parameters):
        for parameter in parameters:
            parameter.grad.mul_(0.1 / parameter.grad.norm())

    found = nc.diff(trained(Head(), 1), trained(Head(), 1, clip=clip))
    ops = {one.id.op.split(".")[1] for one in found.alone}
    assert found.verdict == "values differ" and ops == {"linalg_vector_norm", "reciprocal", "mul", "mul_"}, str(found)
    assert not any("every gradient" in note for note in found.notes)


def by_optimizer(model, x, y, rate, region):
    """Steps of an optimizer, by gradients that `backward` leaves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(2):
        optimizer.zero_grad()
        with region():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def in_place(model, x, y, rate, region):
    """Gradients that no parameter keeps; parameters are written to."""
    parameters = list(model.parameters())
    for _ in range(2):
        with region():
            loss = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            with torch.no_grad():
                parameter -= rate * gradient


def through_data(model, x, y, rate, region):
    """Gradients of a function of parameters; their memory is written to, and no module is called as such."""
    named = dict(model.named_parameters())

    def loss(values):
        return F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)

    for _ in range(2):
        with region():
            gradients = torch.func.grad(loss)({name: p.detach() for name, p in named.items()})
        for name, parameter in named.items():
            parameter.data.sub_(rate * gradients[name])


@pytest.mark.parametrize("other", [in_place, through_data])
@pytest.mark.parametrize("low", [None, "bf16"])
@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_weights_that_moved_alike(other, low, rate):
    """What steps have made of the weights is the outcome of a loop, whatever keeps gradients."""
    runs = []
    for loop, of in ((by_optimizer, 0.5), (other, rate)):
        torch.manual_seed(1)
        model, x, y = Head(), torch.randn(16, 16), torch.arange(16) % 4
        with nc.capture() as run:
            loop(model, x, y, of, lambda: nc.autocast("cpu", low) if low else contextlib.nullcontext())
        assert len(run.parameters) == 4 and all("before" in row for row in run.parameters.values()), run.parameters
        runs.append(run)
    assert (nc.diff(*runs).verdict == "values differ") is (rate != 0.5)


def test_weights_that_are_made_in_the_block_have_not_moved():
    """What fills new parameters is no step."""
    with nc.capture() as run:
        model = Head()
        model(torch.randn(2, 16))
    assert run.steps == 0 and not any("before" in row for row in run.parameters.values())


def test_gradient_that_one_run_alone_has():
    """A product whose weight gets no gradient in one program is a difference, and no factor of all gradients."""

    class Detached(Head):
        def forward(self, x):
            return self.head(torch.tanh(self.layer(x)).detach())

    found = nc.diff(trained(Head(), 1), trained(Detached(), 1))
    assert found.verdict == "values differ" and not any("every gradient" in note for note in found.notes), str(found)
    assert any(row.difference == 1 and not row.measured_by for row in found.gradients), found.gradients


def test_steps_that_lead_elsewhere_by_gradients_that_agree():
    """What optimizers do differently shows in the weights alone: their calls are named, or that the steps differ."""

    def by_hand(model, x, y, rate, region):
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        with region():
            F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter, v in zip(model.parameters(), velocity, strict=True):
                v += parameter.grad / (parameter.grad.norm() + 1)
                parameter.sub_(rate * v)

    torch.manual_seed(1)
    x, y, runs = torch.randn(16, 16), torch.arange(16) % 4, []
    for rate, hand in ((0.5, False), (0.25, False), (0.5, True)):
        model = Head()
        with nc.capture() as run:
            if hand:
                by_hand(model, x, y, rate, contextlib.nullcontext)
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=rate)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        runs.append(run)
    slower, other = nc.diff(runs[0], runs[1]), nc.diff(runs[0], runs[2])
    assert slower.verdict == "values differ" and slower.weights_apart == pytest.approx(0.5, abs=0.05), str(slower)
    assert slower.todos[0].what == "Give both runs the same lr in SGD", str(slower)
    slower.other_step = None
    assert any("steps of the optimizer" in todo.what for todo in slower.todos), str(slower)
    assert other.verdict == "values differ" and "aten.sub_.Tensor" in {one.id.op for one in other.alone}, str(other)


def test_values_that_ops_on_lists_write():
    """A parameter that an op on a list has written to is another tensor after that, whatever its version says."""
    parameter, x = nn.Parameter(torch.ones(4, 4)), torch.randn(2, 4)
    with nc.capture() as run:
        for _ in range(2):
            x @ parameter
            with torch.no_grad():
                torch._foreach_add_([parameter], [torch.ones(4, 4)])
    first, second = (dict(call.inputs)["mat2"] for call in run.calls if call.id.op == "aten.mm.default")
    assert first != second and run.steps == 2
    assert [run.tensors[n].mean for n in (first, second)] == [1.0, 2.0]


def of_replicas(dtype, share=0.5):
    """Return the run of two steps of two replicas, each with one half of the batch; their gradients are averaged."""
    torch.manual_seed(1)
    x, y = torch.randn(16, 16), torch.arange(16) % 4
    replicas = [Head(), Head()]
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.5) for replica in replicas]
    with nc.capture() as run:
        for _ in range(2):
            for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
                with nc.autocast("cpu", dtype, enabled=dtype is not None):
                    logits = replica(x[rank::2])
                optimizer.zero_grad()
                F.cross_entropy(logits.float(), y[rank::2]).backward()
            for one, other in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = (one.grad + other.grad) * share  # of replicas
                one.grad.copy_(mean)
                other.grad.copy_(mean)
            for optimizer in optimizers:
                optimizer.step()
    return run


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_replicas_train_as_the_whole_batch_does(low):
    """A parameter with another's value and gradient is that one's replica; gradients that are not averaged differ."""
    whole = trained(Head(), steps=2)
    assert nc.diff(whole, of_replicas(low)).verdict in ("round-off", "formats differ")
    found = nc.diff(whole, of_replicas(low, share=1.0))
    sums = 1 + next(n for n, line in enumerate(LINES) if line.endswith("# of replicas"))
    assert found.verdict == "values differ" and any(x.place.endswith(f":{sums}") for x in found.front), str(found)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("kind", ["", "frozen", "in no optimizer"])
def test_a_layer_that_one_program_does_not_train_is_a_difference_after_one_step(kind, pieces):
    """The forward and the loss are the same to the bit, and so are the gradients of an optimizer's other weights."""

    def step(kind, pieces):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 5))
        net[2].requires_grad_(kind != "frozen")
        trained = [p for name, p in net.named_parameters() if kind != "in no optimizer" or not name.startswith("2.")]
        optimizer = torch.optim.SGD(trained, 0.1)
        x, y = torch.randn(30, 12), torch.randint(0, 5, (30,))
        with nc.capture() as run:
            for part, of in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
                (nn.functional.cross_entropy(net(part), of) / pieces).backward()
            optimizer.step()
        return run

    found = nc.diff(step("", 1), step(kind, pieces))
    assert found.verdict == ("values differ" if kind else ("alike", "round-off")[pieces > 1]), str(found)
    assert [(one.run, one.name) for one in found.untrained] == [("b", "2.weight"), ("b", "2.bias")] * bool(kind)
    assert ("Inspect how b trains 2.weight of a and 1 more parameter" in " ".join(str(found).split())) is bool(kind)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_of_a_fused_weight_and_of_its_parts_are_no_pair(optimizer):
    """One program calls a model, the other its parts: the updates, in no module, are of weights of other sizes."""

    def run(is_split):
        torch.manual_seed(0)
        norm, fused, out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 5)
        parts = [nn.Linear(16, 16) for _ in range(3)]
        with torch.no_grad():
            for n, part in enumerate(parts):
                part.weight.copy_(fused.weight[16 * n : 16 * n + 16])
                part.bias.copy_(fused.bias[16 * n : 16 * n + 16])
        x, y = torch.randn(6, 7, 16), torch.randint(0, 5, (6, 7))

        def attended(q, k, v):
            return out((q @ k.mT / 4).softmax(-1) @ v)

        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.fused, self.out = norm, fused, out

            def forward(self, x):
                return attended(*self.fused(self.norm(x)).chunk(3, -1))

        whole = Whole()
        weights = [*(p for part in parts for p in part.parameters()), *norm.parameters(), *out.parameters()]
        stepped = optimizer(weights if is_split else whole.parameters(), 1e-2)
        with nc.capture() as captured:
            z = norm(x) if is_split else None
            scores = attended(*(part(z) for part in parts)) if is_split else whole(x)
            F.cross_entropy(scores.flatten(0, 1), y.flatten()).backward()
            stepped.step()
        return captured

    found = nc.diff(run(False), run(True))
    assert found.verdict == "round-off", str(found)


def test_formats_of_the_backward_are_not_to_be_named_in_a_rule():
    """They follow from those of the forward, and eager autograd asks no policy."""
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(60, 32), nn.Linear(32, 60)), torch.randint(0, 60, (6, 14))
    targets = ids[:, 1:]

    def parts_in_bf16():
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), targets.flatten())
        loss.backward()

    def parts_in_fp32():
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids).float()[:, :-1]
            loss = (logits.logsumexp(2) - logits.gather(2, targets[..., None])[..., 0]).mean()
        loss.backward()

    runs = []
    for step in (parts_in_bf16, parts_in_fp32):
        model.zero_grad()
        with nc.capture() as run:
            step()
        runs.append(run)
    found = nc.diff(*runs)
    assert found.verdict == "formats differ"
    (todo,) = found.todos
    assert "compare the casts in the forward of aten.slice_backward" in todo.what and "rule" not in todo.what
