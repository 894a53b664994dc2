"""Sound programs on images, sound, graphs, molecules and vectors."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from program import Fn, Made, program
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential


def conv(i: int, o: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(i, o, 3, padding=1, **options)


def mlp(i: int, o: int, width: int = 32, act: Any = nn.SiLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(i, width), act(), nn.Linear(width, o))


def labels(n: int, of: int) -> Any:
    y = torch.randint(0, of, (n,))
    return lambda out: F.cross_entropy(out.float(), y)


@program("CNN")
def cnn_batch_norm() -> Made:
    first = [conv(3, 8, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    then = [conv(8, 16), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*first, *then, nn.Linear(16, 5))
    return Made(model, (torch.randn(4, 3, 12, 12),), labels(4, 5))


@program("CNN")
def cnn_in_evaluation() -> Made:
    return Made(cnn_batch_norm().model.eval(), (torch.randn(4, 3, 12, 12),), labels(4, 5))


@program("CNN")
def depthwise_and_squeeze() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        h = F.hardswish(m.norm(m.deep(m.up(x))))
        h = h * m.gate(h.mean((2, 3), keepdim=True)).sigmoid()
        return x + m.down(h)

    model = Fn(run, up=nn.Conv2d(8, 16, 1), deep=conv(16, 16, groups=16), norm=nn.GroupNorm(4, 16),
               gate=nn.Conv2d(16, 16, 1), down=nn.Conv2d(16, 8, 1))  # fmt: skip
    return Made(model, (torch.randn(2, 8, 10, 10),))


@program("CNN")
def vision_transformer() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([m.token.expand(x.shape[0], -1, -1), h], 1) + m.place
        return m.head(m.encoder(h)[:, 0])

    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    model = Fn(run, patches=nn.Conv2d(3, 32, 4, 4), token=nn.Parameter(torch.zeros(1, 1, 32)),
               place=nn.Parameter(torch.randn(1, 10, 32) * 0.02), head=nn.Linear(32, 5),
               encoder=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))  # fmt: skip
    return Made(model, (torch.randn(2, 3, 12, 12),), labels(2, 5))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8), conv(8, 16), conv(16, 8)
        self.up, self.out, self.norm = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, 3, 1), nn.GroupNorm(4, 16)
        self.time = mlp(8, 16)

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:
        a = F.silu(self.a(x))
        b = F.silu(self.norm(self.b(F.avg_pool2d(a, 2))))
        if t is not None:
            angle = t[:, None] * torch.exp(-torch.arange(4) * 2.3)
            b = b + self.time(torch.cat([angle.sin(), angle.cos()], -1))[..., None, None]
        return self.out(F.silu(self.c(torch.cat([a, self.up(b)], 1))))


@program("U-Net")
def unet_with_dice() -> Made:
    y = (torch.rand(2, 3, 12, 12) > 0.5).float()

    def loss(out: Tensor) -> Tensor:
        p = out.float().sigmoid()
        dice = 1 - (2 * (p * y).sum((2, 3)) + 1) / (p.sum((2, 3)) + y.sum((2, 3)) + 1)
        return dice.mean() + F.binary_cross_entropy_with_logits(out.float(), y)

    return Made(UNet(), (torch.randn(2, 3, 12, 12),), loss)


@program("U-Net")
def unet_interpolated() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        h = F.relu(m.norm(m.a(F.interpolate(x, scale_factor=0.5, mode="bilinear"))))
        return m.b(F.interpolate(h, size=x.shape[-2:], mode="nearest")) + x

    return Made(Fn(run, a=conv(3, 8), b=conv(8, 3), norm=nn.InstanceNorm2d(8)), (torch.randn(2, 3, 12, 12),))


@program("diffusion")
def diffusion_loss() -> Made:
    t, noise = torch.rand(3), torch.randn(3, 3, 12, 12)

    def run(m: Any, x: Tensor) -> Tensor:
        alpha = torch.cos(t * 1.5)[:, None, None, None]
        seen = alpha * x + (1 - alpha.square()).sqrt() * noise
        weight = (alpha.square() / (1 - alpha.square())).clamp(max=5)
        return (weight * (m.net(seen, t * 100).float() - noise).square()).mean()

    return Made(Fn(run, net=UNet()), (torch.randn(3, 3, 12, 12),))


@program("diffusion", trains=False)
def diffusion_sampled() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        for t in (0.8, 0.5, 0.2):
            x = x - 0.1 * m.net(x, torch.full((2,), t * 100))
        return x

    return Made(Fn(run, net=UNet()), (torch.randn(2, 3, 12, 12),))


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


@program("detection")
def boxes() -> Made:
    """Focal loss and generalised IoU, on log sizes."""
    y, wanted = (torch.rand(12, 4) > 0.8).float(), torch.rand(12, 4).sort(-1).values

    def run(m: Any, x: Tensor) -> Tensor:
        logits, box = m.kind(x), m.box(x).float()
        p = logits.sigmoid()
        cross = F.binary_cross_entropy_with_logits(logits.float(), y, reduction="none")
        focal = (cross * (y * (1 - p) + (1 - y) * p).square()).sum() / 12
        size = box[:, 2:].clamp(max=4).exp()
        low, high = box[:, :2] - size / 2, box[:, :2] + size / 2
        met = (torch.minimum(high, wanted[:, 2:]) - torch.maximum(low, wanted[:, :2])).clamp(min=0).prod(-1)
        all_of = size.prod(-1) + (wanted[:, 2:] - wanted[:, :2]).prod(-1) - met
        return focal + (1 - met / (all_of + 1e-7)).mean()

    return Made(Fn(run, kind=nn.Linear(16, 4), box=nn.Linear(16, 4)), (torch.randn(12, 16),))


@program("detection")
def queries() -> Made:
    """DETR's expanded queries, sines of places, inverse sigmoid."""

    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        memory = m.patches(x).flatten(2).transpose(1, 2)
        q = m.queries[None].expand(x.shape[0], -1, -1)
        q = m.norm(q + m.cross(q, memory, memory)[0])
        start = m.start.sigmoid().clamp(1e-5, 1 - 1e-5)
        return m.kind(q), (m.box(q) + torch.log(start / (1 - start))).sigmoid()

    model = Fn(run, patches=nn.Conv2d(3, 32, 4, 4), queries=nn.Parameter(torch.randn(6, 32)), norm=nn.LayerNorm(32),
               start=nn.Parameter(torch.randn(6, 4)), cross=nn.MultiheadAttention(32, 4, batch_first=True),
               kind=nn.Linear(32, 5), box=nn.Linear(32, 4))  # fmt: skip
    return Made(model, (torch.randn(2, 3, 12, 12),), lambda o: o[0].float().square().mean() + o[1].float().mean())


@program("audio codec")
def codec() -> Made:
    """Down, a residual quantiser with a straight-through gradient, up; snake."""

    def snake(x: Tensor) -> Tensor:
        return x + x.sin().square() / (1 + 1e-9)

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.deep(snake(m.down(x)))
        rest, given = h, torch.zeros_like(h)
        for book in m.books:
            near = torch.cdist(rest.transpose(1, 2).float(), book.weight[None].expand(2, -1, -1)).argmin(-1)
            code = book(near).transpose(1, 2).type_as(h)
            given, rest = given + code, rest - code
        h = h + (given - h).detach()
        return torch.tanh(m.up(snake(h)))

    books = nn.ModuleList(nn.Embedding(16, 16) for _ in range(2))
    model = Fn(run, down=nn.Conv1d(1, 16, 8, 4, 2), deep=nn.Conv1d(16, 16, 3, padding=1), books=books,
               up=nn.ConvTranspose1d(16, 1, 8, 4, 2))  # fmt: skip
    return Made(model, (torch.randn(2, 1, 128),))


@program("audio codec")
def spectrogram_loss() -> Made:
    def log_spectrum(x: Tensor) -> Tensor:
        return torch.log(torch.stft(x.float(), 32, 8, window=torch.hann_window(32), return_complex=True).abs() + 1e-3)

    x = torch.randn(2, 256)
    model = nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 8, 9, padding=4), nn.ELU(),
                          nn.Conv1d(8, 1, 9, padding=4), nn.Flatten())  # fmt: skip
    return Made(model, (x,), lambda out: (log_spectrum(out) - log_spectrum(x)).abs().mean())


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


@program("GAN")
def gan_generator() -> Made:
    def run(m: Any, z: Tensor) -> Tensor:
        return F.softplus(-m.judge(m.maker(z))).mean()

    maker = nn.Sequential(nn.Linear(8, 64), nn.Unflatten(1, (4, 4, 4)), nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.Tanh())
    judge = nn.Sequential(conv(3, 8, stride=2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1)).requires_grad_(
        False
    )
    return Made(Fn(run, maker=maker, judge=judge), (torch.randn(4, 8),))


@program("GAN")
def gan_judge_twice() -> Made:
    judge = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 32)), nn.LeakyReLU(0.2), nn.Linear(32, 1)
    )

    def run(m: Any, real: Tensor, made: Tensor) -> Tensor:
        return F.relu(1 - m.judge(real)).mean() + F.relu(1 + m.judge(made)).mean()

    return Made(Fn(run, judge=judge.eval()), (torch.randn(8, 16), torch.randn(8, 16)))


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
