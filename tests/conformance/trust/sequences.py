"""Sound programs on sequences: experts, recurrent and state space models, speech, and losses of many kinds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from language import RMS, D, Language, T, V, ids, joined, split
from program import Fn, Made, enter, program
from torch import Tensor, nn


def experts(m: Any, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    weight, chosen = m.router(flat).float().softmax(-1).topk(2)
    weight = weight / weight.sum(-1, keepdim=True)
    out = torch.zeros_like(flat)
    for n, expert in enumerate(m.experts):
        rows, column = torch.where(chosen == n)
        if len(rows):
            out = out.index_add(0, rows, (expert(flat[rows]) * weight[rows, column, None]).type_as(out))
    return m.norm(x + out.view_as(x))


def mixture(balanced: bool = False) -> Made:
    """With the loss that balances the experts, or without."""
    parts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D)) for _ in range(4))

    def run(m: Any, x: Tensor) -> Any:
        shares = m.router(x).float().softmax(-1)
        often = F.one_hot(shares.topk(2).indices, 4).float().mean((0, 1, 2))
        return experts(m, x), 4 * (often * shares.mean((0, 1))).sum()

    model = Fn(run if balanced else experts, router=nn.Linear(D, 4, bias=False), experts=parts, norm=RMS())
    return Made(model, (torch.randn(2, T, D),))


enter("mixture", "mixture of experts", mixture)
enter("balanced_mixture", "mixture of experts", lambda: mixture(balanced=True))


@program("mixture of experts")
def soft_mixture_with_balance() -> Made:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = m.router(x).softmax(-1)
        out = torch.einsum("bte,btd,edf->btf", shares, x, m.weight)
        return out, (shares.mean((0, 1)).square().sum() * 4)

    model = Fn(run, router=nn.Linear(D, 4), weight=nn.Parameter(torch.randn(4, D, D) / 6))
    return Made(model, (torch.randn(2, T, D),), lambda o: o[0].float().square().mean() + 0.01 * o[1].float())


@program("state space")
def state_space() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        u, z = m.come(x).chunk(2, -1)
        step = F.softplus(m.step(u)).float()
        decay = torch.exp(-step * m.log_decay.exp())
        b, c, h, out = m.b(u), m.c(u), torch.zeros(2, D, 4), []
        for t in range(x.shape[1]):
            h = decay[:, t, :, None] * h + (step[:, t] * u[:, t].float())[..., None] * b[:, t, None].float()
            out.append((h * c[:, t, None].float()).sum(-1))
        return m.go(torch.stack(out, 1).type_as(z) * F.silu(z))

    model = Fn(run, come=nn.Linear(D, 2 * D), step=nn.Linear(D, D), b=nn.Linear(D, 4), c=nn.Linear(D, 4),
               log_decay=nn.Parameter(torch.zeros(D)), go=nn.Linear(D, D))  # fmt: skip
    return Made(model, (torch.randn(2, T, D),))


@program("state space")
def gated_scan_in_log_space() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        gate, value = m.gate(x), m.value(x)
        keep = F.logsigmoid(-gate).float().cumsum(1)
        new = F.logsigmoid(gate).float() + torch.log(F.softplus(value).float() + 1e-4)
        return m.out((keep + torch.logcumsumexp(new - keep, 1)).exp())

    model = Fn(run, gate=nn.Linear(D, D), value=nn.Linear(D, D), out=nn.Linear(D, D))
    return Made(model, (torch.randn(2, T, D),))


@program("state space")
def linear_attention() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in m.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        seen = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        norm = (q * k.cumsum(2)).sum(-1, keepdim=True).clamp(min=1e-4)
        return m.out(joined(torch.einsum("bhtd,bhtde->bhte", q, seen) / norm))

    return Made(Fn(run, qkv=nn.Linear(D, 3 * D), out=nn.Linear(D, D)), (torch.randn(2, T, D),))


@program("linear attention")
def linear_attention_both_ways() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return (q @ (k.transpose(-1, -2) @ v)) / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)

    return Made(Fn(run, qkv=nn.Linear(D, 3 * D)), (torch.randn(2, T, D),))


@program("recurrent")
def lstm() -> Made:
    model = Fn(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(D, D, batch_first=True), head=nn.Linear(D, 5))
    return Made(model, (torch.randn(2, T, D),))


def recurrent(kind: Any) -> Made:
    """On tokens."""
    rnn = kind(16, 24, batch_first=True)
    model = Fn(lambda m, x: m.head(m.rnn(m.table(x))[0]), table=nn.Embedding(V, 16), rnn=rnn, head=nn.Linear(24, V))
    return Made(model, (ids(2, T),))


def cells(kind: Any) -> Made:
    """A cell of torch's in a loop, and its last state."""

    def run(m: Any, x: Tensor) -> Tensor:
        state = None
        for one in m.table(x).unbind(1):
            state = m.cell(one, state)
        return m.head(state[0] if isinstance(state, tuple) else state)

    return Made(Fn(run, table=nn.Embedding(V, 16), cell=kind(16, 24), head=nn.Linear(24, 4)), (ids(2, T),))


enter("lstm_of_tokens", "recurrent", lambda: recurrent(nn.LSTM))
enter("gru_of_tokens", "recurrent", lambda: recurrent(nn.GRU))
enter("gru_cells", "recurrent", lambda: cells(nn.GRUCell))
enter("lstm_cells", "recurrent", lambda: cells(nn.LSTMCell))


@program("recurrent")
def gru_both_ways() -> Made:
    rnn = nn.GRU(D, 16, bidirectional=True, batch_first=True)
    return Made(Fn(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=rnn, head=nn.Linear(D, 5)), (torch.randn(2, T, D),))


@program("recurrent")
def cell_by_hand() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], D)
        for t in range(x.shape[1]):
            i, f, g, o = (m.x(x[:, t]) + m.h(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return m.head(h)

    return Made(Fn(run, x=nn.Linear(D, 4 * D), h=nn.Linear(D, 4 * D), head=nn.Linear(D, 3)), (torch.randn(3, T, D),))


@program("CTC")
def ctc() -> Made:
    y, n, k = torch.randint(1, 10, (3, 4)), torch.full((3,), T), torch.full((3,), 4)

    def loss(out: Tensor) -> Tensor:
        return F.ctc_loss(out.float().log_softmax(-1).transpose(0, 1), y, n, k, zero_infinity=True)

    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, 10))
    return Made(model, (torch.randn(3, T, D),), loss)


@program("CTC")
def ctc_with_a_target_too_long() -> Made:
    """zero_infinity takes the infinite loss of the one that does not fit."""
    y, n, k = torch.randint(1, 10, (2, 8)), torch.tensor([T, 3]), torch.tensor([4, 8])

    def run(m: Any, x: Tensor) -> Tensor:
        return F.ctc_loss(m.net(x).log_softmax(-1).transpose(0, 1), y, n, k, zero_infinity=True)

    return Made(Fn(run, net=nn.Linear(D, 10)), (torch.randn(2, T, D),))


@program("RNN-T")
def transducer_by_rows() -> Made:
    """The lattice row by row, in fp32."""
    y = torch.randint(1, 12, (2, 5))

    def run(m: Any, x: Tensor) -> Tensor:
        both = torch.tanh(m.x(x)[:, :, None] + m.table(F.pad(y, (1, 0)))[:, None])
        p = m.head(both).float().log_softmax(-1)
        blank, label = p[..., 0], p[:, :, :-1].gather(-1, y[:, None, :, None].expand(-1, x.shape[1], -1, 1))[..., 0]
        row = F.pad(label[:, 0].cumsum(-1), (1, 0))
        for t in range(1, x.shape[1]):
            stay = row + blank[:, t - 1]
            ways = [stay[:, 0]]
            for u in range(1, 6):
                ways.append(torch.logaddexp(stay[:, u], ways[-1] + label[:, t, u - 1]))
            row = torch.stack(ways, 1)
        return -(row[:, -1] + blank[:, -1, -1]).mean()

    model = Fn(run, x=nn.Linear(8, 24), table=nn.Embedding(12, 24), head=nn.Linear(24, 12))
    return Made(model, (torch.randn(2, 10, 8),))


@program("RNN-T")
def transducer() -> Made:
    """The loss as a recursion over the lattice, with -inf at its edge."""
    y = torch.randint(1, 8, (2, 3))

    def run(m: Any, x: Tensor) -> Tensor:
        both = torch.tanh(m.x(x)[:, :, None] + m.y(m.table(F.pad(y, (1, 0))))[:, None])
        p = m.head(both).log_softmax(-1)
        blank, label = p[..., 0], p[:, :, :3].gather(-1, y[:, None, :, None].expand(-1, x.shape[1], -1, 1))[..., 0]
        edge = p.new_full((2,), float("-inf"))
        rows: list[list[Tensor]] = []
        for t in range(x.shape[1]):
            row: list[Tensor] = []
            for u in range(4):
                if not t and not u:
                    row.append(p.new_zeros(2))
                    continue
                up = rows[t - 1][u] + blank[:, t - 1, u] if t else edge
                left = row[u - 1] + label[:, t, u - 1] if u else edge
                row.append(torch.logaddexp(up, left))
            rows.append(row)
        return -(rows[-1][3] + blank[:, -1, 3]).mean()

    model = Fn(run, x=nn.Linear(D, D), y=nn.Linear(D, D), table=nn.Embedding(8, D), head=nn.Linear(D, 8))
    return Made(model, (torch.randn(2, 5, D),))


@program("LoRA")
def lora() -> Made:
    """B is zero, so A's gradient is."""
    base = nn.Linear(D, D).requires_grad_(False)
    run = lambda m, x: m.base(x) + (x @ m.a.T) @ m.b.T * 2.0
    return Made(Fn(run, base=base, a=nn.Parameter(torch.randn(4, D) / 6), b=nn.Parameter(torch.zeros(D, 4))),
                (torch.randn(8, D),))  # fmt: skip


@program("LoRA")
def lora_of_layers() -> Made:
    up = nn.Linear(4, D, bias=False)
    nn.init.zeros_(up.weight)
    base, down = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, 4, bias=False)
    return Made(Fn(lambda m, x: m.base(x) + 2 * m.up(m.down(x)), base=base, down=down, up=up), (torch.randn(8, D),))


@program("chunked losses")
def chunked_cross_entropy() -> Made:
    y = ids(64)

    def run(m: Any, x: Tensor) -> Tensor:
        pairs = zip(m.table(x).chunk(16), y.chunk(16), strict=True)
        return torch.stack([F.cross_entropy(m.head(h), t, label_smoothing=0.1) for h, t in pairs]).mean()

    return Made(Fn(run, table=nn.Embedding(V, D), head=nn.Linear(D, V)), (ids(64),))


@program("chunked losses")
def ignored_labels() -> Made:
    y = torch.where(torch.arange(T) < 7, ids(2, T), -100)
    loss = lambda out: F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)
    return Made(Language(), (ids(2, T),), loss)


@program("distillation")
def distillation() -> Made:
    teacher = nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, V)).requires_grad_(False)

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = (m.teacher(x) / 2).log_softmax(-1)
        return F.kl_div((m.net(x) / 2).log_softmax(-1), wanted, log_target=True, reduction="batchmean") * 4

    return Made(Fn(run, teacher=teacher, net=nn.Linear(D, V)), (torch.randn(16, D),))


@program("RL")
def policy_gradient() -> Made:
    """Actions that are not allowed have -inf; clipped ratio, value, entropy."""
    action, old, gain = torch.randint(0, 4, (16,)), torch.randn(16) * 0.1 - 1.4, torch.randn(16)
    allowed = torch.rand(16, 6) > 0.3
    allowed[:, :4] = True

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.body(x)
        logp = m.policy(h).masked_fill(~allowed, float("-inf")).log_softmax(-1)
        ratio = (logp.gather(-1, action[:, None])[:, 0] - old).exp()
        actor = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy = -(logp.exp() * logp.masked_fill(~allowed, 0.0)).sum(-1).mean()
        return actor + 0.5 * F.mse_loss(m.value(h)[:, 0].float(), gain) - 0.01 * entropy.float()

    body = nn.Sequential(nn.Linear(D, D), nn.Tanh())
    masked = Fn(run, body=body, policy=nn.Linear(D, 6), value=nn.Linear(D, 1))
    return Made(masked, (torch.randn(16, D),))


@program("RL")
def preferences() -> Made:
    """DPO."""
    model, frozen, good, bad = Language(), Language().requires_grad_(False), ids(2, T), ids(2, T)

    def logp(net: Any, x: Tensor) -> Tensor:
        return net(x)[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None])[..., 0].sum(-1)

    def run(m: Any, good: Tensor, bad: Tensor) -> Tensor:
        with torch.no_grad():
            reference = logp(m.frozen, good) - logp(m.frozen, bad)
        return -F.logsigmoid(0.1 * (logp(m.model, good) - logp(m.model, bad) - reference)).mean()

    return Made(Fn(run, model=model, frozen=frozen), (good, bad))


@program("RL")
def clipped_objective() -> Made:
    """By torch's distributions, in fp32 from the logits on."""
    action, old, gain = torch.randint(0, 4, (16,)), torch.full((16,), -1.4), torch.randn(16)

    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.body(x))
        chances = torch.distributions.Categorical(logits=m.act(h).float())
        ratio = torch.exp(chances.log_prob(action) - old)
        best = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return -best + 0.5 * F.mse_loss(m.value(h)[:, 0].float(), gain) - 0.01 * chances.entropy().mean()

    model = Fn(run, body=nn.Linear(8, D), act=nn.Linear(D, 4), value=nn.Linear(D, 1))
    return Made(model, (torch.randn(16, 8),))


@program("RL")
def q_learning() -> Made:
    body, target = (nn.Sequential(nn.Linear(8, D), nn.ReLU(), nn.Linear(D, 4)) for _ in range(2))
    action, reward = torch.randint(0, 4, (16, 1)), torch.randn(16)

    def run(m: Any, x: Tensor, then: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = reward + 0.99 * m.target(then).max(-1).values
        return F.smooth_l1_loss(m.body(x).gather(1, action)[:, 0].float(), wanted.float())

    return Made(Fn(run, body=body, target=target), (torch.randn(16, 8), torch.randn(16, 8)))
