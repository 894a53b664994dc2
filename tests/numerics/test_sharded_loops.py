"""`nc.check_training` of models that are sharded or replicated: who casts besides the region, and what is put back."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc

sys.path.insert(0, str(Path(__file__).parent))

from small_loops import BF16, Loop, found_at, is_right

BESIDE, REDUCED = "FSDP2 casts beside the region", "gradients reduced in a low format"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, without a network."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Sharded(Loop):
    """A model whose layers are sharded, and the whole of it."""

    def __init__(self, policy: MixedPrecisionPolicy | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (1,))}
        if policy is not None:
            options["mp_policy"] = policy
        for module in (self.net[0], self.net[2], self.net):
            fully_shard(module, **options)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-5)


def in_region(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with torch.autocast("cpu", BF16):
        out = loop.net(loop.x)  # HERE
        loss = torch.nn.functional.cross_entropy(out, loop.y)
    loss.backward()
    loop.optimizer.step()


def alone(loop: Loop) -> None:
    loop.train(loop.low_loss())


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ({"param_dtype": BF16}, ("param_dtype=bf16", "reduce_dtype=bf16")),
        ({"param_dtype": BF16, "reduce_dtype": torch.float32}, ("param_dtype=bf16",)),
        ({"output_dtype": BF16}, ("output_dtype=bf16",)),
        ({"reduce_dtype": BF16}, ("reduce_dtype=bf16",)),
    ],
    ids=["param", "param alone", "output", "reduce"],
)
def test_a_policy_of_fsdp2_beside_a_region_is_named_as_such(
    policy: dict[str, torch.dtype], named: tuple[str, ...]
) -> None:
    what = found_at(in_region, Sharded(MixedPrecisionPolicy(**policy)), BESIDE).findings[0].what
    assert all(name in what for name in named)
    assert what.count("_dtype=") == len(named)
    is_right(in_region, Sharded())  # as is advised: one of both casts
    if "param_dtype" in policy:
        is_right(alone, Sharded(MixedPrecisionPolicy(**policy)))


def test_shards_in_fp32_lose_no_updates_and_shards_in_bf16_do() -> None:
    assert nc.check_training(alone, (Sharded(dtype=BF16),)).kinds == ("updates lost in rounding",)
    is_right(alone, Sharded(MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)))


def test_shards_are_put_back_and_a_step_after_it_runs() -> None:
    loop = Sharded()
    in_region(loop)
    before = [weight.to_local().clone() for weight in loop.net.parameters()]
    nc.check_training(in_region, (loop,))
    assert all(map(torch.equal, (weight.to_local() for weight in loop.net.parameters()), before))
    in_region(loop)
    assert not any(map(torch.equal, (weight.to_local() for weight in loop.net.parameters()), before))


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_a_hook_that_reduces_gradients_in_fp16_is_named(views: bool) -> None:
    loop = Loop()
    loop.net = DistributedDataParallel(loop.net, gradient_as_bucket_view=views)
    is_right(in_region, loop)
    loop.net.register_comm_hook(None, fp16_compress_hook)
    assert "fp16_compress_hook" in found_at(in_region, loop, REDUCED).findings[0].what


def test_sharded_gradients_that_nobody_clears_are_found() -> None:
    loop = Sharded()

    def step() -> None:
        loop.loss().backward()
        loop.optimizer.step()

    assert nc.check_training(step).kinds == ("gradients never cleared",)
