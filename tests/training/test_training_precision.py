"""The precision of a training loop: regions, scaler, ledgers, watch and state, without a framework."""

import json
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import TrainingError, TrainingWarning
from narrowcast.integrations.loop import LoopPrecision
from narrowcast.integrations.training import TrainingPrecision
from narrowcast.reports.results.saved import load

POLICY = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="2", reason="logits"), name="ours")
BATCHES = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(n)), torch.arange(8) % 3) for n in range(8)]


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(precision, model, optimizer, batches, **asked):
    """A loop in timm's style, with two micro-batches to a step."""
    losses = []
    for number, (x, target) in enumerate(batches, 1):
        with precision.amp_autocast():
            loss = F.cross_entropy(model(x), target)
        losses.append(loss.item())
        precision(loss / 2, optimizer, parameters=model.parameters(), need_update=number % 2 == 0, **asked)
        if number % 2 == 0:
            optimizer.zero_grad()
    return losses


def by_hand(dtype, clip):
    model, optimizer = make()
    scaler, losses = torch.amp.GradScaler("cpu", enabled=dtype == "fp16"), []
    for number, (x, target) in enumerate(BATCHES, 1):
        with nc.autocast("cpu", dtype, policy=POLICY):
            loss = F.cross_entropy(model(x), target)
        losses.append(loss.item())
        scaler.scale(loss / 2).backward()
        if number % 2 == 0:
            scaler.unscale_(optimizer)
            clip(model.parameters())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return losses, model.state_dict()


def ours(dtype="bf16", policy=POLICY, **settings):
    return LoopPrecision(policy=policy, dtype=dtype, device_type="cpu", **settings)


CLIPS = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.1),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mode", CLIPS)
def test_a_loop_has_the_losses_and_weights_of_one_written_by_hand(dtype, mode):
    """Bit for bit, with accumulation, and with the clip after the gradients are unscaled."""
    model, optimizer = make()
    losses, weights = by_hand(dtype, CLIPS[mode])
    assert train(ours(dtype), model, optimizer, BATCHES, clip_grad=0.1, clip_mode=mode) == losses
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_is_saved_in_the_middle_goes_on_with_the_same_losses(dtype):
    """Scale, steps and all; what is saved is texts and numbers, which `weights_only` reads; nothing is said."""
    model, optimizer = make()
    whole = train(ours(dtype), model, optimizer, BATCHES)
    model, optimizer = make()
    first = ours(dtype)
    train(first, model, optimizer, BATCHES[:4])
    assert json.loads(json.dumps(first.state_dict()))["digest"] == POLICY.digest
    second = ours(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(first.state_dict())
    assert second.steps == 2
    assert train(second, model, optimizer, BATCHES[4:]) == whole[4:]


def test_a_step_that_is_skipped_is_a_step():
    """The scaler halves its scale, and the next ledger is of the next step."""
    model, optimizer = make()
    precision = ours("fp16", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**40), ledger_every=1)
    before = [p.clone() for p in model.parameters()]
    train(precision, model, optimizer, BATCHES[:2])
    assert precision.steps == 1 and precision.ledger is not None and precision.scaler.get_scale() == 2.0**39
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_every_nth_step_has_a_ledger_of_all_its_micro_batches_forward_and_backward(tmp_path):
    """In a folder, or for a function; evaluation begins no step, and after a resume the numbers go on."""
    model, optimizer = make()
    precision = ours(ledger_every=2, ledger_to=tmp_path / "new" / "ledgers")
    with torch.no_grad(), precision.amp_autocast():
        model(BATCHES[0][0])
    train(precision, model, optimizer, BATCHES)
    files = sorted((tmp_path / "new" / "ledgers").iterdir())
    assert [file.name for file in files] == ["step-000000.json", "step-000002.json"]
    ledger = load(files[1])
    weights = [c for c in ledger.casts if c.module_path == "0" and c.argument == "weight" and c.direction == "forward"]
    assert len(weights) == 2 and ledger.totals().backward > 0
    assert ledger.to_json() == precision.ledger.to_json()

    told = []
    again = ours(ledger_every=2, ledger_to=lambda step, ledger: told.append((step, ledger.totals().casts)))
    again.load_state_dict(precision.state_dict())
    train(again, model, optimizer, BATCHES[:4])
    assert told == [(4, ledger.totals().casts)]


def test_a_step_that_raises_is_not_recorded_and_leaves_nothing_open():
    """Wherever it raises: forward, backward, or the clip. The fixture of all tests looks for what is left open."""
    model, optimizer = make()
    precision = ours("fp16", ledger_every=1)

    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), precision.training():
        fails()
    with precision.training():
        loss = model(BATCHES[0][0])
    with pytest.raises(RuntimeError, match="scalar"):
        precision.backward(loss)
    with precision.training():
        loss = model(BATCHES[0][0]).sum()
    precision.backward(loss)
    with pytest.raises(ZeroDivisionError):
        precision.step(optimizer, clip=fails)
    assert precision.ledger is None and precision.steps == 0


def test_the_watch_says_at_the_end_who_made_the_first_infinity(recwarn):
    """While a step is recorded, too; a second run of the same loop has a watch of its own."""
    model, optimizer = make()
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    precision = ours("fp16", watch={"every": 2}, ledger_every=2)
    for _ in range(2):
        with precision, pytest.warns(TrainingWarning, match=r"infinity made by 0 aten.linear"):
            train(precision, model, optimizer, BATCHES[:2])
            precision.close()
        assert precision.watching.first.made_by == "cast"
    calm = ours(watch=True)
    model, optimizer = make()
    with calm:
        train(calm, model, optimizer, BATCHES[:2])
    assert calm.watching.first is None and calm.watching.steps == 1


def said(precision, state):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        precision.load_state_dict(state)
    assert all(w.category is TrainingWarning for w in found)
    return [str(w.message) for w in found]


def test_resuming_under_another_policy_is_said_with_both_digests_and_what_differs():
    """So is another low format, and a scaler that is lost or new."""
    saved = ours("bf16").state_dict()
    (text,) = said(ours("bf16", policy="native"), saved)
    native = nc.Policy.native().digest
    assert f"ours ({POLICY.digest[:12]}), bf16; now native ({native[:12]}), bf16" in text
    assert "aten.linear in 2: full -> -" in text
    format_says, scaler_says = said(ours("fp16"), saved)
    assert "another low format" in format_says and "the scale starts again" in scaler_says
    assert "does not use" in said(ours("bf16"), ours("fp16").state_dict())[1]
    assert said(ours("bf16"), saved) == []


def test_states_of_others_are_taken_up_or_refused():
    """The state of a bare scaler is used; nothing is said to be nothing; another schema is an error."""
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    precision = ours("fp16")
    (text,) = said(precision, scaler.state_dict())
    assert "no policy" in text and precision.scaler.get_scale() == 512.0
    assert "says nothing of precision" in said(precision, {})[0]
    gone = {**ours().state_dict(), "digest": "0" * 64, "rules": 'name = "a"\nextends = "gone.toml"\n'}
    assert said(ours(), gone)[0].count("\n") == 0
    with pytest.raises(TrainingError, match="schema 'other/1' where"):
        precision.load_state_dict({"schema": "other/1"})


def test_who_scales_by_default():
    """nc.Scaler in fp16, with the names of the model's parameters; none in bf16 or where it is switched off."""
    assert ours("bf16").scaler is None and ours("fp16", scaler=False).scaler is None
    model, optimizer = make()
    mine = nc.Scaler("cpu")
    for precision in (ours("fp16"), ours("fp16", scaler=mine)):
        made = precision.scaler
        assert type(made) is nc.Scaler and made is precision.scaler and isinstance(made, torch.amp.GradScaler)
        precision.follow(model)
        with precision.training():
            loss = model(BATCHES[0][0] * 1e6).sum()
        precision.backward(loss)
        assert made.step(optimizer).parameters[0] == "0.weight"
    given = torch.amp.GradScaler("cpu")
    assert ours("bf16", scaler=given).scaler is given


def test_regions_are_on_the_device_of_the_model_that_is_followed():
    """Or on the one that was given; a copy opens what it needs again."""
    precision = TrainingPrecision(dtype="bf16")
    precision.follow(make()[0].to("meta"))
    assert precision.low is torch.bfloat16
    precision.follow(make()[0])
    assert precision.region.device == "cpu" and precision.region is precision.region
    copied = pickle.loads(pickle.dumps(precision))
    copied.on_device("cuda")
    assert (copied.region.device, copied.policy) == ("cuda", precision.policy)
    assert TrainingPrecision(device_type="cpu", dtype="bf16", inner="policy").region.policy.effective_inner == "policy"


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"ledger_evry": 2}, "no such setting"), ({"ledger_every": -1}, "counted from 1")],
)
def test_settings_that_make_no_sense_are_refused(settings, says):
    """With what there is."""
    with pytest.raises(TrainingError, match=says):
        TrainingPrecision(**settings)


@pytest.mark.parametrize(
    ("asked", "says"), [({"clip_mode": "most"}, "clip_mode 'most'"), ({"parameters": None}, "no parameters")]
)
def test_a_clip_that_cannot_be_is_refused_before_the_backward(asked, says):
    """Nothing has a gradient then."""
    model, optimizer = make()
    with ours() as precision:
        with precision.amp_autocast():
            loss = model(BATCHES[0][0]).sum()
        with pytest.raises(TrainingError, match=says):
            precision(loss, optimizer, 1.0, **{"parameters": model.parameters(), **asked})
        assert model[0].weight.grad is None


def test_each_plugin_is_imported_without_its_framework_and_says_what_to_install():
    """In a process where none can be imported."""
    code = """
import sys
names = "lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate", "ignite", "timm"
sys.modules.update(dict.fromkeys(names))
from narrowcast.integrations import accelerate, ignite, lightning, loop, training, transformers
from narrowcast.errors import TrainingError
uses = (
    lightning.LightningPrecision, lightning.FabricPrecision,
    lambda: lightning.LightningPrecision(package="pytorch_lightning"),
    transformers.PrecisionMixin, lambda: accelerate.AcceleratePrecision(None),
    lambda: ignite.IgnitePrecision().trainer(None, None, None), lambda: ignite.IgnitePrecision().evaluator(None),
)
for use in uses:
    try:
        use()
    except TrainingError as error:
        print(error.advice)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    two = ["lightning"] * 2
    assert done.stdout.splitlines() == [
        f"Install it: pip install {name}"
        for name in [*two, "pytorch-lightning", "transformers accelerate", "accelerate", *["pytorch-ignite"] * 2]
    ], done.stderr
