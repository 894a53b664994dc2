"""Sound programs on graphs, molecules, physics, vectors and tables."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from pictures import mlp
from program import Fn, Made, program
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential


@program("flow matching")
def flow_matching() -> Made:
    def run(m: Any, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        at = t * x + (1 - t) * noise
        return F.mse_loss(m.net(torch.cat([at, t], -1)).float(), x - noise)

    return Made(Fn(run, net=mlp(9, 8)), (torch.randn(16, 8), torch.randn(16, 8), torch.rand(16, 1)))


EDGES = (torch.arange(40) % 10, (torch.arange(40) * 7 + 3) % 9)  # node 9 receives nothing


@program("graph network")
def graph_sums() -> Made:
    source, target = EDGES

    def run(m: Any, x: Tensor) -> Tensor:
        message = m.message(torch.cat([x[source], x[target]], -1))
        total = torch.zeros(10, 16, dtype=message.dtype).index_add_(0, target, message)
        count = torch.zeros(10).index_add_(0, target, torch.ones(40)).clamp(min=1)
        h = m.update(torch.cat([x, total / count[:, None]], -1))
        return (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()

    return Made(Fn(run, message=mlp(32, 16), update=mlp(32, 16)), (torch.randn(10, 16),))


@program("graph network")
def graph_attention() -> Made:
    """A softmax over the edges of each node, by scatter; the node without edges keeps -inf."""
    source, target = EDGES

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.value(x)
        score = F.leaky_relu(m.score(torch.cat([h[source], h[target]], -1))[:, 0], 0.2).float()
        largest = torch.full((10,), float("-inf")).scatter_reduce(0, target, score, "amax")
        weight = (score - largest[target]).exp()
        total = torch.zeros(10).scatter_add(0, target, weight)
        out = torch.zeros(10, 16).index_add(0, target, (weight / total[target])[:, None] * h[source].float())
        return m.out(out)

    return Made(Fn(run, value=nn.Linear(16, 16), score=nn.Linear(32, 1), out=nn.Linear(16, 4)), (torch.randn(10, 16),))


@program("graph network")
def graph_normalized_adjacency() -> Made:
    """1/sqrt(degree), whose infinity for a node without edges is masked."""
    a = torch.zeros(10, 10)
    a[EDGES] = 1.0

    def run(m: Any, x: Tensor) -> Tensor:
        degree = a.sum(0).pow(-0.5)
        degree = degree.masked_fill(degree == float("inf"), 0.0)
        adjacent = degree[:, None] * a * degree
        return m.two(adjacent @ F.relu(m.one(adjacent @ x)))

    return Made(Fn(run, one=nn.Linear(16, 16), two=nn.Linear(16, 4)), (torch.randn(10, 16),))


@program("physics with forces")
def energies_and_forces() -> Made:
    """Pairs of atoms within a cutoff; forces by autograd.grad in the forward."""

    def run(m: Any, place: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            place = place.detach().requires_grad_()
            i, j = torch.triu_indices(6, 6, 1)
            r = (place[:, i] - place[:, j]).norm(dim=-1)
            near = torch.where(r < 3, 0.5 * torch.cos(r * torch.pi / 3) + 0.5, 0.0)
            radial = torch.exp(-4 * (r[..., None] - torch.linspace(0.5, 3, 8)).square())
            energy = (m.net(radial)[..., 0].float() * near).sum(-1)
            return energy, -torch.autograd.grad(energy.sum(), place, create_graph=True)[0]

    model = Fn(run, net=mlp(8, 1))
    return Made(model, (torch.randn(3, 6, 3),), lambda o: o[0].square().mean() + o[1].square().mean())


@program("physics with forces")
def equivariant() -> Made:
    """EGNN: places move along differences that are normalised."""

    def run(m: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        d = x[:, None] - x[None]
        far = d.square().sum(-1, keepdim=True)
        both = torch.cat([h[:, None].expand(-1, 6, -1), h[None].expand(6, -1, -1), far], -1)
        e = m.edge(both) * ~torch.eye(6, dtype=torch.bool)[..., None]
        return h + m.node(torch.cat([h, e.sum(1)], -1)), x + (d / (far.sqrt() + 1) * m.move(e)).mean(1)

    model = Fn(run, edge=mlp(17, 8), node=mlp(16, 8), move=mlp(8, 1))
    return Made(
        model, (torch.randn(6, 8), torch.randn(6, 3)), lambda o: o[0].float().square().mean() + o[1].float().sum()
    )


@program("physics with residuals")
def differential_equation() -> Made:
    """A PINN: u'' + u = 0, by two derivatives."""

    def run(m: Any, t: Tensor) -> Tensor:
        with torch.enable_grad():
            t = t.detach().requires_grad_()
            u = m.net(t).float()
            (first,) = torch.autograd.grad(u.sum(), t, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), t, create_graph=True)
            return (second + u).square().mean() + (u[0] - 1).square().sum()

    return Made(Fn(run, net=mlp(1, 1, act=nn.Tanh)), (torch.linspace(0, 1, 16)[:, None],))


@program("metric learning")
def contrastive() -> Made:
    """CLIP's, with an exponentiated temperature."""

    def run(m: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(m.a(a), dim=-1), F.normalize(m.b(b), dim=-1)
        scores = m.heat.exp() * a @ b.T
        y = torch.arange(8)
        return (F.cross_entropy(scores, y) + F.cross_entropy(scores.T, y)) / 2

    model = Fn(run, a=mlp(16, 16), b=mlp(16, 16), heat=nn.Parameter(torch.tensor(2.6)))
    return Made(model, (torch.randn(8, 16), torch.randn(8, 16)))


@program("metric learning")
def triplets() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        e = F.normalize(m.net(x), dim=-1)
        apart = torch.cdist(e.float(), e.float())
        same = torch.arange(8)[:, None] % 4 == torch.arange(8) % 4
        hard = apart.masked_fill(~same, -1.0).amax(1) - apart.masked_fill(same, float("inf")).amin(1)
        return F.relu(hard + 0.3).mean()

    return Made(Fn(run, net=mlp(16, 16)), (torch.randn(8, 16),))


@program("metric learning")
def supervised_contrastive() -> Made:
    """Its diagonal is -inf before the log-softmax, and masked after."""
    own = torch.eye(8, dtype=torch.bool)
    same = (torch.arange(8)[:, None] % 4 == torch.arange(8) % 4) & ~own

    def run(m: Any, x: Tensor) -> Tensor:
        e = F.normalize(m.net(x), dim=-1)
        logp = (e @ e.T / 0.1).masked_fill(own, float("-inf")).log_softmax(-1)
        return -logp.masked_fill(~same, 0.0).sum(1).div(same.sum(1)).mean()

    return Made(Fn(run, net=mlp(16, 16)), (torch.randn(8, 16),))


@program("VAE")
def vae() -> Made:
    noise = torch.randn(8, 4)

    def run(m: Any, x: Tensor) -> Tensor:
        mean, log_var = m.come(x).chunk(2, -1)
        out = m.go(mean + noise * (0.5 * log_var).exp())
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(out.float(), x.sigmoid()) + 0.1 * kl.float()

    return Made(Fn(run, come=mlp(16, 8), go=mlp(4, 16)), (torch.randn(8, 16),))


@program("VAE")
def vector_quantised() -> Made:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = m.come(x).float()
        far = h.square().sum(-1, keepdim=True) - 2 * h @ m.book.weight.T + m.book.weight.square().sum(-1)
        code = m.book(far.argmin(-1))
        out = m.go(h + (code - h).detach())
        return out, F.mse_loss(code, h.detach()) + 0.25 * F.mse_loss(h, code.detach())

    model = Fn(run, come=mlp(16, 8), book=nn.Embedding(32, 8), go=mlp(8, 16))
    return Made(model, (torch.randn(8, 16),), lambda o: o[0].float().square().mean() + o[1])


@program("mixture density")
def mixture_density() -> Made:
    y = torch.randn(16, 1)

    def run(m: Any, x: Tensor) -> Tensor:
        weight, mean, scale = m.net(x).float().chunk(3, -1)
        logp = torch.distributions.Normal(mean, F.softplus(scale) + 1e-3, validate_args=False).log_prob(y)
        return -torch.logsumexp(weight.log_softmax(-1) + logp, -1).mean()

    return Made(Fn(run, net=mlp(8, 15)), (torch.randn(16, 8),))


@program("EMA")
def teacher_and_average() -> Made:
    student = mlp(16, 8)
    teacher = copy.deepcopy(student).requires_grad_(False)

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = (m.teacher(x) / 0.04).softmax(-1)
        return -(wanted * (m.student(x + 0.01) / 0.1).log_softmax(-1)).sum(-1).mean()

    return Made(Fn(run, student=student, teacher=teacher), (torch.randn(8, 16),))


@program("checkpointing")
def checkpointed_stages() -> Made:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(4)))
    run = lambda m, x: checkpoint_sequential(m.net, 2, x, use_reentrant=False)
    return Made(Fn(run, net=net), (torch.randn(8, 16),))


@program("recommender")
def factorisation() -> Made:
    at, wanted = torch.randint(0, 30, (16, 5)), (torch.rand(16) > 0.5).float()

    def run(m: Any, x: Tensor) -> Tensor:
        e = m.table(at)
        pairs = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(-1)
        return F.binary_cross_entropy_with_logits(pairs + m.deep(torch.cat([e.flatten(1), x], 1))[:, 0].float(), wanted)

    return Made(Fn(run, table=nn.Embedding(30, 8), deep=mlp(44, 1)), (torch.randn(16, 4),))


@program("recommender")
def embedding_bag() -> Made:
    at, starts = torch.randint(0, 30, (40,)), torch.arange(0, 40, 5)
    model = Fn(lambda m, x: m.top(torch.cat([m.bag(at, starts), m.low(x)], 1)), bag=nn.EmbeddingBag(30, 8, mode="sum"),
               low=nn.Linear(4, 8), top=mlp(16, 1))  # fmt: skip
    return Made(model, (torch.randn(8, 4),))


@program("neural fields")
def radiance() -> Made:
    """Rays: exclusive cumulative products of what passes."""

    def run(m: Any, x: Tensor) -> Tensor:
        wave = (x[..., None] * 2.0 ** torch.arange(4)).flatten(-2)
        density, colour = m.net(torch.cat([wave.sin(), wave.cos()], -1)).split([1, 3], -1)
        alpha = 1 - torch.exp(-F.softplus(density[..., 0]) * 0.1)
        passes = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return ((alpha * passes)[..., None] * colour.sigmoid()).sum(1)

    return Made(Fn(run, net=mlp(24, 4)), (torch.randn(6, 8, 3),))


@program("operators")
def fourier_layer() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        f = torch.fft.rfft(x.float())[..., :6]
        return F.gelu(torch.fft.irfft(torch.einsum("bcf,cdf->bdf", f, m.weight), x.shape[-1]) + m.skip(x))

    weight = nn.Parameter(torch.randn(4, 4, 6, dtype=torch.cfloat) / 4)
    return Made(Fn(run, weight=weight, skip=nn.Conv1d(4, 4, 1)), (torch.randn(2, 4, 32),))


@program("optimal transport")
def sinkhorn() -> Made:
    def run(m: Any, a: Tensor, b: Tensor) -> Tensor:
        cost = torch.cdist(m.net(a).float(), m.net(b).float())
        p = -cost / 0.5
        for _ in range(4):
            p = p - p.logsumexp(1, keepdim=True)
            p = p - p.logsumexp(0, keepdim=True)
        return (p.exp() * cost).sum()

    return Made(Fn(run, net=mlp(8, 8)), (torch.randn(6, 8), torch.randn(6, 8)))


@program("metric learning")
def margins_of_torch() -> Made:
    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(m.body(x), dim=-1), F.normalize(m.body(y), dim=-1)
        return F.triplet_margin_loss(a, b, b.roll(1, 0), 0.5)

    return Made(Fn(run, body=mlp(32, 16, 64, nn.GELU)), (torch.randn(16, 32), torch.randn(16, 32)))


@program("normalizing flow")
def coupling() -> Made:
    """With the logarithm of its determinant."""

    def run(m: Any, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        scale, shift = m.body(a).float().chunk(2, -1)
        scale = torch.tanh(scale)
        z = torch.cat([a, b * scale.exp() + shift], -1)
        return (0.5 * z.square().sum(-1) - scale.sum(-1)).mean()

    return Made(Fn(run, body=mlp(8, 16, act=nn.ReLU)), (torch.randn(16, 16),))


@program("recommender")
def bags_of_clicks() -> Made:
    at = torch.randint(0, 50, (8, 5))

    def run(m: Any, x: Tensor) -> Tensor:
        rows = torch.stack([m.bag(at), m.dense(x)], 1)
        return m.head((rows @ rows.transpose(1, 2))[:, 0])

    parts = {"bag": nn.EmbeddingBag(50, 16, mode="mean"), "dense": nn.Linear(8, 16), "head": nn.Linear(2, 1)}
    return Made(Fn(run, **parts), (torch.randn(8, 8),))


RING = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 4], [1, 2, 3, 4, 5, 6, 7, 0, 4, 6, 1]])


@program("graph network")
def messages_on_a_ring() -> Made:
    source, target = RING

    def run(m: Any, x: Tensor) -> Tensor:
        sent = F.relu(m.message(torch.cat([x[source], x[target]], -1)))
        total = torch.zeros(len(x), 16, dtype=sent.dtype).scatter_add_(0, target[:, None].expand(-1, 16), sent)
        y = m.update(torch.cat([x.to(total.dtype), total], -1))
        return (y - y.mean(0)) / (y.var(0, unbiased=False) + 1e-5).sqrt()

    return Made(Fn(run, message=nn.Linear(32, 16), update=nn.Linear(32, 16)), (torch.randn(8, 16),))


@program("graph network")
def edge_softmax() -> Made:
    source, target = RING

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.project(x)
        scores = F.leaky_relu(m.score(torch.cat([y[source], y[target]], -1)))[:, 0].float()
        highest = torch.full((len(x),), float("-inf")).scatter_reduce(0, target, scores.detach(), "amax")
        weights = torch.exp(scores - highest[target])
        weights = weights / torch.zeros(len(x)).index_add(0, target, weights)[target].clamp(min=1e-9)
        return torch.zeros(len(x), 16).index_add(0, target, weights[:, None] * y[source].float())

    return Made(Fn(run, project=nn.Linear(16, 16), score=nn.Linear(32, 1)), (torch.randn(8, 16),))


@program("physics with forces")
def energy_of_shells() -> Made:
    far_from_itself = 1 - torch.eye(6)

    def run(m: Any, place: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            place = place.detach().requires_grad_()
            far = ((place[:, None] - place[None]).square().sum(-1) + torch.eye(6)).sqrt()
            shells = torch.exp(-(far[..., None] - torch.linspace(0.5, 4, 8)).square())
            energy = (m.body(shells)[..., 0] * far_from_itself).sum()
            return energy, -torch.autograd.grad(energy.float(), place, create_graph=True)[0]

    return Made(Fn(run, body=mlp(8, 1)), (torch.randn(6, 3) * 2,))


@program("log-determinants")
def pairs_and_a_determinant() -> Made:
    """An instance norm, a loss of pairs, a sum of logarithms that cancels."""

    def run(m: Any, x: Tensor) -> Tensor:
        flat = F.normalize(m.linear(F.instance_norm(x).flatten(1)), dim=-1)
        scores = flat @ flat.T / 0.1
        loss = F.cross_entropy(scores, torch.arange(len(x)))
        return loss + torch.linalg.slogdet(scores.float() + 20 * torch.eye(len(x)))[1]

    return Made(Fn(run, linear=nn.Linear(768, 8)), (torch.randn(2, 3, 16, 16),))
