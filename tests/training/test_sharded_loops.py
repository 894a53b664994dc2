"""`nc.check_training` of models that are sharded or replicated: who casts besides the region, and what is restored."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc

sys.path.insert(0, str(Path(__file__).parent))

from small_loops import BF16, Loop, found_at, is_right

BESIDE, REDUCED = "FSDP2 casts beside the region", "gradients reduced in a low format"
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("process_group")]


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
    """The finding lists the low dtypes of the MixedPrecisionPolicy; the region or that policy alone is right."""
    what = found_at(in_region, Sharded(MixedPrecisionPolicy(**policy)), BESIDE).findings[0].what
    assert all(name in what for name in named)
    assert what.count("_dtype=") == len(named)
    is_right(in_region, Sharded())  # as is advised: one of both casts
    if "param_dtype" in policy:
        is_right(alone, Sharded(MixedPrecisionPolicy(**policy)))


def test_shards_in_fp32_lose_no_updates_and_shards_in_bf16_do() -> None:
    """param_dtype casts for the computation alone, so small updates still reach shards kept in fp32."""
    assert nc.check_training(alone, (Sharded(dtype=BF16),)).kinds == ("updates lost in rounding",)
    is_right(alone, Sharded(MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)))


def test_shards_are_put_back_and_a_step_after_it_runs() -> None:
    """Local shards have their old values after the check, and the next step trains every one of them."""
    loop = Sharded()
    in_region(loop)
    before = [weight.to_local().clone() for weight in loop.net.parameters()]
    nc.check_training(in_region, (loop,))
    assert all(map(torch.equal, (weight.to_local() for weight in loop.net.parameters()), before))
    in_region(loop)
    assert not any(map(torch.equal, (weight.to_local() for weight in loop.net.parameters()), before))


def rounds(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of the user's own, whose name says nothing."""
    return hooks._compress_hook(BF16, group, bucket)


@pytest.mark.parametrize("hook", [hooks.fp16_compress_hook, hooks.fp16_compress_wrapper(hooks.allreduce_hook), rounds])
def test_a_hook_that_reduces_gradients_in_a_low_format_is_named_whatever_it_is_called(hook: Any) -> None:
    """What a hook does to the bucket decides, so a user's own is found like those of torch."""
    loop = Loop()
    loop.net = DistributedDataParallel(loop.net, gradient_as_bucket_view=hook is rounds)
    is_right(in_region, loop)
    loop.net.register_comm_hook(None, hook)
    assert hook.__name__ in found_at(in_region, loop, REDUCED).findings[0].what


def test_a_reducer_that_compresses_by_itself_is_found_and_hooks_that_round_nothing_are_right() -> None:
    """DDP's built-in FP16_COMPRESS has no Python hook and is found; a plain allreduce is no fault."""
    loop = Loop()
    loop.net = DistributedDataParallel(loop.net)
    loop.net.register_comm_hook(None, hooks.allreduce_hook)
    is_right(in_region, loop)
    loop.net = DistributedDataParallel(loop.net.module)
    loop.net._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    found_at(in_region, loop, REDUCED)


def test_gradients_of_weights_in_bf16_are_reduced_in_their_own_format() -> None:
    """The gradients are in bf16 before the reduction, which casts nothing, so there is no finding."""
    loop = Loop(BF16, lr=0.3)
    loop.net = DistributedDataParallel(loop.net)
    is_right(alone, loop)


def test_sharded_gradients_that_nobody_clears_are_found() -> None:
    """Gradients that grow from step to step are found as DTensors too."""
    loop = Sharded()

    def step() -> None:
        loop.loss().backward()
        loop.optimizer.step()

    assert nc.check_training(step).kinds == ("gradients never cleared",)
