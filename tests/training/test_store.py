"""`nc.store`: weights, masters, gradients and moments in declared formats; bits, optimizers, checkpoints, ranks."""

import copy
import math
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import narrowcast as nc
from narrowcast.core.policy.storage import Storage
from narrowcast.errors import PolicyError, RunError
from narrowcast.runtime.torch_surface.dynamo import missing_cpp_compiler
from narrowcast.training.storage.passes import Formula, Passes
from narrowcast.training.storage.rounding import PLAIN, joined, key_of, numbered, parted, sum_of_bits, words

BF16 = {"weight": "bf16"}
FORMS = {
    "nearest": BF16,
    "master": BF16 | {"master": "fp32"},
    "remainder": BF16 | {"master": "remainder", "gradient": "fp32"},
    "stochastic": BF16 | {"rounding": "stochastic", "moments": "bf16"},
    "kahan": BF16 | {"rounding": "kahan"},
    "moments": {"moments": "bf16"},
    "fp16": {"weight": "fp16", "master": "fp32"},
}
ADAMW, NESTEROV = Formula(True, True), Formula(False, True, True, True)
AT_ONCE = [*((ADAMW, way) for way in (PLAIN, "nearest", "fp32", "remainder", "stochastic", "kahan"))]
AT_ONCE += [(NESTEROV, "remainder"), (NESTEROV, "kahan")]
X, Y = (torch.randn(8, n, generator=torch.Generator().manual_seed(n)) for n in (16, 4))


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 4))


def adamw(parameters, **more):
    return torch.optim.AdamW(parameters, lr=1e-3, **more)


def loss_of(model, rows=slice(None)):
    """A loss whose forward computes in fp32, from weights as they are stored."""
    wide = {name: parameter.float() for name, parameter in model.named_parameters()}
    return (torch.func.functional_call(model, wide, (X[rows],)) - Y[rows]).square().mean()


def step(model, optimizer):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def made(declared, make=adamw):
    model = net()
    optimizer = make(model.parameters())
    return model, optimizer, nc.store(model, optimizer, declared)


def state(model, stored):
    return {**stored.state_dict(), **{f"weight of {n}": p.detach().clone() for n, p in model.named_parameters()}}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def twin_of(model, stored):
    """The same model in fp32, with the numbers that are stored."""
    plain = net()
    plain.load_state_dict(stored.weights())
    return plain


def step_alike(model, optimizer, plain, other, steps):
    """Make the steps of two optimizers with the same gradients."""
    for n in range(steps):
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            drawn = torch.randn(one.shape, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16)
            one.grad, two.grad = drawn.to(one.grad_dtype), drawn.float()
        optimizer.step()
        other.step()


class Signs(torch.optim.Optimizer):
    """A user's own: it steps by signs, and keeps a list and a count of its own."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
        self.fails = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    assert p.dtype is p.grad.dtype is torch.float32
                    kept = self.state[p]
                    kept["mean"] = kept.get("mean", torch.zeros_like(p)).lerp(p.grad, 0.1)
                    kept["count"] = kept.get("count", 0) + 1
                    p.add_(kept["mean"].sign(), alpha=-group["lr"])
                if self.fails:
                    raise OSError("in the middle")


OTHERS = {
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adafactor": torch.optim.Adafactor,
    "AMSGrad": lambda p: adamw(p, amsgrad=True),
    "Signs": Signs,
}


class TestBits:
    CODES = (
        (
            torch.arange(1 << 16, dtype=torch.int64).view(-1, 1) * 65536
            + torch.tensor(
                [
                    0,
                    1,
                    2,
                    0x7F,
                    0x1234,
                    0x7FFE,
                    0x7FFF,
                    0x8000,
                    0x8001,
                    0x8002,
                    0xA5A5,
                    0xFF00,
                    0xFFF0,
                    0xFFFD,
                    0xFFFE,
                    0xFFFF,
                ]
            )
        )
        .flatten()
        .to(torch.int32)
    )
    WIDE = CODES.view(torch.float32)

    def test_a_remainder_makes_the_master_again(self):
        weight, rest = parted("remainder", self.WIDE, torch.bfloat16)
        low, short = weight.to(torch.bfloat16), rest.to(torch.int16)
        again = joined("remainder", low, short)
        numbers = ~self.WIDE.isnan()
        assert torch.equal(again.view(torch.int32)[numbers], self.CODES[numbers])
        assert bool(again[~numbers].isnan().all())
        ties = numbers & ((self.CODES & 0xFFFF) == 0x8000)
        assert bool((low.float().abs() > self.WIDE.abs())[ties].all())  # half away from zero
        others = numbers & ~ties
        assert torch.equal(low[others], self.WIDE.to(torch.bfloat16)[others])

    @pytest.mark.parametrize("way", ["nearest", "fp32", "kahan"])
    def test_the_others_round_to_nearest_even(self, way):
        weight, rest = parted(way, self.WIDE, torch.bfloat16)
        wanted = self.WIDE.to(torch.bfloat16)
        assert torch.equal(weight.to(torch.bfloat16).nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert torch.equal(weight.isnan(), self.WIDE.isnan())
        if way == "kahan":
            finite = wanted.isfinite()
            assert torch.equal(rest[finite], (self.WIDE - wanted.float()).to(torch.bfloat16).float()[finite])

    @pytest.mark.parametrize("word", [0, 1, 0x7FFF, 0x8000, 0xFFFF])
    def test_stochastic_rounding_goes_up_where_the_word_and_the_low_bits_carry(self, word):
        weight, _ = parted("stochastic", self.WIDE, torch.bfloat16, torch.tensor(word, dtype=torch.int32))
        low = self.CODES & 0xFFFF
        wanted = (self.CODES >> 16) + ((low + word) > 0xFFFF).to(torch.int32)
        numbers = ~self.WIDE.isnan()
        assert torch.equal((weight.view(torch.int32) >> 16)[numbers], wanted[numbers])
        assert torch.equal(weight.isnan(), self.WIDE.isnan())

    def test_words_are_uniform_and_have_nothing_to_do_with_one_another(self):
        places = numbered(torch.arange(1 << 15, dtype=torch.int32))
        rows = torch.stack([words(places + key_of(0, n, "w"), salt).double() for n in range(8) for salt in (0, 1, 2)])
        rows = rows / 65536 - 0.5
        limit = 5 / math.sqrt(rows.numel() / 12)  # five standard deviations
        assert abs(rows.mean()) < limit
        assert abs(rows.var() * 12 - 1) < 0.01
        for lag in (1, 2, 64, 4096):
            assert abs((rows[:, lag:] * rows[:, :-lag]).mean() * 12) < limit * 4
        assert float((rows @ rows.T / (1 << 15) * 12 - torch.eye(24)).abs().max()) < 6 / math.sqrt(1 << 15)

    @pytest.mark.sweep(one_in=2)
    @pytest.mark.parametrize(
        ("formula", "way", "low"),
        [
            pytest.param(formula, way, low, marks=[] if (formula, way) in AT_ONCE else pytest.mark.slow)
            for formula in (ADAMW, NESTEROV, Formula(True, False), Formula(False, False))
            for way, low in [
                *((way, torch.bfloat16) for way in (PLAIN, "nearest", "fp32", "remainder", "stochastic", "kahan")),
                *((way, torch.float16) for way in ("nearest", "fp32", "kahan")),
            ]
        ],
    )
    def test_compiled_code_gives_the_same_bits(self, formula, way, low):
        numbers = [1.0, 0.1, 0.999, 0.1, 0.99, 0.01, 1.3, 1e-8, 1e-3] if formula.is_adam else [1.0, 0.1, 0.01, 0.9, 1.0]
        found = []
        for elements in (0, 1 << 20):
            generator = torch.Generator().manual_seed(3)
            start = torch.randn(4099, generator=generator) * torch.logspace(
                -20, 20 if low is torch.bfloat16 else 6, 4099
            )
            start[:6] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3.4e38])
            gradient = (torch.randn(4099, generator=generator) * start.abs().clamp(max=1e9)).nan_to_num().to(low)
            dtype = torch.float32 if way == PLAIN else low
            weight, rest = parted(way, start, dtype, torch.zeros(4099, dtype=torch.int32))
            weight = start.clone() if way == PLAIN else weight.to(dtype)
            kind = {"remainder": torch.int16, "fp32": torch.float32}.get(way, dtype)
            rest = None if rest is None else rest.to(kind, copy=True)
            moments = [torch.randn(4099, generator=generator), torch.rand(4099, generator=generator).bfloat16()]
            moments = [m.to(torch.bfloat16) for m in moments][: 2 if formula.is_adam else int(formula.momentum)]
            passes = Passes(elements)
            told = passes.run(formula, way, weight, rest, gradient, moments, None, 77, numbers)
            assert bool(passes.notes) == bool(elements and missing_cpp_compiler(None))
            if way in ("remainder", "kahan"):  # sums of bits, which a NaN may have many of
                assert told.pop() == sum_of_bits(weight)
                told.clear()
            found.append([one for one in (weight, rest, *moments, *told) if one is not None])
        for eager, compiled in zip(*found, strict=True):
            assert torch.equal(eager.nan_to_num(7.0), compiled.nan_to_num(7.0))


class TestOptimizers:
    @pytest.mark.parametrize("form", FORMS)
    def test_adamw_steps_as_in_fp32(self, form):
        model, optimizer, stored = made(FORMS[form], lambda p: adamw(p, weight_decay=0.1))
        plain = twin_of(model, stored)
        step_alike(model, optimizer, plain, adamw(plain.parameters(), weight_decay=0.1), 20)
        far = {"nearest": 2e-2, "stochastic": 2e-2, "kahan": 1e-4, "moments": 2e-3}.get(form, 1e-6)
        for exact, wanted in zip(stored.weights().values(), plain.parameters(), strict=True):
            torch.testing.assert_close(exact, wanted.detach(), rtol=1e-5, atol=far)
        assert (stored.lost[-1] > 0.1) == (form == "nearest")
        assert len(stored.lost) == stored.update == 20

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"momentum": 0.9},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            {"momentum": 0.9, "dampening": 0.5, "maximize": True},
        ],
    )
    def test_sgd_is_torch_s(self, settings):
        model, optimizer, stored = made(FORMS["master"], lambda p: torch.optim.SGD(p, 0.01, **settings))
        plain = twin_of(model, stored)
        step_alike(model, optimizer, plain, torch.optim.SGD(plain.parameters(), 0.01, **settings), 5)
        for exact, wanted in zip(stored.weights().values(), plain.parameters(), strict=True):
            torch.testing.assert_close(exact, wanted.detach(), rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("form", ["remainder", "stochastic", "master"])
    @pytest.mark.parametrize("name", OTHERS)
    def test_any_other_steps_copies_in_fp32(self, name, form):
        model, optimizer, stored = made(FORMS[form], OTHERS[name])
        plain = twin_of(model, stored)
        step_alike(model, optimizer, plain, OTHERS[name](plain.parameters()), 4)
        for exact, wanted in zip(stored.weights().values(), plain.parameters(), strict=True):
            assert float((exact - wanted.detach()).abs().max()) <= (0.02 if form == "stochastic" else 0.0)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert optimizer.param_groups[0]["params"] == [*model.parameters()]

    def test_a_step_that_fails_loses_nothing(self):
        model, optimizer, stored = made(FORMS["remainder"], Signs)
        step(model, optimizer)
        before, optimizer.fails = state(model, stored), True
        with pytest.raises(OSError, match="in the middle"):
            optimizer.step()
        after = state(model, stored)
        assert all(torch.equal(before[k], after[k]) for k in before if "state" not in k)
        assert optimizer.param_groups[0]["params"] == list(model.parameters())

    def test_schedules_closures_hooks_and_clips_work(self):
        model, optimizer, stored = made(FORMS["remainder"])
        seen = []
        optimizer.register_step_pre_hook(lambda own, *_: seen.append(own.param_groups[0]["params"][0].grad is not None))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, optimizer)
            schedule.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        assert (seen, stored.update, optimizer.param_groups[0]["lr"]) == ([True, True], 2, pytest.approx(1e-4))

    @pytest.mark.parametrize("scaler", [torch.amp.GradScaler, nc.Scaler])
    def test_a_scaler_skips_what_is_not_finite(self, scaler):
        model, optimizer, stored = made(FORMS["fp16"] | {"gradient": "fp32"}, lambda p: adamw(p, fused=True))
        scaler, moved = scaler("cpu"), []
        for factor in (1.0, math.inf, 1.0):
            before = stored.weights()
            optimizer.zero_grad()
            scaler.scale(loss_of(model) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            moved.append(not same(before, stored.weights()))
        assert moved == [True, False, True]

    def test_sparse_gradients_frozen_and_tied_weights(self):
        table, head, own = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 9, bias=False), nn.Linear(4, 4)
        model = nn.ModuleList([table, own, head])
        head.weight = own.weight
        own.bias.requires_grad_(False)
        optimizer = torch.optim.SGD([table.weight, own.weight], lr=1.0)
        stored = nc.store(model, optimizer, FORMS["remainder"])
        before = stored.weights()
        table(torch.tensor([1, 3])).sum().backward()
        optimizer.step()
        moved = (stored.weights()["0.weight"] != before["0.weight"]).any(-1)
        assert moved.nonzero().flatten().tolist() == [1, 3]
        assert head.weight is own.weight
        assert own.bias.dtype is torch.float32
        assert stored.notes == ["Of no group of this optimizer, and as before: 1.bias."]

    def test_layouts_stay(self):
        model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        optimizer = adamw(model.parameters())
        stored = nc.store(model, optimizer, FORMS["kahan"])
        model(torch.randn(1, 3, 5, 5).bfloat16()).sum().backward()
        optimizer.step()
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        exact = stored.weights()["weight"]
        stored.undo()
        assert torch.equal(model.weight, exact)


class TestCheckpoints:
    @pytest.mark.parametrize("form", [form for form in FORMS if form != "nearest"])
    @pytest.mark.parametrize("make", [adamw, OTHERS["RMSprop"], Signs])
    def test_a_resume_has_the_bits_of_not_stopping(self, form, make, tmp_path):
        def micro(model, optimizer, number):
            loss_of(model, slice(number % 4, None, 4)).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

        model, optimizer, stored = made(FORMS[form], make)
        kept = []
        for number in range(8):
            plain = {name: value.clone() for name, value in model.state_dict().items()}
            torch.save(optimizer.state_dict(), tmp_path / f"{number}.pt")
            kept.append((plain, copy.deepcopy(stored.state_dict())))
            micro(model, optimizer, number)
        for number in (1, 3, 5):  # after one batch of three, after a step, after two of three
            plain, flat = kept[number]
            for way in ("torch's own", "flat", "file"):
                other, second, again = made(FORMS[form], make)
                other.load_state_dict(plain)
                if way == "torch's own":
                    second.load_state_dict(torch.load(tmp_path / f"{number}.pt", weights_only=True))
                elif way == "flat":
                    again.load_state_dict(flat)
                else:
                    save_file(flat, tmp_path / "one.safetensors")
                    again.load_state_dict(tmp_path / "one.safetensors")
                for later in range(number, 8):
                    micro(other, second, later)
                assert same(state(model, stored), state(other, again)), (number, way)

    @pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
    def test_a_folder_of_torch_distributed_checkpoint(self, tmp_path):
        model, optimizer, stored = made(FORMS["stochastic"])
        step(model, optimizer)
        loss_of(model).backward()
        dcp.save({"model": model.state_dict(), "any name": stored}, checkpoint_id=tmp_path)
        other, second, again = made(FORMS["stochastic"])
        other.load_state_dict(model.state_dict())
        again.load_state_dict(tmp_path)
        assert same(state(model, stored), state(other, again))
        optimizer.step()
        second.step()
        assert same(state(model, stored), state(other, again))

    def test_another_declaration_is_refused_or_converted_by_name(self):
        model, optimizer, stored = made(FORMS["remainder"])
        step(model, optimizer)
        other, _, again = made(FORMS["kahan"])
        other.load_state_dict(model.state_dict())
        before = state(other, again)
        for saved in (optimizer.state_dict(), stored.state_dict()):
            with pytest.raises(RunError, match="by another declaration"):
                again.load_state_dict(saved)
            assert same(before, state(other, again))
        again.load_state_dict(stored.state_dict(), convert_from=stored.full_name)
        for name, exact in again.weights().items():
            torch.testing.assert_close(exact, stored.weights()[name], rtol=2.0**-16, atol=0)

        plain = net()
        unstored = adamw(plain.parameters())
        step(plain, unstored)
        third, fourth, converted = made({"moments": "bf16"})
        third.load_state_dict(plain.state_dict())
        with pytest.raises(RunError, match="stored as 'torch'"):
            fourth.load_state_dict(unstored.state_dict())
        converted.load_state_dict(unstored.state_dict(), convert_from="torch")
        assert fourth.state[third[0].weight]["exp_avg"].dtype is torch.bfloat16
        with pytest.raises(RunError, match="Write convert_from='torch'"):
            converted.load_state_dict(unstored.state_dict(), convert_from="train")

    def test_other_shapes_and_lost_gradients_are_refused(self):
        model, optimizer, stored = made(FORMS["remainder"])
        step(model, optimizer)
        loss_of(model).backward()
        saved = stored.state_dict()
        other, _, again = made(FORMS["remainder"])
        before = state(other, again)
        for change, found in (
            ({"0.weight/remainder": torch.zeros(3)}, r"remainder of 0.weight has shape \(3,\)"),
            ({"0.weight/state/exp_avg": torch.zeros(3)}, r"exp_avg of 0.weight has shape"),
            ({"gradients": torch.tensor(9)}, "9 gradients of an accumulation were saved"),
        ):
            with pytest.raises(RunError, match=found):
                again.load_state_dict(saved | change)
        lacking = {name: value for name, value in saved.items() if name != "3.bias/remainder"}
        with pytest.raises(RunError, match=r"3\.bias has nothing beside it, not remainder"):
            again.load_state_dict(lacking)
        assert same(before, state(other, again))

    @pytest.mark.parametrize(
        ("name", "value", "found"),
        [
            ("update", torch.zeros(3), "update is no finite number"),
            ("update", None, "update is not there"),
            ("groups/0/lr", torch.tensor(math.nan), "groups/0/lr is no finite number"),
            ("0.weight/state/exp_avg", torch.zeros(33, 16, device="meta"), "exp_avg of 0.weight is no tensor"),
            ("0.weight/state/exp_avg", torch.zeros(33, 16).bfloat16(), "exp_avg of 0.weight is in bf16, not in fp32"),
            ("0.weight/state/step", torch.tensor(-1.0), "step of 0.weight is"),
            ("0.weight/master", torch.zeros(33, 16).bfloat16(), "master of 0.weight is in bf16, not in fp32"),
            ("parameters", torch.zeros(32, dtype=torch.uint8), "of another optimizer, or of parameters of other"),
            ("digest", torch.zeros(32), "digest is not what was saved"),
        ],
    )
    def test_damage_is_refused_before_anything_changes(self, name, value, found):
        model, optimizer, stored = made(FORMS["master"])
        step(model, optimizer)
        saved = {key: one for key, one in stored.state_dict().items() if key != name or value is not None}
        step(model, optimizer)
        before = state(model, stored)
        with pytest.raises(RunError, match=found):
            stored.load_state_dict(saved if value is None else saved | {name: value})
        assert same(before, state(model, stored))

    def test_one_optimizer_s_checkpoint_is_no_other_s(self):
        """Nor is that of other groups."""
        model, optimizer, stored = made(FORMS["master"])
        step(model, optimizer)
        for make in (OTHERS["RMSprop"], lambda ps: adamw([{"params": one} for one in ps])):
            with pytest.raises(RunError, match="of another optimizer, or of parameters of other"):
                made(FORMS["master"], make)[2].load_state_dict(stored.state_dict())

    def test_the_optimizer_first_or_the_model_and_a_rewind(self):
        """The order is free, nothing false is said, and a gradient that was pending is gone."""
        model, optimizer, stored = made(FORMS["remainder"])
        step(model, optimizer)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        wanted = state(model, stored)
        step(model, optimizer)
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.load_state_dict(kept[1])
        model.load_state_dict(kept[0])
        assert all(p.grad is None for p in model.parameters())
        assert same(wanted, state(model, stored))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, optimizer)

    def test_hooks_and_methods_of_one_s_own_hold(self):
        """A hook on loading keeps its effect; a class with its own load_state_dict is resumed."""

        class Own(torch.optim.RMSprop):
            def load_state_dict(self, saved):
                groups = zip(saved["param_groups"], self.param_groups, strict=True)
                self.param_groups = [{**group, "params": own["params"]} for group, own in groups]
                order = [p for group in self.param_groups for p in group["params"]]
                self.state.update({order[n]: dict(one) for n, one in saved["state"].items()})

        model, optimizer, stored = made(FORMS["master"], Own)
        step(model, optimizer)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        other, second, again = made(FORMS["master"], Own)
        other.load_state_dict(kept[0])
        second.load_state_dict(kept[1])
        assert same(state(model, stored), state(other, again))
        model, optimizer, _ = made(FORMS["master"])
        optimizer.register_load_state_dict_post_hook(lambda one: [s["exp_avg"].zero_() for s in one.state.values()])
        step(model, optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert not optimizer.state[model[0].weight]["exp_avg"].any()

    def test_plain_torch_loads_what_was_stored(self):
        model, optimizer, _ = made(FORMS["remainder"])
        step(model, optimizer)
        plain = net()
        other = adamw(plain.parameters())
        plain.load_state_dict(model.state_dict())
        other.load_state_dict(optimizer.state_dict())
        step(plain, other)
        assert torch.equal(plain[0].weight.bfloat16(), plain[0].weight) is False


class TestAround:
    def test_undo_gives_all_digits_back(self):
        for form, dtype in (("remainder", torch.float32), ("stochastic", torch.float32), ("moments", torch.float32)):
            model, optimizer, stored = made(FORMS[form])
            step(model, optimizer)
            exact = stored.weights()
            stored.undo()
            assert all(torch.equal(p, exact[n]) and p.dtype is dtype for n, p in model.named_parameters())
            assert "step" not in vars(optimizer)
            step(model, optimizer)
            with pytest.raises(RunError, match="undone already"):
                stored.undo()
            with pytest.raises(RunError, match="it has stepped"):
                nc.store(model, optimizer, FORMS[form])

    def test_what_somebody_else_writes_stays(self):
        model, optimizer, stored = made(FORMS["master"])
        step(model, optimizer)
        with torch.no_grad():
            model[0].weight.data[0] = 5.0
        with pytest.warns(UserWarning, match=r"0\.weight changed since the last step") as told:
            step(model, optimizer)
        assert told[0].filename == __file__
        assert float((model[0].weight[0] - 5).abs().max()) < 0.1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, optimizer)
        assert len(stored.notes) == 1

    def test_bytes_by_kind(self):
        count = sum(p.numel() for p in net().parameters())
        for form, wanted in (("nearest", 12), ("master", 16), ("remainder", 16), ("stochastic", 8), ("moments", 12)):
            model, optimizer, stored = made(FORMS[form])
            for _ in range(2):
                assert sum(now for _, now in stored.sizes().values()) == wanted * count
                assert sum(before for before, _ in stored.sizes().values()) == 16 * count
                step(model, optimizer)
            check = nc.check_storage(model, optimizer)
            assert check.bytes_before == 16 * count
            steps = 4 * len([*model.parameters()])  # the optimizer's own counts
            assert sum(g.bytes_per_element * g.elements for g in check.groups) == wanted * count + steps

    @pytest.mark.sweep(one_in=2)
    @pytest.mark.parametrize(
        ("form", "make"),
        [(form, adamw) for form in ("nearest", "remainder", "stochastic", "fp16")]
        + [(form, lambda p: torch.optim.RMSprop(p, 1e-5)) for form in ("nearest", "kahan")],
    )
    def test_checks_know_what_is_stored_and_change_nothing(self, form, make):
        model, optimizer, stored = made(FORMS[form], make)
        for group in optimizer.param_groups:
            group["lr"] = 1e-6
        step(model, optimizer)
        before = state(model, stored)
        storage = nc.check_storage(model, optimizer)
        training = nc.check_training(lambda: step(model, optimizer))
        assert same(before, state(model, stored))
        assert (storage.verdict, "updates lost in rounding" in training.kinds) == (
            ("wrong", True) if form == "nearest" else ("sound", False)
        )
        both = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
        assert bool(nc.check_storage(model, optimizer, checkpoint=both)) == (form != "nearest")
        alone = nc.check_storage(model, optimizer, checkpoint=model.state_dict())
        lacks = "a checkpoint without masters" in [finding.kind for finding in alone.findings]
        assert lacks == (form in ("master", "remainder", "kahan", "fp16"))

    def test_a_region_casts_no_weight_and_advises_nothing(self):
        model, _, _ = made(FORMS["remainder"])
        with nc.record() as ledger, nc.autocast("cpu", torch.bfloat16):
            model(X.bfloat16())
        assert not ledger.casts
        assert not ledger.advice
        explained = nc.explain(model, X.bfloat16())
        assert explained.stored["weight"] == (2 * explained.stored["master"][1], explained.stored["master"][1])
        assert not {"weights in a low format", "no casts"} & {advice.kind for advice in explained.ledger.advice}

    def test_copies_are_plain(self):
        model, optimizer, _ = made(FORMS["remainder"])
        step(model, optimizer)
        assert "step" not in vars(copy.deepcopy(optimizer))
        assert copy.deepcopy(model)[0].weight.dtype is torch.bfloat16


class TestChangedSince:
    """What is changed between steps, outside of the optimizer: it is followed, or refused by name."""

    @pytest.mark.parametrize("change", ["larger", "smaller", "moment"])
    def test_other_shapes_are_refused_before_a_step(self, change):
        """In C++, which would write beyond the memory."""
        model = nn.Linear(512, 512)
        optimizer = adamw(model.parameters())
        stored = nc.store(model, optimizer, FORMS["remainder"])
        loss = model(torch.ones(1, 512).bfloat16()).float().square().mean()
        loss.backward()
        if change == "moment":
            optimizer.state[model.weight]["exp_avg"] = torch.zeros(3)
        else:
            model.weight.grad = None
            model.weight.data = torch.zeros(513 if change == "larger" else 4, 512, dtype=torch.bfloat16)
        with pytest.raises(RunError, match="has shape"):
            optimizer.step()
        assert stored.update == 0
        stored.undo()

    def test_groups_are_those_of_now(self):
        """A parameter that is moved to another group, or taken out of its own, is stepped as torch does."""

        def moved(change, declared):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
            groups = [{"params": [model[0].weight], "lr": 1.0}, {"params": [model[1].weight], "lr": 0.0}]
            optimizer = torch.optim.SGD(groups)
            if declared is not None:
                nc.store(model, optimizer, declared)
            before = [p.detach().clone() for p in model.parameters()]
            change(optimizer.param_groups)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            return [bool((a != b).any()) for a, b in zip(before, model.parameters(), strict=True)]

        def exchanged(groups):
            groups[1]["params"].append(groups[0]["params"].pop())

        changes = [
            lambda groups: groups[0]["params"].clear(),
            exchanged,
            lambda groups: groups.reverse(),
            lambda g: g.pop(0),
        ]
        for change in changes:
            for form in ("master", "nearest"):
                assert moved(change, FORMS[form]) == moved(change, None)

    def test_gradients_that_a_step_clears_are_cleared(self):
        class Clearing(torch.optim.RMSprop):
            def step(self, closure=None):
                super().step(closure)
                self.zero_grad()

        model, optimizer, _ = made(FORMS["master"], Clearing)
        loss_of(model).backward()
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())

    def test_what_computes_its_loss_at_other_weights_is_refused(self):
        """SAM: its second loss would be the first one's, and its base optimizer steps past what is stored."""

        class Sam(torch.optim.Optimizer):
            def __init__(self, params, lr=1e-3):
                super().__init__(params, {"lr": lr})
                self.base = torch.optim.AdamW(self.param_groups, lr=lr)
                self.param_groups = self.base.param_groups

            @torch.no_grad()
            def step(self, closure=None):
                parameters = [p for group in self.param_groups for p in group["params"]]
                for p in parameters:
                    p.add_(p.grad * 0.01)
                with torch.enable_grad():
                    closure()
                self.base.step()

        model, optimizer, _ = made(FORMS["master"], Sam)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        with pytest.raises(RunError, match="computes its loss again"):
            optimizer.step(closure)
        with pytest.raises(RunError, match=r"0\.weight is stored, of another Sam"):
            optimizer.base.step()

    def test_a_weight_of_any_scale_is_told_once(self):
        """All of 8,192 elements halved, in two weights: one note."""
        model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 128))
        optimizer = adamw(model.parameters())
        stored = nc.store(model, optimizer, FORMS["remainder"])
        for number in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                optimizer.step()
            assert len(told) == (number == 1)
            with torch.no_grad():
                model[0].weight.mul_(0.5)
                model[1].weight.mul_(0.5)
        (note,) = stored.notes
        assert note.startswith("0.weight and 1 more weight changed since the last step, not by the optimizer")


class TestDeclaration:
    def test_a_policy_file_keeps_it_and_its_digest(self):
        text = 'name = "x"\n\n[storage]  # why\nweight = "bf16"\n\n[[storage.rule]]\nclass = "Norm"\nweight = "fp32"\n'
        policy, bare = nc.Policy.parse(text), nc.Policy.parse('name = "x"\n')
        assert policy.digest == bare.digest
        assert policy.storage.digest != Storage.of({"weight": "bf16"}).digest
        assert policy.to_toml() == text
        again = nc.Policy.parse(nc.Policy("y", storage=policy.storage).to_toml())
        assert again.storage == policy.storage
        assert bare.merge(policy).storage == policy.storage

    def test_rules_by_name_class_and_group(self):
        model = net()
        optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2:].parameters()}])
        rules = [{"class": "LayerNorm", "weight": "fp32"}, {"parameter": "3.b*", "weight": "fp32"}]
        rules += [{"group": 0, "master": "none", "rounding": "stochastic"}]
        stored = nc.store(model, optimizer, FORMS["remainder"] | {"rule": rules})
        ways = {slot.name: slot.way for slot in stored.slots}
        assert ways == {
            "0.weight": "stochastic",
            "0.bias": "stochastic",
            "2.weight": "plain",
            "2.bias": "plain",
            "3.weight": "remainder",
            "3.bias": "plain",
        }

    @pytest.mark.parametrize(
        ("text", "line", "found"),
        [
            ('weight = "bf17"', 3, "weight = 'bf17'"),
            ('weight = "bf16"\nwigth = 3', 4, "did you mean 'weight'"),
            ('seed = "a"', 3, "whole number"),
            ('[[storage.rule]]\nparameter = "x"\nmaster = "all"', 5, "master = 'all'"),
        ],
    )
    def test_mistakes_have_their_lines(self, text, line, found):
        with pytest.raises(PolicyError, match=found) as raised:
            nc.Policy.parse(f'name = "x"\n[storage]\n{text}\n', "own.toml")
        assert (raised.value.where[0].file, raised.value.where[0].line) == ("own.toml", line)

    @pytest.mark.parametrize(
        ("declared", "found"),
        [
            ({"weight": "fp16", "master": "remainder"}, "completes bf16, not fp16"),
            ({"weight": "bf16", "master": "fp32", "rounding": "kahan"}, "keeps all digits"),
            ({"weight": "fp16", "rounding": "stochastic"}, "not to fp16"),
            ({"rule": [{"weight": "fp32"}]}, "about all parameters"),
            (nc.Policy("bare"), r"no \[storage\] section"),
        ],
    )
    def test_what_cannot_be_is_refused_before_anything_changes(self, declared, found):
        model = net()
        optimizer = adamw(model.parameters())
        with pytest.raises(nc.errors.NarrowcastError, match=found):
            nc.store(model, optimizer, declared)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert "step" not in vars(optimizer)

    def test_models_that_cannot_be_are_refused(self):
        """Without values; and a norm that would run with statistics in another format, until a rule says otherwise."""
        with torch.device("meta"):
            empty = net()
        with pytest.raises(RunError, match="on the meta device"):
            nc.store(empty, adamw(empty.parameters()), FORMS["master"])
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        with pytest.raises(RunError, match=r"1 \(BatchNorm1d\) keeps statistics in fp32") as refused:
            nc.store(model, adamw(model.parameters()), FORMS["remainder"])
        assert '[[storage.rule]] class = "BatchNorm1d", weight = "fp32"' in str(refused.value)
        rule = {"class": "BatchNorm1d", "weight": "fp32"}
        nc.store(model, adamw(model.parameters()), FORMS["remainder"] | {"rule": [rule]})
        assert model[1].weight.dtype is torch.float32 and model[0].weight.dtype is torch.bfloat16

    def test_optimizers_that_cannot_be_are_refused(self):
        model = net()
        optimizer = adamw(model.parameters())
        twice = adamw(model.parameters())
        twice.param_groups.append({**twice.param_groups[0], "params": [model[0].weight]})
        stepped = adamw(model.parameters())
        step(model, stepped)
        for one, found in (
            (torch.optim.LBFGS(model.parameters()), "compute the loss several times"),
            (twice, r"0\.weight is in groups 0 and 1"),
            (stepped, "it has stepped"),
            (adamw(net().parameters()), "is none of the model's"),
            (object(), "it is no optimizer"),
        ):
            with pytest.raises(RunError, match=found):
                nc.store(model, one, FORMS["remainder"])
        nc.store(model, optimizer, FORMS["remainder"])
        with pytest.raises(RunError, match="stored already"):
            nc.store(model, optimizer, FORMS["remainder"])
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
        with pytest.raises(RunError, match="was added later"):
            optimizer.step()
