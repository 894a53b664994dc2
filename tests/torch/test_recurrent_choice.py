"""Goals for recurrent ops, which Dynamo leaves to eager code: raced on their own inputs, decided by rules."""

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast import recurrent_choice
from narrowcast.costs.choices import Choice
from narrowcast.policy import as_policy, parse_action

BF16 = torch.bfloat16
KINDS = {"aten.lstm": nn.LSTM, "aten.gru": nn.GRU, "aten.rnn_tanh": nn.RNN}


class Tagger(nn.Module):
    """A recurrent layer between linear ones, with statistics, a counter and a random number in each call."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.recurrent, self.last = nn.Linear(8, 16), kind(16, 16, 2, bidirectional=True), nn.Linear(32, 3)
        self.norm, self.calls = nn.BatchNorm1d(16), 0

    def forward(self, x):
        self.calls += 1
        hidden, _ = self.recurrent(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2))
        return self.last(hidden), hidden, torch.rand(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


def given_times(monkeypatch, **ns):
    """Races of recurrent ops end as given; how many there were."""
    races = []

    def race(sides, args, written):
        races.append([side.name for side in sides])
        for side in sides:
            side.run(*args)
        return Choice(min(ns, key=ns.get), {n: float(t) for n, t in ns.items()}, dict.fromkeys(ns, 0.0), 9, 0.1)

    monkeypatch.setattr(recurrent_choice, "time_sides", race)
    return races


def fast(model, **options):
    return nc.compile(model, dtype=BF16, backend="eager", goal="fast", weights="cast", **options)


@pytest.mark.parametrize("op", KINDS)
def test_a_recurrent_op_that_is_slower_in_the_low_format_runs_in_fp32(op, monkeypatch):
    """Its values are those of fp32, rounded; its results, and the model's, keep the policy's formats."""
    given_times(monkeypatch, policy=2e6, high=1e6)
    model, x = Tagger(KINDS[op]).eval(), torch.randn(5, 2, 8)
    with torch.no_grad():
        with nc.autocast("cpu", BF16):
            kept = model(x)
            given = model.norm(model.first(x).transpose(1, 2)).transpose(1, 2)
        logits, hidden, _ = fast(model)(x)
        assert [logits.dtype, hidden.dtype] == [part.dtype for part in kept[:2]]
        assert torch.equal(hidden, model.recurrent(given.float())[0].to(hidden.dtype))


def test_a_recurrent_op_that_gains_by_the_low_format_is_left_to_the_policy(monkeypatch):
    """The region's policy is the user's own, unchanged."""
    races = given_times(monkeypatch, policy=1e6, high=2e6)
    run = fast(Tagger().eval())
    with torch.no_grad():
        run(torch.randn(5, 2, 8))
    assert races == [["policy", "high"]]
    assert run._around._regions["cpu"].policy is as_policy(None)


def test_watching_a_models_recurrent_ops_leaves_no_trace(monkeypatch):
    """Statistics, counters and random numbers of the first call are those of one call; in training, too."""
    given_times(monkeypatch, policy=2e6, high=1e6)
    eager, model, x = Tagger(), Tagger(), torch.randn(5, 2, 8)
    torch.manual_seed(3)
    with nc.autocast("cpu", BF16):
        drawn = eager(x)[2]
    torch.manual_seed(3)
    results = fast(model)(x)
    assert torch.equal(results[2], drawn)
    assert (model.calls, model.norm.num_batches_tracked.item()) == (1, 1)
    assert torch.equal(model.norm.running_mean, eager.norm.running_mean)
    results[0].float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


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
        with nc.autocast("cpu", BF16):
            kept = model(x, state)
        found = fast(model)(x, state)
        wide = model(x.float(), state.float())
    assert [part.dtype for part in found] == [part.dtype for part in kept]
    assert all(torch.equal(a, b.to(BF16)) for a, b in zip(found, wide, strict=True))


@pytest.mark.parametrize("pin", ["aten.lstm", "aten.lstm.input", "aten.mkldnn_rnn_layer", "aten.linea?"])
def test_a_rule_that_names_a_format_is_not_overruled(pin, monkeypatch):
    """Where a policy pins the op, or what it calls, to one format, no race is run."""
    races = given_times(monkeypatch, policy=2e6, high=1e6)
    pinned = nc.Policy.native().with_rules(nc.Rule(pin, parse_action("to(bf16)")))
    with torch.no_grad():
        run = nc.compile(Tagger().eval(), dtype=BF16, policy=pinned, backend="eager", goal="fast", weights="cast")
        run(torch.randn(5, 2, 8))
    assert races == []


@pytest.mark.parametrize("options", [{"goal": "exact"}, {"goal": "memory"}, {"goal": "fast", "verify": False}])
def test_goals_that_time_nothing_race_no_recurrent_ops(options, monkeypatch):
    """`exact`, `memory`, and `fast` without verification keep the policy's formats between graphs."""
    races = given_times(monkeypatch, policy=2e6, high=1e6)
    with torch.no_grad():
        nc.compile(Tagger().eval(), dtype=BF16, backend="eager", weights="cast", **options)(torch.randn(5, 2, 8))
    assert races == []


def test_the_choice_is_kept_on_disk(monkeypatch):
    """A second process's race of the same op on the same inputs takes the first one's word."""
    races = given_times(monkeypatch, policy=2e6, high=1e6)
    for _ in range(2):
        with torch.no_grad():
            run = fast(Tagger().eval())
            run(torch.ones(5, 2, 8))
    assert len(races) == 1
    assert run._around._regions["cpu"].policy.name == "native, high recurrent ops"


def test_explain_says_what_was_measured(monkeypatch):
    """The op, its format and both times, though it is in no graph."""
    given_times(monkeypatch, policy=2e6, high=1e6)
    found = nc.explain(
        Tagger().eval(), torch.ones(5, 2, 8), dtype=BF16, goal="fast", front_end="compile", backend="eager"
    )
    assert "aten.lstm runs as eager code between graphs, in fp32 (measured: 1 ms in fp32, 2 ms as" in found.note


def test_a_module_that_fails_when_it_is_run_apart_raises_its_own_error():
    """The warning says that nothing was raced; the error is the model's, from the call itself."""
    run, warned = fast(Tagger().eval()), pytest.warns(UserWarning, match="recurrent layers keep the policy's formats")
    with warned, torch.no_grad(), pytest.raises(RuntimeError, match="shapes"):
        run(torch.randn(5, 2, 9))
