"""nc.Scaler where torch's scaler fails, refuses or says nothing."""

import copy
import inspect
import math
import pickle
import warnings
from functools import partial

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import ScalerError, ScalerWarning
from narrowcast.training.scaler.gradients import Culprits, check
from narrowcast.training.scaler.readings import HostNumbers

INF = float("inf")


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))


def train(scaler, factors, **options):
    """One weight of ones under SGD; each factor is a gradient. The weight, and what the steps gave."""
    weight = torch.nn.Parameter(torch.ones(3))
    steps = torch.optim.SGD([weight], lr=0.1, **options)
    results = []
    for factor in factors:
        steps.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        results.append(scaler.step(steps))
        scaler.update()
    return weight.detach(), results


# -- the scale ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overflows", "scale"), [(144, 2.938735877055719e-39), (166, 0.0)])
def test_a_scale_that_falls_for_ever_ruins_torchs_weights_and_not_ours(overflows, scale):
    """After 144 overflows 1/scale is infinite in fp32, after 166 the scale is 0: one clean step, and they are gone."""
    factors = [INF] * overflows + [1.0]
    theirs = torch.amp.GradScaler("cpu")
    ruined, _ = train(theirs, factors)
    assert not torch.isfinite(ruined).any() and theirs.get_scale() == scale
    ours = nc.Scaler("cpu")
    with pytest.warns(ScalerWarning, match="steps were skipped in a row"):
        weight, _ = train(ours, factors)
    assert torch.equal(weight, torch.full((3,), 0.9)) and ours.get_scale() == 1.0


def test_patience_is_said_with_the_line_the_parameters_and_the_lowest_scale():
    """At the 20th skipped step, then each time that the streak has doubled; a clean step begins again."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(nc.Scaler("cpu"), [INF] * 90)
    times = [str(w.message).split(":")[1].split()[0] for w in said]
    assert times == ["20", "40", "80"] and {w.filename for w in said} == {__file__}
    assert "parameter 0 of group 0 (3,) is infinite" in str(said[0].message)
    assert "4 of them at the lowest scale, 1." in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(nc.Scaler("cpu", init_scale=2.0**90), ([INF] * 19 + [1.0]) * 4)


def test_it_raises_if_so_told_and_can_go_on():
    """The state is whole when it raises: the next clean step is a step."""
    scaler = nc.Scaler("cpu", on_stuck="raise", patience=3)
    with pytest.raises(ScalerError, match="3 steps were skipped in a row") as raised:
        train(scaler, [INF] * 9)
    assert raised.value.where[0].file == __file__ and scaler.get_scale() == 8192.0
    weight, _ = train(scaler, [1.0])
    assert torch.equal(weight, torch.full((3,), 0.9)) and len(scaler.history) == 4


def test_few_skipped_steps_at_the_lowest_scale_are_enough():
    """Whatever patience says: the scale cannot fall any further."""
    with pytest.raises(ScalerError, match=r"4 of them at the lowest scale, 0\.5"):
        train(nc.Scaler("cpu", init_scale=1.0, min_scale=0.5, on_stuck="raise"), [INF] * 5)


def test_a_scale_that_the_user_sets_below_the_lowest_is_his():
    """It is not raised, and does not fall further; one whose reciprocal is infinite is refused."""
    scaler = nc.Scaler("cpu", init_scale=0.25)
    train(scaler, [INF])
    assert scaler.get_scale() == 0.25
    for new in (0.125, torch.tensor(0.0625)):
        scaler.update(new)
        train(scaler, [INF])
        assert scaler.get_scale() == float(new)
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 0.0625
    with pytest.raises(ScalerError, match="no reciprocal"):
        scaler.update(0.0)
    ruined = torch.amp.GradScaler("cpu", init_scale=0.0)
    with pytest.raises(ScalerError, match="no reciprocal"):
        scaler.load_state_dict(ruined.state_dict())


@pytest.mark.parametrize(
    "arguments",
    [{"init_scale": 0.0}, {"min_scale": 0.0}, {"patience": 0}, {"on_stuck": "cry"}, {"backoff_factor": 0.0}],
)
def test_arguments_that_make_no_sense_are_refused(arguments):
    """With what was asked."""
    with pytest.raises(ScalerError, match=str(next(iter(arguments)))):
        nc.Scaler("cpu", **arguments)


def test_torchs_arguments_come_first_and_in_its_order():
    """So that no call of torch's scaler means something else."""
    theirs = list(inspect.signature(torch.amp.GradScaler.__init__).parameters.values())
    ours = list(inspect.signature(nc.Scaler.__init__).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


# -- what step gives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_says_whether_it_was_skipped_and_why(options):
    """Also where a fused optimizer decides; later steps do not change what is said of earlier ones."""
    _, (good, bad, last) = train(nc.Scaler("cpu"), [1.0, INF, 1.0], **options)
    assert good and not good.skipped and good.why == "" and good.parameters == ()
    assert not bad and bad.skipped and bad.value is None
    assert bad.why == "the gradient of parameter 0 of group 0 (3,) is infinite"
    assert bool(last) and repr(last) == "<StepResult: stepped>" and "skipped: the gradient" in repr(bad)


def test_parameters_have_the_models_names_or_the_optimizers():
    """`Scaler(model=...)`, an optimizer of named parameters, or those of the model that is watched."""
    for named, given in ((False, True), (True, False)):
        model = model_of()
        steps = torch.optim.SGD(model.named_parameters() if named else model.parameters(), lr=0.1)
        scaler = nc.Scaler("cpu", model=model if given else None)
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        model[1].weight.grad[0, 0] = math.nan
        result = scaler.step(steps)
        assert result.parameters == ("1.weight",) and result.why == "the gradient of 1.weight is NaN"


def test_a_clip_does_not_blame_all_parameters():
    """It spreads NaN over all gradients; they are looked at when they are unscaled."""
    model = model_of()
    steps = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = nc.Scaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    model[0].bias.grad[0] = math.nan
    norm = scaler.clip_grad_norm_(steps, 1.0)
    assert norm.isnan() and all(p.grad.isnan().all() for p in model.parameters())
    assert scaler.step(steps).parameters == ("0.bias",)


def test_an_open_watch_names_the_op_that_overflowed():
    """And counts the skipped step; the warning repeats it."""
    model = model_of()
    steps = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = nc.Scaler("cpu", patience=1)
    with nc.watch() as watched, pytest.warns(ScalerWarning, match=r"aten.linear.default #1") as said:
        for x in (torch.ones(2, 4), torch.ones(2, 4) * 1e5, torch.ones(2, 4)):
            steps.zero_grad()
            with nc.autocast("cpu", "fp16"):
                y = model(x)
            scaler.scale(y.float().square().mean()).backward()
            result = scaler.step(steps)
            scaler.update()
    row = scaler.history.rows[1]
    assert row.skipped and "overflow" not in row.why and __file__ in row.why and "0.weight" in row.why
    assert watched.steps == 3 and watched.first.step == 2 and not result.skipped
    assert "with nc.watch" not in str(said[0].message)


def test_without_a_watch_the_warning_says_how_to_have_one():
    """It names no op."""
    with pytest.warns(ScalerWarning, match=r"with nc.watch\(\) as w"):
        train(nc.Scaler("cpu", patience=1), [INF])


class Late(HostNumbers):
    """Numbers that come late, as from an accelerator: who reads one before waits for the device."""

    has_come, waits = False, 0

    @property
    def is_here(self):
        return Late.has_come

    def values(self):
        Late.waits += not Late.has_come
        return super().values()


@pytest.fixture
def late(monkeypatch):
    """Every reading is late until it is said to have come."""
    monkeypatch.setattr("narrowcast.training.scaler.scaler.HostNumbers", Late)
    monkeypatch.setattr("narrowcast.training.scaler.gradients.HostNumbers", Late)
    monkeypatch.setattr(Late, "has_come", False)
    monkeypatch.setattr(Late, "waits", 0)
    return Late


def test_nothing_waits_for_the_device_until_somebody_asks(late):
    """With a fused optimizer, which decides there: neither steps nor updates do, however many are skipped."""
    scaler = nc.Scaler("cpu", patience=3, on_stuck="raise")
    _, results = train(scaler, [1.0, INF, INF, INF, INF], fused=True)
    assert late.waits == 0 and repr(results[1]) == "<StepResult: not known yet, the device has not reported>"
    assert results[1].skipped and late.waits == 1
    assert "its gradients were freed" in results[1].why  # new ones have been computed meanwhile
    assert len(scaler.history) == 5 and scaler.history.skipped == 4
    late.has_come = True
    with pytest.raises(ScalerError, match="3 steps were skipped in a row"):  # when the next step ends
        train(scaler, [INF], fused=True)


def test_gradients_are_looked_at_in_time_once_steps_are_being_skipped(late):
    """The first skipped step is known too late to name anybody; those after it are named."""
    late.has_come = True
    scaler = nc.Scaler("cpu")
    train(scaler, [INF], fused=True)
    late.has_come = False
    _, (second,) = train(scaler, [INF], fused=True)
    train(scaler, [1.0], fused=True)
    assert second.parameters == ("parameter 0 of group 0 (3,)",)


def test_a_device_that_cannot_say_what_has_come_is_read_now_and_then(late):
    """So that what waits does not grow for ever."""
    scaler = nc.Scaler("cpu")
    train(scaler, [1.0] * 70)
    assert late.waits > 0 and len(scaler._steps.history) == 65


# -- what torch's refuses ----------------------------------------------------------------------------------------------


def test_fp16_gradients_are_unscaled_and_said():
    """torch's raises. What is lost below the smallest number of fp16 is lost: hence the finding."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    steps = torch.optim.SGD([weight], lr=0.5)
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(weight.sum()).backward()
    with pytest.raises(ValueError, match="FP16"):
        theirs.unscale_(steps)
    weight.grad = None
    scaler = nc.Scaler("cpu", init_scale=1024.0)
    with pytest.warns(ScalerWarning, match="nothing below 6e-8"):
        scaler.scale(weight.sum()).backward()
        assert scaler.step(steps)
    scaler.update()
    assert torch.equal(weight, torch.full((3,), 0.5, dtype=torch.float16)) and len(scaler.findings) == 1


def test_bf16_gradients_are_unscaled():
    """In bf16."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    steps = torch.optim.SGD([weight], lr=0.5)
    scaler = nc.Scaler("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalerWarning)
        scaler.scale(weight.sum()).backward()
    scaler.step(steps)
    assert torch.equal(weight, torch.full((3,), 0.5, dtype=torch.bfloat16))


def lbfgs(scaler):
    """A square well: the weight, the optimizer and the closure, scaled if there is a scaler."""
    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    steps = torch.optim.LBFGS([weight], max_iter=4, line_search_fn="strong_wolfe")

    def closure():
        steps.zero_grad()
        loss = (weight - 1).square().sum()
        (scaler.scale(loss) if scaler else loss).backward()
        return loss

    return weight, steps, closure


def test_closures_see_unscaled_gradients():
    """LBFGS goes the way that it goes without a scaler, to the bit: the scale is a power of two."""
    plain, plain_steps, closure = lbfgs(None)
    scaler = nc.Scaler("cpu")
    ours, our_steps, scaled = lbfgs(scaler)
    for _ in range(3):
        first = plain_steps.step(closure)
        result = scaler.step(our_steps, closure=scaled)
        scaler.update()
        assert float(result) == float(first.detach()) and result.value is not None
        assert torch.equal(plain, ours)
    with pytest.raises(RuntimeError, match="Closure"):
        torch.amp.GradScaler("cpu").step(our_steps, closure=scaled)


@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_closures_step_is_made_whole_or_not_at_all(call):
    """An overflow in a later call of it: parameters and state are as before, and the scale backs off."""
    scaler = nc.Scaler("cpu")
    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    steps = torch.optim.LBFGS([weight], lr=0.1, max_iter=4)
    factors = []

    def closure():
        steps.zero_grad()
        loss = (weight[0] - 1) ** 4 + (weight[1] - weight[0] ** 2) ** 2
        scaler.scale(loss * (factors.pop(0) if factors else 1.0)).backward()
        return loss

    assert scaler.step(steps, closure)
    scaler.update()
    before, state = weight.detach().clone(), copy.deepcopy(steps.state_dict())
    factors += [1.0] * call + [INF]
    result = scaler.step(steps, closure)
    scaler.update()
    assert result.skipped and "infinite" in result.why and not factors
    assert torch.equal(weight, before) and str(steps.state_dict()) == str(state) and scaler.get_scale() == 32768.0
    assert scaler.step(steps, closure) and not torch.equal(weight, before)


def test_a_closure_may_unscale_its_gradients_to_clip_them():
    """They are divided once; before the step that makes no sense, and is refused."""
    scaler = nc.Scaler("cpu")
    plain, plain_steps, closure = lbfgs(None)
    ours, our_steps, scaled = lbfgs(scaler)

    def clipping(closure, weight, unscale=lambda: None):
        def clipped():
            loss = closure()
            unscale()
            torch.nn.utils.clip_grad_norm_([weight], 0.5)
            return loss

        return clipped

    for _ in range(3):
        plain_steps.step(clipping(closure, plain))
        assert scaler.step(our_steps, clipping(scaled, ours, lambda: scaler.unscale_(our_steps)))
        scaler.update()
        assert torch.equal(plain, ours)
    assert not scaler.findings  # a clip of the call before is none of scaled gradients
    scaled()
    scaler.unscale_(our_steps)
    with pytest.raises(ScalerError, match=r"unscaled already\n(.*\n)*.*in the closure"):
        scaler.step(our_steps, scaled)


def test_a_closure_that_returns_the_scaled_loss_is_refused():
    """A line search would compare it with slopes that are not scaled."""
    weight = torch.nn.Parameter(torch.ones(2))
    steps = torch.optim.LBFGS([weight])
    scaler = nc.Scaler("cpu")

    def closure():
        scaled = scaler.scale(weight.sum())
        scaled.backward()
        return scaled

    with pytest.raises(ScalerError, match="returned the scaled loss"):
        scaler.step(steps, closure)


# -- several losses ----------------------------------------------------------------------------------------------------


def test_several_losses_have_a_scale_each():
    """The gradient is the sum of both, unscaled; the one that overflows backs off alone, and the step is skipped."""
    weight = torch.nn.Parameter(torch.ones(2))
    steps = torch.optim.SGD([weight], lr=0.1)
    scaler = nc.Scaler("cpu", growth_interval=2)
    for number in range(4):
        steps.zero_grad()
        scaler.backward((weight * 2).sum(), steps, loss_id="content")
        scaler.backward((weight * (INF if number == 1 else 3)).sum(), [steps], loss_id="style")
        if number == 0:
            assert torch.equal(weight.grad, torch.full((2,), 5.0))
        result = scaler.step(steps)
        scaler.update()
        assert result.skipped == (number == 1)
    assert scaler.loss_scales == {"content": 2.0**18, "style": 2.0**16}
    assert torch.allclose(weight, torch.full((2,), -0.5)) and scaler.get_scale() == 2.0**16
    assert [(r.loss, r.skipped) for r in scaler.history.rows][2:4] == [("content", False), ("style", True)]
    again = nc.Scaler("cpu")
    again.load_state_dict(scaler.state_dict())
    assert again.loss_scales == pickle.loads(pickle.dumps(scaler)).loss_scales == scaler.loss_scales


def test_a_loss_without_a_name_among_named_ones_is_refused():
    """Its gradients would be added at another scale."""
    weight = torch.nn.Parameter(torch.ones(2))
    steps = torch.optim.SGD([weight], lr=0.1)
    scaler = nc.Scaler("cpu")
    scaler.backward(weight.sum(), steps, loss_id="a")
    with pytest.raises(ScalerError, match="scales of their own"):
        scaler.scale(weight.sum())
    scaler.step(steps)
    scaler.update()
    scaler.scale(weight.sum())
    with pytest.raises(ScalerError, match="scale\\(\\) was called"):
        scaler.backward(weight.sum(), steps, loss_id="a")


# -- devices -----------------------------------------------------------------------------------------------------------


def test_gradients_are_checked_device_by_device():
    """A flag for each; the meta device represents another one."""
    here, there = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, device="meta"))
    here.grad, there.grad = torch.full((2,), INF), torch.ones(2, device="meta")
    steps = torch.optim.SGD([here, there], lr=0.1)
    flags = check(steps, torch.tensor(0.5), torch.zeros(()))
    assert [device.type for device in flags] == ["cpu", "meta"] and flags[here.device] == 1.0


def test_sparse_and_empty_gradients_can_be_blamed():
    """The first by what it stores; an empty one by nothing."""
    table, empty = torch.nn.Embedding(4, 2, sparse=True), torch.nn.Parameter(torch.zeros(0))
    table(torch.tensor([1, 1])).sum().backward()
    table.weight.grad = table.weight.grad * INF
    empty.grad = torch.zeros(0)
    steps = torch.optim.SGD([empty, table.weight], lr=0.1)
    assert [(number, what) for number, _, what in Culprits(steps).read()] == [(1, "infinite")]


# -- findings ----------------------------------------------------------------------------------------------------------


def line_of(text):
    """The line of this file that holds the text, once."""
    lines = [n for n, line in enumerate(inspect.getsource(inspect.getmodule(line_of)).splitlines(), 1) if text in line]
    assert len(lines) == 2, lines  # there, and where it is asked for
    return lines[0]


def found(scaler, kind):
    """The line of the only finding, which must be of this kind."""
    (finding,) = scaler.findings
    assert finding.kind == kind and finding.file == __file__ and finding.todo
    return finding.line


def iteration():
    model = model_of()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), nc.Scaler("cpu")


@pytest.mark.filterwarnings("ignore::narrowcast.errors.ScalerWarning")
def test_each_mistake_is_found_with_its_line():
    """One planted in each loop."""
    model, steps, scaler = iteration()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.ones(2, 4))
    scaler.scale(y.float().sum()).backward()  # in bf16
    assert found(scaler, "scaler not needed") == line_of(".sum()).backward()  # in bf16")

    off = nc.Scaler("cpu", enabled=False)
    with torch.autocast("cpu", torch.float16):
        y = model(torch.ones(2, 4))
    off.scale(y.float().sum()).backward()  # in fp16
    assert found(off, "loss not scaled") == line_of(".sum()).backward()  # in fp16")

    model, steps, scaler = iteration()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # while scaled
    scaler.step(steps)
    assert found(scaler, "clip before unscale_") == line_of("1.0)  # while scaled")

    model, steps, scaler = iteration()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(steps)
    scaler.update()
    model(torch.ones(2, 4)).sum().backward()
    scaler.step(steps)  # of a loss that is not scaled
    assert found(scaler, "loss not scaled") == line_of("  # of a loss that is not scaled")

    model, steps, scaler = iteration()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.unscale_(steps)
    scaler.update()  # no step
    assert found(scaler, "update without step") == line_of("scaler.update()  # no step")


def test_what_is_right_is_not_found():
    """A clip after unscale_, one of scaled gradients at a scaled limit, a step left out, one of the optimizer alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, steps, _ = iteration()
        scaler = nc.Scaler("cpu", init_scale=64.0)
        for way in range(4):
            steps.zero_grad()
            with torch.autocast("cpu", torch.float16):
                y = model(torch.ones(2, 4) * (INF if way == 2 else 1))
            scaler.scale(y.float().sum()).backward()
            if way == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
            else:
                scaler.unscale_(steps)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            if way == 3:
                steps.step()  # as after `if norm.isfinite()`
            elif way != 2:
                scaler.step(steps)
            scaler.update()
    assert scaler.findings == () and [row.skipped for row in scaler.history] == [False, False, True, False]


def refused(call, says):
    """Both of torch's classes of errors, and ours, with the lines."""
    for kind in (ScalerError, RuntimeError, AssertionError):
        with pytest.raises(kind, match=says) as raised:
            call()
    assert all(where.file == __file__ for where in raised.value.where)
    return [where.line for where in raised.value.where]


def test_calls_in_an_order_that_ruins_a_step_are_refused_with_both_lines():
    """unscale_ twice or after step, step twice, update of nothing, a step before any loss was scaled."""
    model, steps, scaler = iteration()
    refused(lambda: scaler.step(steps), "no loss was scaled")
    refused(lambda: scaler.unscale_(steps), "no loss was scaled")
    scaler.scale(model(torch.ones(2, 4)).sum())
    refused(lambda: scaler.step(steps), "none of the optimizer's parameters has a gradient")
    scaler = nc.Scaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    refused(scaler.update, "no gradients were checked")
    scaler.unscale_(steps)  # the first
    assert refused(lambda: scaler.unscale_(steps), "unscale_")[1] == line_of("scaler.unscale_(steps)  # the first")
    scaler.step(steps)  # the only one
    for again in (scaler.step, scaler.unscale_, lambda o: scaler.clip_grad_norm_(o, 1.0)):
        lines = refused(lambda again=again: again(steps), r"step\(\) was called")
        assert lines[1] == line_of("scaler.step(steps)  # the only one")
    with pytest.raises(AssertionError, match="pickled"):
        pickle.dumps(scaler)


class Around(torch.optim.SGD):
    """A wrapper as Lightning's and Accelerate's are: of the optimizer's class, with its step."""

    def __init__(self, inner, name="optimizer"):
        self.__dict__[name] = self.__dict__["inner"] = inner
        self.steps = 0

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def step(self, *args, **kwargs):
        self.steps += 1
        return self.inner.step(*args, **kwargs)


@pytest.mark.parametrize("fused", [False, True])
def test_a_wrapper_and_its_optimizer_are_one(fused):
    """What one of them unscales the other does not unscale again; the step is the wrapper's, also of a fused kernel."""
    for first in "unscale the wrapper", "step the wrapper", "unscale the optimizer":
        weight = torch.nn.Parameter(torch.ones(3))
        inner = torch.optim.SGD([weight], lr=0.1, fused=fused)
        wrapper, scaler = Around(Around(inner)), nc.Scaler("cpu")
        scaler.scale(weight.sum()).backward()
        if first != "step the wrapper":
            one, other = (wrapper, inner) if first == "unscale the wrapper" else (inner, wrapper)
            scaler.unscale_(one)
            refused(lambda scaler=scaler, other=other: scaler.unscale_(other), "unscale_")
            scaler.step(other)
        else:
            scaler.step(wrapper)
        refused(lambda scaler=scaler, inner=inner: scaler.step(inner), r"step\(\) was called")
        scaler.update()
        assert torch.allclose(weight, torch.full((3,), 0.9)) and wrapper.steps == (first != "unscale the wrapper")


def test_gradients_that_another_optimizer_unscaled_are_refused():
    """By way of a wrapper that does not say what it wraps; not where they were computed again."""
    weight = torch.nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([weight], lr=0.1)
    other, scaler = Around(inner, "hidden"), nc.Scaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(other)
    refused(lambda: scaler.unscale_(inner), "one with these gradients")
    refused(lambda: scaler.step(inner), "one with these gradients")
    weight.grad = None
    scaler.scale(weight.sum()).backward()
    scaler.step(inner)
    assert torch.allclose(weight, torch.full((3,), 0.9))


def test_complex_gradients_are_unscaled_and_checked():
    """As the real numbers that they hold, also as a view that is conjugated, and beside real ones."""
    for bad in (False, True):
        weights = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.complex64, torch.float32)]
        steps, scaler = torch.optim.SGD(weights, lr=0.1), nc.Scaler("cpu")
        factor = torch.tensor([2j, INF if bad else 3.0])
        scaler.scale((weights[0] * factor).real.sum() + weights[1].sum()).backward()
        weights[0].grad = weights[0].grad.conj()
        result = scaler.step(steps)
        assert result.skipped is bad
        wanted = [1, 1] if bad else [1 - 0.2j, 0.7]
        assert torch.allclose(weights[0], torch.tensor(wanted, dtype=torch.complex64))
        if bad:
            assert result.parameters == ("parameter 0 of group 0 (2,)",)
        scaler.update()


def test_a_lowest_scale_above_the_first_is_refused():
    """If it was asked for; the default gives way to a first scale below 1."""
    refused(lambda: nc.Scaler("cpu", init_scale=2.0, min_scale=4.0), "below the lowest")
    assert nc.Scaler("cpu", init_scale=0.5)._floor == 0.5 and nc.Scaler("cpu")._floor == 1.0


def test_a_scaler_for_cuda_without_cuda_is_off_and_says_so():
    """At the user's line, as torch's does at its own."""
    if torch.cuda.is_available():
        assert nc.Scaler().is_enabled()
        return
    with pytest.warns(ScalerWarning, match="there is none") as said:
        assert not nc.Scaler().is_enabled()
    assert said[0].filename == __file__


# -- history -----------------------------------------------------------------------------------------------------------


def test_the_history_is_data_and_scalars(tmp_path):
    """Every step in order, with the scale that was in force."""
    scaler = nc.Scaler("cpu", growth_interval=2)
    train(scaler, [1.0, INF, 1.0, 1.0, 1.0])
    rows = [(row.step, row.scale, row.skipped) for row in scaler.history]
    assert rows == [(1, 65536, False), (2, 65536, True), (3, 32768, False), (4, 32768, False), (5, 65536, False)]
    again = nc.load(scaler.history.save(tmp_path / "scaler.json"))
    assert again == scaler.history and list(again)[1].parameters == ("parameter 0 of group 0 (3,)",)

    class Writer:
        def __init__(self):
            self.scalars = []

        def add_scalar(self, tag, value, step):
            self.scalars.append((tag, value, step))

    writer = Writer()
    scaler.history.to_tensorboard(writer, since=3)
    assert writer.scalars[:2] == [("scaler/scale", 32768.0, 4), ("scaler/skipped", 0.0, 4)] and len(writer.scalars) == 4


@pytest.mark.parametrize(
    "look",
    [nc.explain, partial(nc.explain, run=True), nc.compare, nc.capture, nc.repair, nc.check_training],
    ids=["explain", "explain --run", "compare", "capture", "repair", "check_training"],
)
def test_counters_of_a_scaler_are_as_before_whoever_looked_at_a_step(look):
    """Runs of ours are no steps of the loop: neither its numbers, nor what was skipped in a row."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 4), torch.randn(16, 8)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), nc.Scaler("cpu", init_scale=2.0**24)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    step()
    before = scaler.state_dict(), list(scaler.history), scaler._steps.number
    look(step)
    assert (scaler.state_dict(), list(scaler.history), scaler._steps.number) == before
