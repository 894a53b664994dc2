"""`nc.check_storage`: what training loses by its formats, before a step is made; what loses nothing is sound."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import narrowcast as nc
from narrowcast.errors import RunError

LOW = torch.bfloat16


def mlp(dtype=LOW):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).to(dtype)


class Signs(torch.optim.Optimizer):
    """Steps by the sign of the gradient, in the weights' format. `moved` says what becomes of a weight and a step."""

    def __init__(self, params, lr=1e-5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                move = self.move if p.dtype is LOW else partial(Signs.move, self)
                if p.grad is not None:
                    move(p, -group["lr"] * p.grad.float().sign(), self.state[p])

    def move(self, p, step, state):
        p.add_(step.to(p.dtype))


class Stochastic(Signs):
    def move(self, p, step, state):
        bits = (p.float() + step).view(torch.int32) + torch.randint_like(p, 1 << 16, dtype=torch.int32)
        p.copy_((bits & -(1 << 16)).view(torch.float32))


class Kahan(Signs):
    def move(self, p, step, state):
        rest = state.setdefault("rest", torch.zeros_like(p))
        rest.add_(step.to(p.dtype))
        before = p.clone()
        p.add_(rest)
        rest.add_(before - p)


class Masters(Signs):
    """Masters as a state: `load_state_dict` rounds them to the weights' format."""

    def move(self, p, step, state):
        if "master" not in state:
            state["master"] = p.float()
        p.copy_(state["master"].add_(step))


class Kept(Signs):
    """Puts its states back as they were saved."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        saved = [state_dict["state"][n] for n in sorted(state_dict["state"])]
        for p, one in zip((p for g in self.param_groups for p in g["params"]), saved, strict=True):
            self.state[p] |= {name: value.clone() for name, value in one.items()}


class KeptMasters(Kept, Masters):
    pass


class Remainders(Kept):
    """The lower half of a master's bits beside the weight."""

    def move(self, p, step, state):
        rest = state.setdefault("rest", torch.zeros_like(p, dtype=torch.int16)).int()
        whole = ((p.view(torch.int16).int() - (rest < 0).int()) << 16) | (rest & 0xFFFF)
        bits = (whole.view(torch.float32) + step).view(torch.int32)
        state["rest"] = bits.to(torch.int16)
        high = (bits >> 16) + (state["rest"] < 0).int()
        p.copy_(high.to(torch.int16).view(p.dtype))


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-5, **settings})


def with_masters(model, **settings):
    """An optimizer over copies in fp32."""
    return torch.optim.AdamW([p.detach().float().requires_grad_() for p in model.parameters()], **settings)


def frozen_but(model, layer, dtype):
    model.requires_grad_(requires_grad=False)
    model[layer].to(dtype).requires_grad_()
    return [p for p in model.parameters() if p.requires_grad]


def sound(name):
    model = mlp(torch.float32 if name in ("fp32", "compiled fp32", "adapter in fp32", "sgd fp32") else LOW)
    if name == "compiled fp32":
        return torch.compile(model, backend="eager"), adamw(model)
    if name == "adapter in fp32":
        return model.to(LOW), torch.optim.AdamW(frozen_but(model, 2, torch.float32), 1e-5)
    made = {
        "fp32": adamw,
        "sgd fp32": lambda m: torch.optim.SGD(m.parameters(), 1e-3, momentum=0.9),
        "stochastic": lambda m: Stochastic(m.parameters()),
        "kahan": lambda m: Kahan(m.parameters()),
        "kahan, tiny steps": lambda m: Kahan(m.parameters(), 1e-8),
        "masters kept": lambda m: KeptMasters(m.parameters()),
        "remainders": lambda m: Remainders(m.parameters()),
        "masters in place": with_masters,
        "large steps": lambda m: adamw(m, lr=3e-2, betas=(0.9, 0.95)),
    }
    return model, made[name](model)


SOUND = (
    "fp32",
    "sgd fp32",
    "compiled fp32",
    "adapter in fp32",
    "stochastic",
    "kahan",
    "kahan, tiny steps",
    "masters kept",
    "remainders",
    "masters in place",
    "large steps",
)


@pytest.mark.parametrize("name", SOUND)
def test_what_loses_nothing_is_sound(name):
    """Stochastic rounding, compensations and masters are judged by what they move."""
    found = nc.check_storage(*sound(name))
    is_nearest = name == "large steps"  # which become smaller
    assert found.verdict == ("not judged" if is_nearest else "sound") and found, (found.findings, found.notes)


def schedule_end(model):
    """Half of a cosine, at its last step."""
    optimizer = adamw(model, lr=3e-2, betas=(0.9, 0.95))
    return nc.check_storage(model, optimizer, lr=1e-6)


def loaded_late(model):
    """Weights are loaded after the masters were made."""
    optimizer = with_masters(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    return nc.check_storage(model, optimizer)


def one_changed(model):
    """One weight is changed between steps, beside its master."""
    optimizer = KeptMasters(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        model[2].weight.mul_(1.5)
    return nc.check_storage(model, optimizer)


def saved_without(model):
    """A checkpoint of the model and of moments alone."""
    optimizer = with_masters(model, lr=1e-5)
    return nc.check_storage(model, optimizer, checkpoint={"model": model.state_dict(), "step": 3})


def saved_low(model):
    model = mlp(torch.float32)
    kept = {name: value.to(LOW) for name, value in model.state_dict().items()}
    return nc.check_storage(model, adamw(model), checkpoint={"state": kept})


def read_low(model):
    return nc.check_storage(model, Stochastic(model.parameters()), checkpoint=mlp(torch.float32).state_dict())


def with_gradients(model, size):
    for p in model.parameters():
        p.grad = torch.full_like(p, size)
    return nc.check_storage(model, torch.optim.SGD(model.parameters(), 1e-3))


PLANTED = {
    "adamw": (lambda m: nc.check_storage(m, adamw(m)), "updates lost in rounding"),
    "signs": (lambda m: nc.check_storage(m, Signs(m.parameters())), "updates lost in rounding"),
    "adafactor": (
        lambda m: nc.check_storage(m, torch.optim.Adafactor(m.parameters(), 1e-5)),
        "updates lost in rounding",
    ),
    "sgd, its gradients": (lambda m: with_gradients(m, 1e-3), "updates lost in rounding"),
    "adapter in bf16": (
        lambda m: nc.check_storage(m, torch.optim.AdamW(frozen_but(m, 2, LOW), 1e-5)),
        "updates lost in rounding",
    ),
    "fp16": (lambda m: nc.check_storage(m.half(), adamw(m, lr=1e-6)), "updates lost in rounding"),
    "end of a schedule": (schedule_end, "updates lost in rounding"),
    "second moments": (lambda m: nc.check_storage(m, adamw(m, lr=3e-2)), "a state that does not decay"),
    "masters in the state": (lambda m: nc.check_storage(m, Masters(m.parameters())), "a resume rounds the state"),
    "loaded late": (loaded_late, "masters apart from their weights"),
    "one changed": (one_changed, "masters apart from their weights"),
    "saved without masters": (saved_without, "a checkpoint without masters"),
    "saved in bf16": (saved_low, "a checkpoint in a lower format"),
    "read into bf16": (read_low, "a checkpoint read into a lower format"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_loss_is_found(name):
    """The kind that was planted, and with what to do."""
    check, kind = PLANTED[name]
    found = check(mlp())
    assert kind in [one.kind for one in found.findings] and all(one.todo for one in found.findings)
    assert not found and found.verdict == "wrong"


def test_shares_and_rates_are_those_of_training():
    """The share that is said to be lost is the share that does not move, at either side of the rate it names."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).to(LOW)
    (group,) = nc.check_storage(model, adamw(model, lr=1e-4, weight_decay=0.0)).groups
    for rate in (1e-4, group.lost_from * 0.98, group.lost_from * 1.02):
        trained = copy.deepcopy(model)
        trained.weight.grad = torch.randn_like(trained.weight)
        adamw(trained, lr=rate, weight_decay=0.0).step()
        still = float((trained.weight == model.weight).float().mean())
        if rate == 1e-4:
            assert still == pytest.approx(group.lost, abs=0.02)
        else:
            assert (still >= 0.5) == (rate < group.lost_from)
    assert group.updates == "lost" and group.update == pytest.approx(1e-4, rel=0.05)
    assert group.lost_at_least < group.lost


def test_bytes_are_counted():
    """Weights, masters, gradients and states of 16 x 32 + 32 + 32 x 8 + 8 elements."""
    model = mlp()
    elements = sum(p.numel() for p in model.parameters())
    (group,) = nc.check_storage(model, with_masters(model)).groups
    assert (group.weight_bytes, group.master_bytes, group.gradient_bytes) == (2 * elements, 4 * elements, 2 * elements)
    optimizer = KeptMasters(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    (group,) = nc.check_storage(model, optimizer).groups
    assert (group.master_bytes, group.state_bytes, group.bytes_per_element) == (4 * elements, 0, 8.0)


def test_nothing_is_changed():
    """Neither weights, gradients, states, groups, random state, nor a scheduler's step that counts."""
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    scheduler.step()
    before = pickle.dumps((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    versions, state = [p._version for p in model.parameters()], torch.get_rng_state()
    told = []
    handle = register_optimizer_step_post_hook(lambda *args: told.append(args))
    found = nc.check_storage(model, optimizer)
    handle.remove()
    assert pickle.dumps((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()])) == before
    assert [p._version for p in model.parameters()] == versions and not told
    assert torch.equal(torch.get_rng_state(), state)
    assert found.groups[0].rate == 1e-5  # the highest, before the schedule


def test_what_is_not_known_is_not_judged():
    """SGD without gradients, a step with a closure, hooks of one's own: said, and no verdict."""
    model = mlp()
    hooked = adamw(model, betas=(0.9, 0.95))
    hooked.register_step_pre_hook(lambda *args: None)
    for optimizer, why in (
        (torch.optim.SGD(model.parameters(), 1e-3), "run a backward"),
        (torch.optim.LBFGS(model.parameters()), "could not be probed"),
        (adamw(model, lr=0.0, betas=(0.9, 0.95)), "do not move"),
        (hooked, "hooks on its steps"),
    ):
        found = nc.check_storage(model, optimizer)
        assert found.verdict == "not judged" and any(why in note for note in found.notes), found.notes


def test_files_of_checkpoints(tmp_path):
    """A file of torch.save, a folder of torch.distributed.checkpoint, and neither runs what it holds."""
    model = mlp()
    wide = mlp(torch.float32).state_dict()
    torch.save({"model": wide}, tmp_path / "kept.pt")
    dcp.save({"model": wide}, checkpoint_id=str(tmp_path / "kept"))
    for file in ("kept.pt", "kept"):
        found = nc.check_storage(model, Stochastic(model.parameters()), checkpoint=tmp_path / file)
        assert [one.kind for one in found.findings] == ["a checkpoint read into a lower format"]
        same = mlp(torch.float32)
        assert nc.check_storage(same, adamw(same), checkpoint=str(tmp_path / file))

    class Bad:
        def __reduce__(self):
            return (print, ("run",))

    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(pickle.dumps(Bad()))
    for file in ("bad", "missing.pt"):
        with pytest.raises(RunError, match="checkpoint="):
            nc.check_storage(model, adamw(model), checkpoint=tmp_path / file)


@pytest.mark.parametrize("given", [(None, "adamw"), ("model", None), ("model", "model")])
def test_what_is_no_model_or_optimizer_is_refused(given):
    model = mlp()
    named = {"model": model, "adamw": adamw(model), None: None}
    with pytest.raises(RunError, match="check_storage"):
        nc.check_storage(*(named[one] for one in given))


def test_saved_and_shown(tmp_path):
    """It is read back as it was, and its screen names the share and the rate."""
    model = mlp()
    found = nc.check_storage(model, adamw(model))
    assert nc.load(found.save(tmp_path / "storage.json")) == found
    text = " ".join(found.to_text(every=True).split())
    assert "updates lost in rounding" in text and "lr=" in text and math.isfinite(found.groups[0].lost)
    assert "storage" in found.to_html()


class Lookahead(torch.optim.Optimizer):
    """Wraps another, and is not initialized itself."""

    def __init__(self, base):
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults

    def step(self):
        self.base.step()


def test_other_optimizers_than_torch_s_are_not_mistaken():
    """One that wraps another; one whose first steps depend on the size of gradients; one that keeps notes in groups."""
    model = mlp()
    assert nc.check_storage(model, Lookahead(adamw(model))).verdict == "not judged"
    radam = torch.optim.RAdam(model.parameters(), lr=5e-2, betas=(0.9, 0.95))
    assert nc.check_storage(model, radam).groups[0].update == pytest.approx(5e-2, rel=0.5)
    kahan = Kahan(model.parameters())
    kahan.param_groups[0]["is_begun"] = True
    assert nc.check_storage(model, kahan).verdict == "sound"


class LowStates(Signs):
    """An average in bf16, and the upper half of a master's bits in the place of the weight."""

    def move(self, p, step, state):
        state.setdefault("average", torch.zeros_like(p, dtype=LOW)).mul_(0.9)
        state["rest"] = torch.full_like(p, 12345, dtype=torch.int16)
        super().move(p, step, state)


def test_what_a_resume_rounds_is_what_changes():
    """Whole numbers do, in a low format; what becomes wider does not."""
    model = mlp()
    rounded = [f.what for f in nc.check_storage(model, LowStates(model.parameters())).findings if "resume" in f.kind]
    assert len(rounded) == 1 and "rest" in rounded[0], rounded
    wide = mlp(torch.float32)
    assert nc.check_storage(wide, LowStates(wide.parameters())), "bf16 states of fp32 weights become fp32 ones"


def test_a_state_that_decays_slowly_is_asked_long_enough():
    model = mlp(torch.float16)
    found = nc.check_storage(model, adamw(model, lr=1e-2, betas=(0.9, 0.9999), eps=1e-4))
    assert "a state that does not decay" in [one.kind for one in found.findings], found.notes


def test_checkpoints_by_other_names_and_values():
    """Of DDP's model and of what it wraps; of low weights that were saved wide; of moments that are no masters."""
    model = mlp(torch.float32)
    low = {name: value.to(LOW) for name, value in model.state_dict().items()}
    wrapped = nn.Module()
    wrapped.module = model
    for kept in (low, {f"module.{name}": value for name, value in low.items()}):
        found = nc.check_storage(wrapped, adamw(model), checkpoint=kept)
        assert [one.kind for one in found.findings] == ["a checkpoint in a lower format"]
    model = mlp()
    wide = {name: value.float() for name, value in model.state_dict().items()}
    assert nc.check_storage(model, Stochastic(model.parameters()), checkpoint=wide)
    del wide["0.bias"]
    assert any("0.bias" in note for note in nc.check_storage(model, Kahan(model.parameters()), checkpoint=wide).notes)
    endless = {"0.weight": model[0].weight}
    endless["self"] = endless
    nc.check_storage(model, Kahan(model.parameters()), checkpoint=endless)
    with pytest.raises(RunError, match="none of the model's weights"):
        nc.check_storage(model, Kahan(model.parameters()), checkpoint={"other": torch.zeros(3)})


def test_moments_in_a_folder_are_no_masters(tmp_path):
    """Of whose tensors only names are known."""
    model = mlp()
    optimizer = with_masters(model, lr=1e-5)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        for p, master in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True):
            p.copy_(master)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=str(tmp_path / "kept"))
    found = nc.check_storage(model, optimizer, checkpoint=tmp_path / "kept")
    assert [one.kind for one in found.findings] == ["a checkpoint without masters"]


def test_a_few_rows_that_are_apart_are_found():
    """An embedding that grew after masters were made."""
    model = nn.Embedding(1000, 4).to(LOW)
    optimizer = KeptMasters(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert nc.check_storage(model, optimizer)
    with torch.no_grad():
        model.weight[-1].normal_()
    assert [one.kind for one in nc.check_storage(model, optimizer).findings] == ["masters apart from their weights"]


def test_zeros_and_frozen_weights_do_not_count():
    """In the learning rate from which on half are lost, and in the bytes of gradients; states are those to come."""
    norm = nn.LayerNorm(64).to(LOW)
    (group,) = nc.check_storage(norm, adamw(norm, lr=1e-4)).groups
    assert group.lost == 0.5 and group.lost_from > 1e-4
    model = mlp(torch.float32)
    model[0].requires_grad_(requires_grad=False)
    (group,) = nc.check_storage(model, adamw(model)).groups
    trained = sum(p.numel() for p in model[2].parameters())
    assert (group.gradient_bytes, group.state_bytes) == (4 * trained, 8 * trained)


def test_many_groups_are_asked_once():
    """A learning rate for each layer: one finding, one probe of what does not depend on it."""
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(12)).to(LOW)
    groups = [{"params": [p], "lr": 1e-5 * 0.9**n} for n, p in enumerate(model.parameters())]
    found = nc.check_storage(model, torch.optim.AdamW(groups))
    assert [one.kind for one in found.findings] == ["updates lost in rounding", "a state that does not decay"]
    assert "23 more groups" in found.findings[0].what and len({group.rate for group in found.groups}) == 24


@pytest.mark.parametrize("what", ["lr", "lazy", "meta", "another"])
def test_what_cannot_be_judged_is_refused(what):
    model = nn.Sequential(nn.LazyLinear(4)) if what == "lazy" else mlp().to("meta") if what == "meta" else mlp()
    optimizer = adamw(mlp() if what == "another" else model)
    with pytest.raises(RunError, match="check_storage"):
        nc.check_storage(model, optimizer, lr=-1.0 if what == "lr" else None)


def test_each_parameter_has_the_updates_of_its_own_gradients():
    """SGD: a large table of which few rows have gradients does not speak for the layer behind it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 16), nn.Linear(16, 8)).to(LOW)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-4)
    model[0].weight.grad[5:] = 0
    model[0].weight.grad[:5] = 100.0
    found = nc.check_storage(model, torch.optim.SGD(model.parameters(), 1e-2))
    assert [one.module_path for one in found.findings] == ["1.weight"], found.notes


def test_an_average_is_no_master():
    """A state in fp32 that is the weight where that stands still."""

    class Averaged(Signs):
        def move(self, p, step, state):
            super().move(p, step, state)
            state.setdefault("average", p.float()).lerp_(p.float(), 0.5)

    model = mlp()
    optimizer = Averaged(model.parameters(), 1e-2)
    for p in (*model[0].parameters(), model[2].weight):
        p.grad = torch.ones_like(p)
    model[2].bias.grad = torch.zeros_like(model[2].bias)
    for _ in range(3):
        optimizer.step()
    kinds = [one.kind for one in nc.check_storage(model, optimizer, checkpoint=model.state_dict()).findings]
    assert "masters apart from their weights" not in kinds and "a checkpoint without masters" not in kinds


@pytest.mark.parametrize("rule", [{"parameter": "0.*"}, {"parameter": "1.weight"}])
def test_what_is_kept_in_two_ways_is_judged_in_both(rule):
    """Parameters of one format, of which a rule lets some lose their updates: these are named."""
    model = nn.Sequential(nn.Linear(64, 65), nn.Linear(65, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    nc.store(model, optimizer, {"weight": "bf16", "master": "remainder", "rule": [{**rule, "master": "none"}]})
    found = nc.check_storage(model, optimizer)
    assert found.verdict == "wrong"
    assert [kept.lost is not None for kept in found.groups].count(True) == 1
    assert rule["parameter"][0] + "." in found.findings[0].what
    assert "nc.store(model, optimizer" in found.findings[0].todo
