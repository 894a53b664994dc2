"""What is not finite and meant is not told; what comes to something is told once, at the call that made it."""

import math
import warnings
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

INF = math.inf
CAUSAL = torch.ones(8, 8, dtype=torch.bool).triu(1)
SOUND, FAULTY = {}, {}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def sound(program):
    SOUND[program.__name__] = program
    return program


def faulty(op, made_by="op", direction="forward", times=1):
    """The one call that makes it; times: how many findings it is at most."""

    def note(program):
        FAULTY[program.__name__] = program, op, made_by, direction, times
        return program

    return note


def train(loss, parameters, steps=3, optimizer=torch.optim.AdamW, **settings):
    steps_of = optimizer(parameters, 1e-3, **settings)
    for _ in range(steps):
        steps_of.zero_grad()
        loss().backward()
        steps_of.step()


def scaled(scaler, loss=lambda y: y.float().square().mean(), times=10.0, steps=4):
    """A loop with a scaler, whose first scale is too high."""
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        with nc.autocast("cpu", torch.float16):
            y = model(times * torch.randn(4, 8))
        scaler.scale(loss(y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


# -- limits under a mask -----------------------------------------------------------------------------------------------


@sound
def log_under_where():
    return torch.where(CAUSAL, 0.0, torch.log((~CAUSAL).float()) * 2)


@sound
def log_of_a_mask_added_to_scores():
    return (torch.randn(8, 8) + torch.log((~CAUSAL).float())).softmax(-1)


@sound
def log_of_a_mask_that_stays():
    mask = torch.log((~CAUSAL).float())
    return (torch.randn(8, 8) + mask).softmax(-1), mask


@sound
def exp_of_log():
    return torch.exp(torch.log(torch.zeros(3)) * 2)


@sound
def nan_to_num_of_log():
    return torch.nan_to_num(torch.log(torch.zeros(3)) * 2)


def t5_buckets(choose):
    r = torch.arange(16)
    far = 8 + (torch.log(r.float() / 8) / 2.7 * 8).to(torch.long)
    far = torch.min(far, torch.full_like(far, 31))
    return choose(r, far)


@sound
def buckets_of_t5():
    return nn.Embedding(32, 4)(t5_buckets(lambda r, far: torch.where(r < 8, r, far)))


@sound
def one_by_zero_under_where():
    x = torch.tensor([0.0, 1.0])
    return torch.where(x > 0, 1 / x, 0.0)


@sound
def means_of_nothing_under_where():
    count, total = torch.tensor([0.0, 2.0]), torch.tensor([0.0, 3.0])
    return torch.where(count > 0, total / count, 0.0), torch.nan_to_num(total / count)


@sound
def degrees_of_a_graph():
    degrees = torch.zeros(4).scatter_add(0, torch.tensor([0, 0, 2]), torch.ones(3))
    inverse = degrees.pow(-0.5)
    inverse[inverse == INF] = 0
    return inverse * degrees.pow(-0.5).masked_fill(degrees == 0, 0.0)


@sound
def signal_to_noise_of_nothing():
    error = torch.zeros(())
    return torch.where(error == 0, torch.tensor(100.0), 10 * torch.log10(1 / error))


@sound
def an_infinity_that_nobody_reads():
    torch.log(torch.zeros(3))


# -- overflows of fp32 that are nothing to their readers ---------------------------------------------------------------


@sound
def clamped_exp():
    return torch.log1p(torch.exp(torch.tensor([1.0, 100.0, 1000.0])).clamp(max=1e4))


@sound
def sigmoids_by_hand():
    x = torch.tensor([-100.0, -1000.0, 1.0])
    return 1 / (1 + torch.exp(-x)), x / (1 + torch.exp(-x)), torch.tanh(x.abs().exp())


# -- masks -------------------------------------------------------------------------------------------------------------


@sound
def alibi():
    q = torch.randn(2, 4, 8, 16, requires_grad=True)
    slopes, places = torch.tensor([2.0**-n for n in range(1, 5)]), torch.arange(8.0)
    bias = slopes[:, None, None] * (places[None] - places[:, None])
    F.scaled_dot_product_attention(q, q, q, attn_mask=bias.masked_fill(CAUSAL, -INF)).sum().backward()


@sound
def causal_scores_in_half():
    q = torch.randn(2, 8, 16).half()
    return (q @ q.mT / 4).masked_fill(CAUSAL, -INF).softmax(-1) @ q


@sound
def the_lowest_value_added_twice():
    mask = torch.zeros(8, 8).half().masked_fill(CAUSAL, torch.finfo(torch.float16).min)
    return (torch.randn(8, 8).half() + mask + mask).softmax(-1)


@sound
def the_lowest_value_of_fp32_in_a_region():
    with nc.autocast("cpu", torch.float16):
        q = torch.randn(2, 8, 16)
        return (q @ q.mT + torch.zeros(8, 8).masked_fill(CAUSAL, torch.finfo(torch.float32).min)).softmax(-1) @ q


@sound
def rows_masked_whole_and_taken_out():
    scores = torch.randn(2, 4, 4)
    scores[0, :2] = -INF
    return torch.nan_to_num(scores.softmax(-1)) @ torch.randn(2, 4, 4)


@sound
def padded_encoder():
    model, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 4, 16)
    padding = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]).bool()
    train(lambda: model(x, src_key_padding_mask=padding).square().mean(), model.parameters())


@sound
def routing_and_sampling():
    gates = torch.randn(6, 4, requires_grad=True)
    values, chosen = gates.topk(2)
    torch.full_like(gates, -INF).scatter(1, chosen, values).softmax(-1).square().sum().backward()
    logits = torch.randn(2, 50)
    return torch.multinomial(logits.masked_fill(logits < logits.topk(5).values[:, -1:], -INF).softmax(-1), 1)


@sound
def running_extremes():
    top, total, best = torch.full((4,), -INF), torch.zeros(4), torch.tensor(INF)
    for _ in range(3):
        scores = torch.randn(4)
        higher = torch.maximum(top, scores)
        total, top = total * torch.exp(top - higher) + torch.exp(scores - higher), higher
        best = torch.minimum(best, scores.min())
    return total, best


# -- losses and norms --------------------------------------------------------------------------------------------------


@sound
def entropies():
    p = torch.tensor([0.0, 1.0])
    by_place = p * p.log()
    by_place[p == 0] = 0
    return torch.where(p > 0, p * p.log(), 0.0).sum(), torch.special.xlogy(p, p), torch.special.entr(p), by_place


@sound
def sums_of_exponentials():
    x = torch.randn(2, 3).masked_fill(torch.tensor([[True] * 3, [False] * 3]), -INF)
    return torch.exp(torch.logsumexp(x, -1)), F.softplus(torch.tensor([-200.0, 2000.0]))


@sound
def labels_that_are_ignored():
    x = torch.randn(4, 5, requires_grad=True)
    F.cross_entropy(x, torch.tensor([1, -100, 2, -100])).backward()
    masked = x.masked_fill(torch.tensor([False, False, False, True, True]), -INF)
    F.cross_entropy(masked, torch.tensor([0, 1, 2, 0])).backward()


@sound
def clamped_logs():
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    torch.log(x.clamp(min=1e-8)).sum().backward()
    F.binary_cross_entropy(x, torch.tensor([0.0, 1.0])).backward()
    return torch.log(torch.zeros(3)).clamp(min=-100)


@sound
def where_inside_and_outside():
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    torch.where(x > 0, torch.where(x > 0, x, 1.0).log(), 0.0).sum().backward()


@sound
def norms_of_zeros():
    x = torch.zeros(2, 8)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), F.normalize(x), x.norm(INF)


@sound
def masked_policies():
    logits = torch.randn(4, 5, requires_grad=True)
    chosen = torch.distributions.Categorical(logits=logits.masked_fill(torch.tensor([0, 0, 0, 0, 1]).bool(), -1e9))
    (-(chosen.log_prob(chosen.sample())) - 0.01 * chosen.entropy()).mean().backward()


@sound
def speech():
    logits = torch.randn(20, 2, 5, requires_grad=True).log_softmax(-1)
    F.ctc_loss(logits, torch.randint(1, 5, (2, 4)), torch.tensor([20, 15]), torch.tensor([4, 3])).backward()


@sound
def averaged_weights():
    model, average = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), nn.Linear(8, 8)

    def loss():
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model[0].parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        return model(torch.randn(2, 8)).square().mean()

    train(loss, model.parameters())


@sound
def scaler_of_torch():
    scaled(torch.amp.GradScaler("cpu", init_scale=2.0**20))


@sound
def scaler_of_narrowcast():
    scaled(nc.Scaler("cpu", init_scale=2.0**20))


@sound
def scaler_that_a_fused_optimizer_asks():
    model, scaler = nn.Linear(8, 8), torch.amp.GradScaler("cpu", init_scale=2.0**24)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        with nc.autocast("cpu", torch.float16):
            y = model(torch.randn(4, 8))
        scaler.scale(y.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


@sound
def scaler_of_sums_that_overflow_in_a_checkpoint_and_a_convolution():
    linear, conv = nn.Linear(8, 8), nn.Conv1d(64, 64, 1)
    for layer in (lambda x: checkpoint(linear, x, use_reentrant=True), conv):
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**24), torch.optim.SGD(conv.parameters(), 1e-3)
        with nc.autocast("cpu", torch.float16):
            y = layer(torch.randn(1, 64, 8, requires_grad=True))
        scaler.scale(y.float().mean()).backward()
        conv.bias.grad = linear.bias.grad.repeat(8)
        scaler.step(optimizer)
        scaler.update()


@sound
def memory_that_is_filled():
    memory = torch.tensor([math.nan, 1.0, math.nan])
    return memory.fill_(-INF).maximum(torch.randn(3)).softmax(-1)


@sound
def a_gate_whose_infinities_nobody_takes():
    scores = torch.randn(8, 8) + torch.log((~CAUSAL).float())
    chosen = scores.topk(2).indices
    return torch.full_like(scores, -INF).scatter(-1, chosen, scores.gather(-1, chosen)).softmax(-1)


@sound
def costs_of_transport():
    u = 0.1 * torch.log(torch.tensor([0.0, 0.5, 0.5]))
    for _ in range(2):
        v = -torch.logsumexp(torch.randn(3, 3) + u[:, None], 0)
        u = u - torch.logsumexp(torch.randn(3, 3) + v[None], 1)
    return torch.exp(u[:, None] + v[None])


@sound
def a_mask_of_fp32_that_is_cast():
    return (torch.randn(8, 8).half() + torch.zeros(8, 8).masked_fill(CAUSAL, torch.finfo().min).half()).softmax(-1)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        p = torch.tensor([0.0, 1.0] * 4)
        scores = torch.log((~CAUSAL).float()) + self.linear(x) @ x.T
        return scores.softmax(-1) @ x + torch.where(p > 0, p * p.log(), 0.0)


@sound
def checkpointed():
    model = Masked()
    for kind in (False, True):
        x = torch.randn(8, 8, requires_grad=True)
        train(lambda x=x, kind=kind: checkpoint(model, x, use_reentrant=kind).square().mean(), model.parameters())


@pytest.mark.parametrize("program", SOUND)
def test_of_a_sound_program_nothing_is_told(program):
    """And none of its values is looked at in vain."""
    with warnings.catch_warnings(), nc.watch() as w:
        warnings.simplefilter("ignore")
        kept = SOUND[program]()
    assert not w.findings and not w.notes, (w, kept)


# -- what comes to something -------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """One logarithm of zero behind four layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.log(x.relu() * 1.0).mean()


@faulty("aten.log.default")
def a_log_of_zero_that_is_trained_on():
    model = Deep()
    train(lambda: model(torch.randn(4, 8)), model.parameters(), 3)


@faulty("aten.sqrt.default")
def nan_in_weights_moments_and_averages():
    model, average = nn.Linear(8, 8), nn.Linear(8, 8)

    def loss():
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        return torch.sqrt(model(torch.randn(2, 8)) - 9).mean() + average(torch.randn(2, 8)).mean()

    for each in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        train(loss, model.parameters(), 2, **each)


@faulty("aten.log.default")
def a_checkpointed_log():
    model = Deep()
    checkpoint(model, torch.randn(4, 8), use_reentrant=False).backward()


@faulty("aten.log.default")
def a_log_of_zero_alive_at_the_end():
    return torch.log(torch.zeros(3)) * 2


@faulty("aten.log.default")
def through_copies_clones_views_and_casts():
    x, y = torch.log(torch.zeros(3)), torch.empty(3)
    y.copy_(x)
    z = y.clone().view(3, 1).to(torch.bfloat16).float()
    return z - z


@faulty("aten.log.default")
def the_wrong_side_of_the_buckets():
    return t5_buckets(lambda r, far: torch.where(r < 8, far, r))


@faulty("aten.div.Tensor", direction="backward")
def the_backward_of_a_where():
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    torch.where(x > 0, x.log(), 0.0).sum().backward()
    return x.grad


@faulty("aten._softmax.default")
def a_row_masked_whole():
    return torch.zeros(4, 4).masked_fill(CAUSAL[:4, :4] | True, -INF).softmax(-1) @ torch.randn(4, 4)


@faulty("aten.baddbmm.default", "format")
def an_overflow_beside_a_mask():
    mask = torch.zeros(1, 64, 64).masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -INF).half()
    return (
        torch.baddbmm(mask, 100 * torch.randn(1, 64, 8).half(), 100 * torch.randn(1, 8, 64).half())
        .softmax(-1)
        .nan_to_num()
    )


@faulty("aten.bmm.default", "cast")
def a_cast_beside_a_mask():
    with nc.autocast("cpu", torch.float16):
        return torch.bmm(torch.tensor([[[-INF, 1e6], [1.0, 1.0]]]), torch.ones(1, 2, 2)).clamp(-1, 1)


@faulty("aten.mul.Tensor", "format")
def half_overflows_and_is_clamped():
    (torch.full((4,), 300.0).half() * 300).clamp(max=100)


@faulty("aten.pow.Tensor_Scalar", "format")
def fp32_overflows_and_its_reader_differs():
    x = torch.full((2, 8), 1e20)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True))


@faulty("aten.linear.default", "format")
def what_layers_keep_of_an_overflow_for_their_backward():
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    with torch.no_grad():
        layers[0].weight.mul_(1e5)
    x = torch.randn(4, 8)
    with nc.autocast("cpu", torch.float16):
        for layer in layers:
            x = x + layer(F.layer_norm(x, (8,)))
    x.square().mean().backward()


@faulty("aten._to_copy.default", "cast", "backward")
def an_unscaled_backward_overflows():
    model, optimizer = nn.Linear(8, 8), None
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with nc.autocast("cpu", torch.float16):
        y = model(torch.randn(4, 8))
    (y.float() * 1e6).sum().backward()
    optimizer.step()


@faulty("aten.sqrt.default")
def nan_that_no_scale_mends():
    scaled(torch.amp.GradScaler("cpu"), lambda y: torch.sqrt(y.float() - 999).mean(), steps=2)


@faulty("aten.log.default")
def a_nan_that_nobody_reads():
    torch.log(torch.tensor(-1.0))


@pytest.mark.parametrize("program", FAULTY)
def test_a_fault_is_told_once_at_the_call_that_made_it(program):
    """Whatever passes it on is counted."""
    run, *expected, times = FAULTY[program]
    with nc.watch() as w:
        kept = run()
    assert w.first is not None, kept
    assert [w.first.id.op, w.first.made_by, w.first.id.direction] == expected, w
    assert len(w.findings) == times and w.first.file == __file__ and not w.notes, w


@pytest.mark.parametrize(
    ("dtype", "start", "write"),
    [
        (torch.float32, 3e38, lambda t: t.mul_(2.0)),
        (torch.float32, 1e20, lambda t: t.mul_(t.clone())),
        (torch.float32, 1e20, lambda t: t.addcmul_(t, t)),
        (torch.float32, 3e38, lambda t: t.add_(t.clone(), alpha=2)),
        (torch.float32, 3e38, lambda t: t.lerp_(-t, 9.0)),
        (torch.float32, 1e-30, lambda t: t.mul_(1e38).mul_(1e32)),
        (torch.float16, 300.0, lambda t: t.mul_(t.clone())),
        (torch.float16, 60000.0, lambda t: t.add_(9000.0)),
    ],
)
def test_what_overflows_in_place_is_told_with_what_was_there(dtype, start, write):
    """Copies of what is written to are kept where the bounds of arguments do not show that results are finite."""
    t = torch.full((300,), start, dtype=dtype)
    with nc.watch() as w:
        write(t.mul_(1.0))
        t.sub(1.0).sum().item()
    assert [(f.what, f.made_by) for f in w.findings] == [("infinity", "format")], w
    assert [facts.infinite for _, facts in w.first.inputs] == [0.0] * len(w.first.inputs), w.first.inputs


def test_a_scale_that_is_too_high_is_said_once_a_step():
    """Until the scaler has found one that fits."""
    with nc.watch() as w:
        scaled(torch.amp.GradScaler("cpu", init_scale=2.0**20), steps=3)
    [(why, times)] = w.intentional.items()
    assert why == "the scale is too high, the scaler skips this step" and times == 3
    text = " ".join(str(w).split())
    assert "VERDICT: No NaN or infinity was made except in steps that the scaler skipped" in text
    assert "skipped steps 3 by a scaler" in text and "nc.check_training(step) says which" in text


def test_an_optimizer_that_steps_beside_one_that_is_skipped_tells_nothing_of_it():
    """One scaler for two: what overflows in the gradients of the second is thrown away after the first has stepped."""
    first, second, scaler = nn.Linear(4, 4), nn.Linear(4, 4), torch.amp.GradScaler("cpu", init_scale=2.0**15)
    optimizers = [torch.optim.SGD(model.parameters(), 1e-4) for model in (first, second)]
    x = torch.ones(64, 4)
    with nc.watch() as w:
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = 1e-3 * first(x).sum() + 4 * second(x).sum()
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    assert not w.findings and list(w.intentional) == ["the scale is too high, the scaler skips this step"], w


def test_what_rounding_has_made_is_said_with_the_rule_that_mends_it():
    """Of a cosine that bf16 rounds beyond one, and of a square that is zero in fp16."""
    a = F.normalize(torch.randn(200, 8), dim=-1)

    def angles(policy):
        with nc.watch() as w, nc.autocast("cpu", torch.bfloat16, policy=policy):
            kept = torch.acos(torch.mm(a, -a.T).float() * 1.0)
        return w.first, kept

    found, _ = angles("native")
    assert not found.rules, found  # fp32 rounds as many of them beyond one
    a = a * (1 - 1e-6)
    found, _ = angles("native")
    assert [str(rule) for rule in found.rules] == ["aten.mm.default: full"], found
    exact = nc.Policy.native().with_rules(nc.Rule("aten.mm.default", "full"))
    assert angles(exact)[0] is None
    with nc.watch() as w, nc.autocast("cpu", torch.float16):
        h = torch.randn(4, 8).half() * 1e-4
        kept = h / h.square().mean(-1, keepdim=True).sqrt()
    assert [rule.op for rule in w.first.rules] == ["aten.pow.Tensor_Scalar"], (w, kept)
    rule = nc.Rule("aten.pow.Tensor_Scalar", "full")
    with nc.watch() as w, nc.autocast("cpu", torch.float16, policy=nc.Policy.native().with_rules(rule)):
        kept = h / h.square().mean(-1, keepdim=True).sqrt()
    assert w.first is None, kept


def test_what_fp32_does_not_mend_either_is_not_said_to_be_finite_with_a_rule():
    """A product of many probabilities leaves fp32's range, too, further on."""
    layer = nn.Linear(8, 8)
    with nc.watch() as w, nc.autocast("cpu", torch.float16):
        torch.sigmoid(layer(torch.randn(2, 200, 8))).cumprod(1).log().mean().backward()
    advice = w.first.todo
    assert advice.startswith("No format of this call fixes it") and "it is finite" not in advice, w.first
    assert "values are finite. Keep what made them" in advice


def test_no_rule_is_advised_where_the_code_asks_for_the_format():
    """A sum with `dtype=torch.float16` overflows by the caller's choice, which no policy can change."""
    with nc.watch() as w, nc.autocast("cpu", torch.float16):
        total = torch.full((64,), 3e3).sum(dtype=torch.float16)
    assert total.isinf() and "asks for fp16 itself" in w.first.advice and not w.first.rules


def test_a_finding_of_a_cast_is_saved_with_its_inputs_before_the_cast(tmp_path):
    """The reproducer loads the fp32 input and casts it itself, since the cast is what overflowed."""
    layer = nn.Linear(8, 8)
    with nc.watch() as w, nc.autocast("cpu", torch.float16):
        layer(torch.full((2, 8), 1e6))
    text = w.first.save(tmp_path).read_text()
    assert "cast(load('tensor0.npy', torch.float32, [2, 8], [8, 1]), torch.float16)" in text


def test_parameters_of_two_models_with_the_same_names_are_told_apart():
    """In what is said of them, and in the history."""
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], 1e-3)
    with nc.watch() as w:
        b(a(torch.randn(2, 8))).sum().backward()
        optimizer.step()
    assert set(w.history[0].gradients) == {"Linear.weight", "Linear.bias", "Linear 2.weight", "Linear 2.bias"}
    b.weight.data[0, 0] = math.nan
    with nc.watch() as w:
        b(a(torch.randn(2, 8)))
    assert "the parameter Linear 2.weight" in w.first.sentence


STEPWISE = (
    "log_under_where", "buckets_of_t5", "scaler_of_torch", "scaler_that_a_fused_optimizer_asks",
    "memory_that_is_filled", "a_gate_whose_infinities_nobody_takes", "costs_of_transport",
    "a_mask_of_fp32_that_is_cast",
)  # fmt: skip


def test_at_the_end_of_a_step_readers_decide_too():
    """A limit under `where` is none to tell, and a logarithm that is trained on is; so is NaN out of what was meant."""
    for program in STEPWISE:
        with nc.watch(at="step") as w:
            kept = SOUND[program]()
        assert not w.findings, (program, w, kept)
    with nc.watch(at="step") as w:
        a_log_of_zero_that_is_trained_on()
    assert [finding.id.op for finding in w.findings] == ["aten.log.default"]
    with nc.watch(at="step") as w:
        a_row_masked_whole()
    assert [finding.id.op for finding in w.findings] == ["aten._softmax.default"]


def quotient():
    """What becomes NaN where both are zero."""
    return torch.tensor([3.0, 0.0]) / torch.tensor([1.0, 0.0])


MADE = {
    "a quotient": quotient,
    "a doubled logarithm": lambda: torch.log(torch.tensor([3.0, -1.0])) * 2,
    "infinity": lambda: 1 / torch.tensor([3.0, 0.0]),
}
ASKED = {
    "isfinite": torch.isfinite,
    "isnan": lambda y: ~(y.isnan() | y.isinf()),
    "the magnitude": lambda y: y.abs() < 1e9,
    "the distance": lambda y: (y - 1).abs() < 5,
    "what is left of it": lambda y: (y - y).eq(0),
    "isnan of what is left": lambda y: ~torch.isnan(y - y),
    "its double": lambda y: (y * 2).isfinite(),
    "how many": lambda y: y[:, None].isfinite().sum(-1) == 1,
    "the program itself": lambda y: torch.tensor([abs(v) < 1e9 for v in y.tolist()]),
}
MASKED = {
    "where": lambda y, keep: torch.where(keep, y, 0.0).sum(),
    "where, of more": lambda y, keep: torch.where(keep, torch.stack([y, y * 2 + 1]), 0.0).sum(),
    "masked_fill": lambda y, keep: y.masked_fill(~keep, 0.0).to(torch.bfloat16).sum(),
    "in place": lambda y, keep: y.masked_fill_(~keep, 0.0).sum(),
    "assigned": lambda y, keep: (y.__setitem__(~keep, 0.0), y.sum()),
    "chosen": lambda y, keep: y[keep].sum(),
    "chosen by number": lambda y, keep: y.gather(0, keep.nonzero().squeeze(-1)).sum(),
    "a part": lambda y, keep: (y[:1] * 2).sum(),
    "numbers": lambda y, keep: sum(float(v) for v, kept in zip(y, keep, strict=True) if kept),
}


@pytest.mark.parametrize("at", ["op", "step"])
def test_no_form_of_a_mask_is_a_fault(at):
    """`isfinite` is computed from a magnitude, which is compared and freed before anything is masked."""
    for (made, make), (asked, ask), (masked, mask) in product(MADE.items(), ASKED.items(), MASKED.items()):
        with nc.watch(at=at) as w:
            y = make()
            keep = ask(y)
            mask(y, keep)
            del y, keep
        assert not w.findings and not w.notes, (made, asked, masked, w)


@faulty("aten.div.Tensor")
def a_score_that_is_nothing_but_compared():
    """A mask is all that remains of it, and NaN is not above the threshold."""
    keep = quotient() * 2 > 0.5
    torch.ones(2)[keep].sum()


@pytest.mark.parametrize("at", ["op", "step"])
def test_a_loss_that_is_asked_about_is_told_though_parts_of_what_made_it_are_used(at):
    """The step is skipped for it; a sum that a mask replaces is no fault."""

    def shares():
        counts = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]])
        return counts / counts.sum(-1, keepdim=True)

    with nc.watch(at=at) as w:
        rows = shares()
        (rows[0] * 2).sum()
        loss = (rows * 2).sum()
        assert not torch.isfinite(loss)
        del rows, loss
    assert [finding.id.op for finding in w.findings] == ["aten.div.Tensor"], str(w)
    with nc.watch(at=at) as w:
        loss = shares().sum()
        torch.where(loss.isfinite(), loss, 0.0).sum()
        del loss
    assert not w.findings, str(w)


LEFT_OUT = {
    "isfinite": lambda loss: bool(torch.isfinite(loss)),
    "isnan": lambda loss: not loss.isnan().any(),
    "item": lambda loss: math.isfinite(loss.item()),
    "itself": lambda loss: bool(loss == loss),
    "detached": lambda loss: bool(loss.detach().isfinite().item()),
}


@pytest.mark.parametrize("ask", LEFT_OUT.values(), ids=LEFT_OUT)
@pytest.mark.parametrize("batches", [4, 3], ids=["others follow", "it is the last"])
def test_a_loss_that_a_loop_leaves_out_is_no_fault_if_others_follow(ask, batches):
    """Of a batch without labels; if nothing follows, the loop has ended with it."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with nc.watch() as w:
        for number in range(batches):
            labels = torch.full((4,), -100 if number == 2 else 1)
            loss = torch.nn.functional.cross_entropy(layer(torch.randn(4, 6)), labels)
            if not ask(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        del loss
    assert len(w.findings) == (batches == 3), str(w)
    assert bool(w.intentional) == (batches == 4), str(w)


@pytest.mark.parametrize("ask", [lambda loss: loss.item(), lambda loss: bool(loss > 1)])
def test_a_measure_that_is_nan_is_told_though_the_training_goes_on(ask):
    """It has no gradient: nothing leaves it out."""
    layer = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with nc.watch() as w:
        for _ in range(3):
            layer(torch.ones(4, 6)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                ask(torch.nn.functional.cross_entropy(layer(torch.ones(4, 6)), torch.full((4,), -100)))
    assert len(w.findings) == 1, str(w)


COMPLEX = torch.tensor([3 + 4j, 0j])


@sound
def a_phase_of_silence_that_is_replaced():
    """0/0 in complex numbers is masked as that of real ones is."""
    phase = COMPLEX / COMPLEX.abs()
    torch.view_as_real(torch.where(COMPLEX.abs() > 0, phase, torch.ones_like(phase))).sum()


@sound
def a_complex_quotient_whose_parts_are_replaced():
    parts = torch.view_as_real(1 / COMPLEX)
    torch.where(parts.isfinite(), parts, 0.0).sum()


@faulty("aten._to_copy.default", "cast")
def an_overflow_through_a_spectrum():
    """The transforms there and back pass it on; a clone and a conjugate of the spectrum, too."""
    spectrum = torch.fft.rfft((torch.randn(2, 16) * 1e5).half().float())
    (torch.fft.irfft(spectrum.clone().conj()) * 2).sum()


@faulty("aten.div.Tensor")
def a_phase_of_silence():
    (COMPLEX / COMPLEX.abs()).abs().sum()


@pytest.mark.parametrize("at", ["op", "step"])
def test_a_clean_watch_keeps_the_largest_magnitude_that_fp16_held(at):
    """Of each step and of the block, forward and backward, as hooks of the program itself see them."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    seen, rows = [], []
    model[0].register_forward_hook(lambda _, __, y: seen.append(float(y.abs().max())))
    model[2].register_forward_hook(lambda _, __, y: seen.append(float(y.abs().max())))
    with nc.watch(at=at) as watching:
        for _ in range(3):
            with nc.autocast("cpu", torch.float16):
                out = model(torch.randn(4, 8) * 20)
            out.float().sum().mul(512).backward()
            optimizer.step()
            optimizer.zero_grad()
            rows.append(max(seen))
            seen.clear()
    assert [row.largest["forward"] for row in watching.history] == rows
    assert watching.largest["forward"].magnitude == max(rows)
    assert watching.largest["backward"].magnitude >= 512 and watching.largest["backward"].call.direction == "backward"
    assert watching.formats["fp16"] and sum(watching.formats.values()) <= watching.calls


@pytest.mark.parametrize("at", ["op", "step"])
@pytest.mark.parametrize("asks", [True, False])
def test_an_optimizer_whose_step_a_scaler_skips_after_that_of_another_tells_nothing(at, asks):
    """One scaler for two: the first steps, and then the second is skipped, whatever the loop asks about gradients."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    scaler, x = torch.amp.GradScaler("cpu", init_scale=2.0**15), torch.ones(64, 4)
    optimizers = [torch.optim.SGD(model.parameters(), 1e-4) for model in (first, second)]
    with nc.watch(at=at) as w:
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = 1e-3 * first(x).sum() + 4 * second(x).sum()
            scaler.scale(loss).backward()
            if asks:
                all(bool(p.grad.isfinite().all()) for p in second.parameters())
            scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert not w.findings and list(w.intentional) == ["the scale is too high, the scaler skips this step"], w
