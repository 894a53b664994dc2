"""The policy `ipex` at work: inference, traces and training as Intel's guide shows them, on cpu and on fake xpu."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import narrowcast as nc
from narrowcast.cli import main
from narrowcast.errors import RegionWarning

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchScript's
BF, FP, HF = torch.bfloat16, torch.float32, torch.float16
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3])


class Net(nn.Module):
    """One convolution, and what makes classes of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)

    def forward(self, x):
        return torch.relu(self.conv(x)).mean((2, 3))


def formats(ledger):
    """In which formats each op of the recording computed."""
    return {op.split(".")[1]: set(found) for op, found in ledger.op_formats().items()}


# -- inference ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, BF, HF], ids=str)
def test_a_convolution_net_infers_in_the_low_format(dtype):
    """Imperative code; bf16 if nothing is said."""
    net = Net().eval()
    with torch.no_grad(), nc.autocast("cpu", dtype, policy="ipex"), nc.record() as ledger:
        found = net(IMAGES)
    low = dtype or BF
    assert found.dtype is low
    assert formats(ledger)["conv2d"] == {"fp16" if low is HF else "bf16"}
    with torch.no_grad(), torch.autocast("cpu", low):  # native has the same rule about it
        assert torch.equal(found, net(IMAGES))


@pytest.mark.parametrize("dtype", [BF, HF], ids=str)
def test_a_trace_made_and_frozen_in_the_region_computes_as_eager_code(dtype):
    """In the region and outside of it: the casts are in the graph."""
    net = Net().eval()
    with torch.no_grad(), nc.autocast("cpu", dtype, policy="ipex"):
        expected = net(IMAGES)
        frozen = torch.jit.freeze(torch.jit.trace(net, IMAGES))
        assert torch.equal(frozen(IMAGES), expected)
    with torch.no_grad():
        assert torch.equal(frozen(IMAGES), expected) and frozen(IMAGES).dtype is dtype


@pytest.mark.parametrize("make", [
    lambda net: nc.trace(net, IMAGES, under="ipex"),
    lambda net: nc.script(net, under="ipex"),
    lambda net: nc.compile(net, under="ipex", backend="aot_eager"),
    lambda net: nc.export(net, (IMAGES,), under="ipex").module(),
], ids=["trace", "script", "compile", "export"])  # fmt: skip
@pytest.mark.usefixtures("fresh_dynamo")
def test_every_front_end_knows_the_policy_by_name(make):
    """With the bits of eager code; the default format is the policy's."""
    net = nn.Sequential(Net(), nn.Linear(4, 4), nn.GroupNorm(2, 4)).eval()
    with torch.no_grad():
        with nc.autocast("cpu", policy="ipex"):
            expected = net(IMAGES)
        assert torch.equal(make(net)(IMAGES), expected)


def test_a_region_without_a_format_takes_the_policys():
    """Not the device's: in eager code, in a script's own region, in an explanation."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", HF)
    try:
        model = InScript().eval()
        with torch.no_grad():
            assert model(IMAGES[:, 0]).dtype is BF is nc.script(model)(IMAGES[:, 0]).dtype
        assert nc.autocast("cpu").fast_dtype is HF
    finally:
        torch.set_autocast_dtype("cpu", before)
    for device in ("cuda", "xpu", "mps"):
        assert nc.autocast(device, policy="ipex").fast_dtype is BF
        assert nc.explain(Net(), (IMAGES,), under="ipex", device=device).low == "bf16"


class InScript(nn.Module):
    """A region in the code that is scripted."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        with nc.autocast("cpu", policy="ipex"):
            found = self.linear(x)
        return found


# -- training ----------------------------------------------------------------------------------------------------------


def train(net, dtype, steps=20):
    """The losses of some steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with nc.autocast("cpu", dtype, policy="ipex"):
            loss = F.cross_entropy(net(IMAGES), LABELS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_net_trains_in_bf16_with_its_loss_in_fp32():
    """Weights and their gradients stay in fp32, and nothing is warned of."""
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RegionWarning)
        losses = train(net, BF)
        with nc.record() as ledger:
            train(net, BF, steps=1)
    found = formats(ledger)
    assert found["conv2d"] == {"bf16"} and found["cross_entropy_loss"] == {"fp32"}
    assert net.conv.weight.dtype is FP is net.conv.weight.grad.dtype
    assert losses[-1] < losses[0] / 2
    assert not ledger.advice


def test_training_in_fp16_warns_with_the_line_and_what_to_do():
    """Once per region; inference in fp16, and a net that learns nothing, are fine."""
    net = Net()
    said = "training in bf16 alone. Train with dtype='bf16'"
    with pytest.warns(RegionWarning, match=said) as caught, nc.autocast("cpu", HF, policy="ipex"):
        net(net(IMAGES)[:, :3, None, None])
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "self.conv(x)" in Path(__file__).read_text().split("\n")[caught[0].lineno - 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RegionWarning)
        with nc.autocast("cpu", HF, policy="ipex"), torch.no_grad():
            net(IMAGES)
        with nc.autocast("cpu", HF, policy="ipex", enabled=False):
            net(IMAGES)
        with nc.autocast("cpu", HF, policy="safe"):
            net(IMAGES)
        with nc.autocast("cpu", HF, policy="ipex"):
            net.requires_grad_(False)(IMAGES)


def test_the_warning_is_shown_once_per_line():
    """As Python does it by default."""
    net = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        train(net, HF, steps=3)
    assert len([w for w in caught if w.category is RegionWarning]) == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_training_in_fp16_warns_too():
    """While it is captured."""
    compiled = nc.compile(Net(), under=nc.autocast("cpu", HF, policy="ipex"), backend="aot_eager")
    with pytest.warns(RegionWarning, match="torch.no_grad"):
        compiled(IMAGES).float().sum().backward()


def test_a_policy_over_it_may_train_in_fp16():
    """The formats to train in are data."""
    over = nc.Policy("mine", extends=("ipex",), training=("bf16", "fp16"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RegionWarning)
        with nc.autocast("cpu", HF, policy=over):
            Net()(IMAGES).sum().backward()


# -- ops, on cpu and on fake tensors of a device that is not here ------------------------------------------------------

WEIGHT, BIAS = (4, 3, 3, 3), (4,)
CALLS = {
    "conv2d": (lambda r: F.conv2d(r(2, 3, 8, 8), r(*WEIGHT), r(*BIAS)), BF),
    "conv2d, same": (lambda r: F.conv2d(r(2, 3, 8, 8), r(*WEIGHT), padding="same"), BF),
    "conv_transpose2d": (lambda r: F.conv_transpose2d(r(2, 4, 8, 8), r(*WEIGHT)), BF),
    "linear": (lambda r: F.linear(r(2, 3), r(4, 3)), BF),
    "mv": (lambda r: torch.mv(r(2, 3), r(3)), BF),
    "addr": (lambda r: torch.addr(r(2, 3), r(2), r(3)), BF),
    "multi_dot": (lambda r: torch.linalg.multi_dot([r(2, 3), r(3, 4), r(4, 2)]), BF),
    "gru_cell": (lambda r: torch.gru_cell(r(2, 3), r(2, 4), r(12, 3), r(12, 4), r(12), r(12)), BF),
    "einsum, which calls bmm": (lambda r: torch.einsum("bij,bjk->bik", r(2, 3, 4), r(2, 4, 3)), BF),
    "exp": (lambda r: torch.exp(r(3, dtype=BF)), FP),
    "rsqrt": (lambda r: torch.rsqrt(r(3, dtype=BF)), FP),
    "pow": (lambda r: r(3, dtype=BF) ** 2, FP),
    "fft": (lambda r: torch.fft.rfft(r(8, dtype=BF)).real, FP),
    "log_softmax": (lambda r: F.log_softmax(r(2, 3, dtype=BF), -1), FP),
    "group_norm": (lambda r: F.group_norm(r(2, 4, 3, dtype=BF), 2), FP),
    "binary_cross_entropy": (lambda r: F.binary_cross_entropy(r(3, dtype=BF).sigmoid(), r(3).sigmoid()), FP),
    "mse_loss": (lambda r: F.mse_loss(r(3, dtype=BF), r(3, dtype=BF)), FP),
    "cat": (lambda r: torch.cat([r(3, dtype=BF), r(3)]), FP),
    "stack, low": (lambda r: torch.stack([r(3, dtype=BF), r(3, dtype=BF)]), BF),
    "atan2": (lambda r: torch.atan2(r(3, dtype=BF), r(3)), FP),
    "scatter_add": (lambda r: torch.scatter_add(r(3), 0, r(3).long() * 0, r(3, dtype=BF)), FP),
    "index_put": (lambda r: torch.index_put(r(3), (r(2).long() * 0,), r(2, dtype=BF)), FP),
    "softmax, not listed": (lambda r: torch.softmax(r(3, dtype=BF), -1), BF),
    "layer_norm, not listed": (lambda r: F.layer_norm(r(2, 3, dtype=BF), (3,)), BF),
    "sum, not listed": (lambda r: r(3, dtype=BF).sum(), BF),
    "addmm_, in place": (lambda r: r(2, 2).addmm_(r(2, 3), r(3, 2)), FP),
    "mm, out=": (lambda r: torch.mm(r(2, 2), r(2, 2), out=r(2, 2)), FP),
    "fp64": (lambda r: torch.mm(r(2, 2, dtype=torch.float64), r(2, 2, dtype=torch.float64)), torch.float64),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_the_cpu_gives_the_format_that_its_list_says(name):
    """For real."""
    call, dtype = CALLS[name]
    with nc.autocast("cpu", policy="ipex"):
        assert call(lambda *shape, dtype=FP: torch.ones(shape, dtype=dtype)).dtype is dtype


ON_XPU = pytest.mark.xfail(
    torch.cuda.is_available() and torch.__version__.startswith("2.11."),
    reason="beside a GPU, fake tensors of torch 2.11 ask the driver of the device that they fake",
)


@ON_XPU
@pytest.mark.parametrize("name", [name for name in CALLS if name != "gru_cell"])  # no fake kernel for its fused form
def test_a_call_on_xpu_gives_the_same(name):
    """On fake tensors, through the kernels that stand at that device's key."""
    call, dtype = CALLS[name]
    with FakeTensorMode(), nc.autocast("xpu", policy="ipex"):
        assert call(lambda *shape, dtype=FP: torch.empty(shape, dtype=dtype, device="xpu")).dtype is dtype


@ON_XPU
@pytest.mark.parametrize("low", [BF, HF], ids=str)
def test_the_net_has_the_same_formats_on_xpu(low):
    """Forward and loss on fake tensors."""
    with FakeTensorMode(), nc.autocast("xpu", low, policy="ipex"), torch.no_grad():
        x, weight = torch.empty(4, 3, 8, 8, device="xpu"), torch.empty(4, 3, 3, 3, device="xpu")
        scores = torch.relu(F.conv2d(x, weight)).mean((2, 3))
        loss = F.cross_entropy(scores, torch.empty(4, device="xpu", dtype=torch.long))
    assert (scores.dtype, loss.dtype) == (low, FP)


@pytest.mark.parametrize("device", ["xpu", "cuda"])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_the_net_is_explained_for_devices_that_are_not_here(device, low):
    """On stand-ins."""
    net = Net()
    with torch.no_grad():
        region = nc.autocast(device, low, policy="ipex")
        found = nc.explain(lambda x: F.cross_entropy(net(x), LABELS), (IMAGES,), under=region)
    computes = {row.op.split(".")[1]: row.computes for row in found.op_rows()}
    assert computes["conv2d"] == low and computes["cross_entropy_loss"] == "fp32"


def test_the_command_line_shows_what_differs_from_native_on_xpu(capsys):
    """Rules op by op, then what the head says."""
    with pytest.raises(SystemExit) as stopped:
        main(["diff", "native", "ipex", "--device", "xpu", "--all"])
    out = capsys.readouterr().out
    assert stopped.value.code == 1
    assert "aten.layer_norm.default: full -> -" in out and "aten.cat.default: - -> promote" in out
    assert "weight cache native -> off; low format the device's -> bf16; training in any -> bf16" in out
    with pytest.raises(SystemExit):
        main(["policy", "show", "ipex"])
    assert "low format bf16, training in bf16" in capsys.readouterr().out
