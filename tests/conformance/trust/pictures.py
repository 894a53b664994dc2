"""Sound programs on pictures and sound."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from program import Fn, Made, enter, program
from torch import Tensor, nn


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


def block(i: int, o: int, stride: int = 1, kind: Any = nn.Conv2d, norm: Any = nn.BatchNorm2d) -> nn.Sequential:
    return nn.Sequential(kind(i, o, 3, stride, 1, bias=False), norm(o), nn.ReLU())


def residual(trains: bool) -> Made:
    """With a branch beside the convolutions."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.into(x)
        return m.head(F.relu(h + m.second(m.first(h))).mean((2, 3)))

    model = Fn(run, into=block(3, 16, 2), first=block(16, 16), second=conv(16, 16), head=nn.Linear(16, 10))
    return Made(model.train(trains), (torch.rand(2, 3, 24, 24),))


enter("residual", "CNN", lambda: residual(True))
enter("residual_eval", "CNN", lambda: residual(False))


@program("CNN")
def depthwise() -> Made:
    model = nn.Sequential(nn.Conv2d(3, 24, 1), nn.Conv2d(24, 24, 3, groups=24), nn.Hardswish())
    return Made(model, (torch.rand(2, 3, 32, 32),))


@program("CNN")
def three_dimensions() -> Made:
    return Made(block(2, 8, 1, nn.Conv3d, nn.BatchNorm3d), (torch.rand(2, 2, 8, 8, 8),))


@program("diffusion")
def loss_of_the_noise() -> Made:
    kept, t = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0), torch.tensor([3, 70])
    noise = torch.randn(2, 3, 16, 16)

    def run(m: Any, x: Tensor) -> Tensor:
        share = kept[t][:, None, None, None]
        return F.mse_loss(m.unet(share.sqrt() * x + (1 - share).sqrt() * noise, t.float()), noise)

    return Made(Fn(run, unet=UNet()), (torch.rand(2, 3, 16, 16),))


@program("diffusion", trains=False)
def sampling_with_guidance() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        for t in (90.0, 60.0, 30.0):
            noise, plain = m.unet(x, torch.full((2,), t)), m.unet(x)
            x = x - 0.1 * (plain + 2 * (noise - plain))
        return x

    return Made(Fn(run, unet=UNet()).eval(), (torch.randn(2, 3, 16, 16),))


@program("detection")
def cells_of_a_picture() -> Made:
    """Boxes and classes of each cell, with the overlap and the focal loss."""
    corners = torch.cat([torch.rand(2, 36, 2) / 2, 0.5 + torch.rand(2, 36, 2) / 2], -1)
    wanted = torch.randint(0, 2, (2, 5, 36)).float()

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.body(x)
        box, y = m.boxes(h).flatten(2).transpose(1, 2).float().sigmoid(), m.kinds(h).flatten(2)
        low, high = box[..., :2], box[..., :2] + box[..., 2:]
        wide = (torch.minimum(high, corners[..., 2:]) - torch.maximum(low, corners[..., :2])).clamp(min=0)
        both, whole = wide.prod(-1), box[..., 2:].prod(-1) + (corners[..., 2:] - corners[..., :2]).prod(-1)
        entropy = F.binary_cross_entropy_with_logits(y, wanted, reduction="none")
        focal = ((1 - torch.exp(-entropy)).square() * entropy).mean()
        return (1 - both / (whole - both).clamp(min=1e-6)).mean() + focal

    model = Fn(run, body=block(3, 16, 4), boxes=nn.Conv2d(16, 4, 1), kinds=nn.Conv2d(16, 5, 1))
    return Made(model, (torch.rand(2, 3, 24, 24),))


@program("detection")
def queries_of_torch() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        seen = m.body(x).flatten(2).transpose(1, 2)
        return m.box(m.layer(m.rows.weight[None].expand(len(x), -1, -1), seen)).sigmoid()

    layer = nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True)
    model = Fn(run, body=nn.Conv2d(3, 32, 8, 8), rows=nn.Embedding(6, 32), layer=layer, box=nn.Linear(32, 4))
    return Made(model, (torch.rand(2, 3, 32, 32),))


@program("audio codec")
def straight_through() -> Made:
    """The nearest row of a codebook, and the losses of both."""

    def run(m: Any, x: Tensor) -> Tensor:
        z = m.down(x).transpose(1, 2)
        with torch.no_grad():
            chosen = torch.cdist(z.float(), m.book.weight[None].expand(len(x), -1, -1)).argmin(-1)
        near = m.book(chosen)
        y = m.up((z + (near - z).detach()).transpose(1, 2))
        return F.l1_loss(y.float(), x) + F.mse_loss(near, z.detach().float())

    down = nn.Sequential(nn.Conv1d(1, 16, 8, 4, 2), nn.ELU(), nn.Conv1d(16, 16, 8, 4, 2))
    up = nn.Sequential(nn.ConvTranspose1d(16, 16, 8, 4, 2), nn.ELU(), nn.ConvTranspose1d(16, 1, 8, 4, 2))
    return Made(Fn(run, down=down, up=up, book=nn.Embedding(32, 16)), (torch.randn(2, 1, 256),))


@program("audio")
def log_magnitudes() -> Made:
    window = torch.hann_window(64)

    def run(m: Any, x: Tensor) -> Tensor:
        bins = torch.stft(x, 64, 16, window=window, return_complex=True).abs()
        return m.body(torch.log(bins.clamp(min=1e-5)))

    body = nn.Sequential(nn.Conv1d(33, 32, 3, padding=1), nn.GELU(), nn.Conv1d(32, 8, 1))
    return Made(Fn(run, body=body), (torch.randn(2, 512),))
