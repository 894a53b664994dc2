"""Goals for eager code between graphs: seen in the first call, raced at the same sizes, decided by rules."""

import threading
import time
import warnings
from collections import defaultdict, deque

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.core.policy import as_policy, parse_action
from narrowcast.frontends.eager import registered
from narrowcast.frontends.graphs.compiled import watch_graphs
from narrowcast.frontends.race import eager_ops as eager_choice
from narrowcast.frontends.race.choosing import RememberedTimes

BF16 = torch.bfloat16
NATIVE = as_policy(None).repairing()
"""What a goal makes of native: no test depends on a bf16 LSTM."""
KINDS = {"aten.lstm.input": nn.LSTM, "aten.rnn_tanh.input": nn.RNN}


class Tagger(nn.Module):
    """What is captured, and a recurrent layer with a linear one after it, which are left to eager code."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.calls = nn.BatchNorm1d(16), 0
        self.recurrent, self.last = kind(16, 16, 2, bidirectional=True), nn.Linear(32, 3)

    def given(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)

    def forward(self, x):
        return self.rest(self.given(x))

    @torch.compiler.disable  # torch 2.15 would capture what comes after the recurrent layer
    def rest(self, given):
        self.calls += 1
        hidden, _ = self.recurrent(given)
        return self.last(hidden), hidden, torch.rand(1)


class Embedded(Tagger):
    """A tagger whose captured part has a call that the policy lowers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)

    def given(self, x):
        return self.first(x)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


def visitors():
    """How many visits of kernels have not ended."""
    return sum(visits.count for visits in registered._visiting.values())


def given_times(monkeypatch, **ns):
    """Races between graphs end as given; the sides of each."""
    races = []

    def race(sides, args, written):
        races.append(list(sides))
        for run in sides.values():
            run(*args)
        return RememberedTimes(
            min(ns, key=ns.get), {n: float(t) for n, t in ns.items()}, dict.fromkeys(ns, 0.0), 9, 0.1
        )

    monkeypatch.setattr(eager_choice, "time_sides", race)
    return races


def fast(model, **options):
    return nc.compile(model, under=BF16, backend="eager", goal="fast", weights="cast", **options)


def eager_rules(run):
    return {rule.op for rule in run._around._regions["cpu"].policy.rules}


@pytest.mark.parametrize("op", KINDS)
def test_what_is_slower_in_the_low_format_runs_in_fp32(op, monkeypatch):
    """From the second call on, values of recurrent and linear layers are fp32's, rounded to what they were."""
    given_times(monkeypatch, policy=2e6, high=1e6)
    model, x = Tagger(KINDS[op]).eval(), torch.randn(5, 2, 16)
    with torch.no_grad():
        with nc.autocast("cpu", BF16, policy=NATIVE):
            kept = model(x)
            given = model.given(x)
        run = fast(model)
        first = run(x)
        logits, hidden, _ = run(x)
        assert eager_rules(run) == {op, "aten.linear.default"}
        assert [part.dtype for part in first] == [part.dtype for part in kept]
        assert [logits.dtype, hidden.dtype] == [part.dtype for part in kept[:2]]
        assert torch.equal(hidden, model.recurrent(given.float())[0].to(hidden.dtype))
        assert torch.equal(logits, model.last(hidden.float()).to(logits.dtype))


def test_graphs_keep_the_policy_and_their_code(monkeypatch):
    """The rules are eager code's alone: the graph before the recurrent layer is compiled once, and may run low."""
    given_times(monkeypatch, policy=2e6, high=1e6)
    with torch.no_grad(), watch_graphs() as graphs:
        run = fast(Embedded().eval())
        for _ in range(3):
            run(torch.ones(5, 2, 16))
    (graph,) = graphs
    (call,) = [call for call in graph.placement.calls if call.op == "aten.linear.default"]
    assert [str(format) for format in call.formats] == ["bf16", "fp32"]
    assert "aten.linear.default" in eager_rules(run)


def test_what_gains_by_the_low_format_is_left_to_the_policy(monkeypatch):
    """The region's policy is the user's own, unchanged."""
    races = given_times(monkeypatch, policy=1e6, high=2e6)
    run = fast(Tagger().eval())
    with torch.no_grad():
        run(torch.randn(5, 2, 16))
    assert races == [["policy", "high"]] * 2
    assert run._around._regions["cpu"].policy is NATIVE


def test_watching_the_first_call_leaves_no_trace(monkeypatch):
    """Statistics, counters and random numbers are those of one call; our kernels are gone after it."""
    given_times(monkeypatch, policy=2e6, high=1e6)
    eager, model, x = Tagger(), Tagger(), torch.randn(5, 2, 16)
    torch.manual_seed(3)
    with nc.autocast("cpu", BF16, policy=NATIVE):
        drawn = eager(x)[2]
    torch.manual_seed(3)
    results = fast(model)(x)
    assert torch.equal(results[2], drawn)
    assert (model.calls, model.norm.num_batches_tracked.item()) == (1, 1)
    assert torch.equal(model.norm.running_mean, eager.norm.running_mean)
    results[0].float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    assert not visitors()


def test_a_model_that_is_captured_whole_has_nothing_to_race(monkeypatch):
    """Neither graphs nor their candidates count as eager code, in training or without."""
    races = given_times(monkeypatch, policy=2e6, high=1e6)
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(2, 2, 3), nn.Linear(6, 2))
    run = nc.compile(model, under=BF16, backend="aot_eager", goal="fast")
    run(torch.randn(1, 2, 8)).float().sum().backward()
    assert races == []
    assert run._around._regions["cpu"].policy is NATIVE


def test_packed_sequences_and_given_states_are_raced_as_they_are(monkeypatch):
    """A call on a packed sequence, and one that is given its state, run in fp32 and keep their formats."""
    given_times(monkeypatch, policy=2e6, high=1e6)

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent = nn.RNN(8, 8)

        def forward(self, x, state):
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
            return self.recurrent(packed, state)[0].data, self.recurrent(x, state)[0]

    model, x, state = Packed().eval(), torch.randn(5, 2, 8, dtype=BF16), torch.zeros(1, 2, 8, dtype=BF16)
    with torch.no_grad():
        with nc.autocast("cpu", BF16, policy=NATIVE):
            kept = model(x, state)
        run = fast(model)
        run(x, state)
        found = run(x, state)
        wide = model(x.float(), state.float())
    assert eager_rules(run) == {"aten.rnn_tanh.input", "aten.rnn_tanh.data"}
    assert [part.dtype for part in found] == [part.dtype for part in kept]
    assert all(torch.equal(a, b.to(BF16)) for a, b in zip(found, wide, strict=True))


def test_functions_that_dynamo_is_told_to_leave_alone_are_raced(monkeypatch):
    """Not only recurrent layers: any op that a policy lowers, in a function as in a module."""
    given_times(monkeypatch, policy=2e6, high=1e6)

    @torch.compiler.disable
    def left_alone(x, w):
        return x @ w

    def work(x, w):
        return left_alone(x + 1, w)

    run, x, w = fast(work), torch.randn(4, 8), torch.randn(8, 8)
    with torch.no_grad():
        run(x, w)
        found = run(x, w)
    assert torch.equal(found, ((x + 1) @ w).to(BF16))


RULES = [
    ("aten.lstm.input", "to(bf16)"), ("aten.lstm", "full"), ("aten.mkldnn_rnn_layer", "full"), ("aten.lstm", "follow"),
    ("aten.linear", "full"), ("aten.linear*", "to(bf16)"), ("aten.linear", "align"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "action"), RULES)
def test_what_a_rule_asks_for_somewhere_is_not_overruled(op, action, monkeypatch):
    """An op about which a policy has a rule for one module only, or what a recurrent one calls, is not raced."""
    given_times(monkeypatch, policy=2e6, high=1e6)
    policy = nc.Policy.native().with_rules(nc.Rule(op, parse_action(action), module="somewhere"))
    with torch.no_grad():
        run = nc.compile(Tagger().eval(), under=policy, backend="eager", goal="fast", weights="cast")
        run(torch.randn(5, 2, 16))
    lifted = {rule.op for rule in run._around._regions["cpu"].policy.rules if rule.reason.startswith("measured")}
    assert lifted == (set() if op.startswith("aten.linear") else {"aten.linear.default"})


@torch.compiler.disable
def both_heads(model, x):
    return model.one(x), model.two(x)


class Heads(nn.Module):
    """Two linear layers in eager code."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return both_heads(self, x)


@pytest.mark.parametrize("how", ["rule", "pin"])
def test_formats_that_the_user_gave_a_module_stay(how, monkeypatch):
    """Logits in fp32 by a rule, or in fp16 by a pin, in every call."""
    given_times(monkeypatch, policy=2e6, high=1e6)
    model, policy = Heads(), nc.Policy.native()
    if how == "rule":
        policy = policy.with_rules(nc.Rule("aten.linear", "full", module="two"))
    else:
        nc.pin(model.two, "fp16")
    run = nc.compile(model, under=policy, backend="aot_eager", goal="fast")
    found = [[part.dtype for part in run(torch.ones(2, 8))] for _ in range(3)]
    if how == "pin":
        nc.unpin(model.two)
    assert found == [[BF16, torch.float32 if how == "rule" else torch.float16]] * 3


def test_rules_about_modules_hold_in_the_graphs_of_a_first_call():
    """Watching eager code does not hide from a capture in which module its calls are made."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="2"))
    run = nc.compile(model, under=policy, goal="fast", backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Guards may run slower")  # Dynamo on Python 3.13.0
        assert [run(torch.ones(8, 64)).dtype for _ in range(2)] == [torch.float32] * 2


@pytest.mark.parametrize("layer", [nn.GRU(8, 8), nn.LSTM(8, 8, proj_size=4)])
def test_results_whose_format_depends_on_what_comes_in_are_left_to_the_policy(layer, monkeypatch):
    """A rule gives one format: of a GRU, whose results have that of its state, the first call's would be another's."""
    given_times(monkeypatch, policy=2e6, high=1e6)
    x, state = torch.randn(5, 2, 8), torch.zeros(1, 2, 8)
    states = {"fp32": state if isinstance(layer, nn.GRU) else (torch.zeros(1, 2, 4), state), "none": None}
    calls = [(x.to(BF16), "none"), (x.to(BF16), "fp32"), (x, "none")]

    def work(x, state):
        return layer(x, states[state])[0]

    with torch.no_grad():
        run = fast(work)
        found = [run(given, name).dtype for given, name in calls]
        with nc.autocast("cpu", BF16):
            assert found == [work(given, name).dtype for given, name in calls]


def test_races_draw_no_random_numbers(monkeypatch):
    """What is drawn after the first call is what would be drawn without a goal."""
    given_times(monkeypatch, policy=2e6, high=1e6)
    drawn = []
    for goal in ("exact", "fast"):
        torch._dynamo.reset()
        torch.manual_seed(1)
        nc.compile(Heads(), under=BF16, backend="eager", goal=goal, weights="cast")(torch.ones(2, 8))
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_a_recording_and_a_first_call_in_two_threads_see_their_own_ops(monkeypatch):
    """A recording inside the first call, in another thread, has all casts; and one around it does not change what is
    watched.
    """
    given_times(monkeypatch, policy=2e6, high=1e6)

    def recorded():
        with nc.record() as ledger, nc.autocast("cpu", BF16):
            made = nn.functional.linear(torch.ones(2, 8), torch.ones(8, 8))
            nn.functional.mse_loss(made, made * 0)
        ops.append({cast.op for cast in ledger.casts})

    ops, held, done = [], threading.Event(), threading.Event()

    @torch.compiler.disable
    def in_a_thread(x):
        thread = threading.Thread(target=recorded, daemon=True)
        thread.start()
        thread.join(60)
        return x

    fast(lambda x: in_a_thread(x + 1))(torch.ones(4))
    assert ops == [{"aten.linear.default", "aten.mse_loss.default"}]

    def recording():
        with nc.record():
            held.set()
            done.wait(60)

    thread = threading.Thread(target=recording, daemon=True)
    thread.start()
    held.wait(60)
    run = fast(Tagger().eval())
    with torch.no_grad():
        run(torch.ones(5, 2, 16))
    done.set()
    thread.join(60)
    assert eager_rules(run) == {"aten.lstm.input", "aten.linear.default"}
    assert not visitors()


def test_explaining_inside_a_recording_times_nothing(monkeypatch):
    """As compiling does: what is recorded takes other times."""
    races = given_times(monkeypatch, policy=2e6, high=1e6)
    with nc.record():
        nc.explain(
            Tagger().eval(), (torch.ones(5, 2, 16),), under=BF16, goal="fast", front_end="compile", backend="eager"
        )
    assert races == []


@pytest.mark.parametrize("goal", ["exact", "memory", nc.Goal.fast(verify=False)], ids=["exact", "memory", "unverified"])
def test_goals_that_time_nothing_race_nothing(goal, monkeypatch):
    """`exact`, `memory`, and `fast` without verification keep the policy's formats between graphs."""
    races = given_times(monkeypatch, policy=2e6, high=1e6)
    with torch.no_grad():
        run = nc.compile(Tagger().eval(), under=NATIVE, backend="eager", weights="cast", goal=goal)
        run(torch.randn(5, 2, 16))
    assert races == []


def test_the_choice_is_kept_on_disk(monkeypatch):
    """A second process's race of the same op at the same sizes takes the first one's word."""
    races = given_times(monkeypatch, policy=2e6, high=1e6)
    for _ in range(2):
        with torch.no_grad():
            run = fast(Tagger().eval())
            run(torch.ones(5, 2, 16))
    assert len(races) == 2
    assert eager_rules(run) == {"aten.lstm.input", "aten.linear.default"}


def test_explain_says_what_was_measured(monkeypatch):
    """The op, its format and both times, though it is in no graph."""
    given_times(monkeypatch, policy=2e6, high=1e6)
    found = nc.explain(
        Tagger().eval(), (torch.ones(5, 2, 16),), under=BF16, goal="fast", front_end="compile", backend="eager"
    )
    assert "aten.lstm.input in eager code between graphs runs in fp32 (measured: 1 ms in fp32, 2 ms as" in found.note


def test_a_first_call_that_raises_decides_nothing(monkeypatch):
    """The error is the model's; the next call is the first again, and kernels and watchers are gone."""
    races = given_times(monkeypatch, policy=2e6, high=1e6)
    run = fast(Tagger().eval())
    with torch.no_grad():
        with pytest.raises(ValueError, match="expected 2D or 3D"):
            run(torch.randn(5, 2, 9, 16))
        assert races == []
        assert not visitors()
        run(torch.randn(5, 2, 16))
    assert len(races) == 2


def test_kernels_come_and_go_while_other_threads_call_them():
    """Registered and removed hundreds of times while threads compute, and wait for the interpreter on their way in."""
    ops = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "linear", "matmul", "addmm"))
    stop, x, calls, visits = threading.Event(), torch.eye(4), [0, 0], 0

    def work(number):
        while not stop.is_set():
            with torch.autocast("cpu", BF16):
                assert torch.equal(nn.functional.linear(x @ x, x), x.to(BF16))
            calls[number] += 1

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    while min(calls) < 30 or visits < 300:
        registered.install_visiting(ops, "cpu")
        registered.remove_visiting("cpu")
        visits += 1
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not visitors()


def test_many_visits_in_a_minute_free_no_kernel_of_that_minute(monkeypatch):
    """What was removed a moment ago may still be called: kernels stay for the next visit instead, and go later."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    mm = (torch.ops.aten.mm.default,)
    kept = registered.Registration._removed
    monkeypatch.setattr(registered.Registration, "_removed", deque(maxlen=3))
    monkeypatch.setattr(registered, "_visiting", defaultdict(registered._Visits))
    monkeypatch.setattr(registered, "_staying", {})

    def removed():
        registered.install_visiting(mm, "cpu")
        registered.remove_visiting("cpu")
        return not registered._visiting["cpu"].registrations

    assert [removed() for _ in range(5)] == [True, True, True, False, False]
    now += 61
    assert removed()
    kept.extend(registered.Registration._removed)


def test_a_compiled_call_inside_compiled_code_is_watched_alone(monkeypatch):
    """torch.compile around the caller: nothing of ours is compiled, nothing warns, and the first call decides."""
    races = given_times(monkeypatch, policy=2e6, high=1e6)
    run = fast(Tagger().eval())

    @torch.compile(backend="eager")
    def around(x):
        return run(x)[0] + 1

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Guards may run slower")  # Dynamo on Python 3.13.0
        found = [around(torch.ones(5, 2, 16)) for _ in range(3)]
    assert torch.equal(found[1], found[2])
    assert len(races) == 2


def test_a_race_that_fails_costs_nobody_the_first_calls_result(monkeypatch):
    """The policy holds, and the results are there."""

    def fails(sides, args, written):
        raise RuntimeError("no memory")

    monkeypatch.setattr(eager_choice, "time_sides", fails)
    run = fast(Tagger().eval())
    with torch.no_grad():
        assert run(torch.ones(5, 2, 16))[1].shape == (5, 2, 32)
    assert run._around._regions["cpu"].policy is NATIVE
