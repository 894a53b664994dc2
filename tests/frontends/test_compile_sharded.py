"""`nc.compile` of a model that FSDP2 shards: every block is compiled, or the model is refused before the first step."""

from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowcast as nc
from narrowcast.errors import RegionError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("process_group")]


class Block(nn.Module):
    """A block of the user's own around one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def sharded(blocks: list[nn.Module]) -> nn.Module:
    model = nn.Sequential(*blocks)
    mesh = init_device_mesh("cpu", (1,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_a_block_of_torchs_own_class_is_refused_and_one_around_it_is_compiled() -> None:
    """A `Sequential` sharded after `nc.compile` is refused at its first step; a user's own blocks run compiled."""
    model = sharded([Block(), Block().inner])
    with pytest.raises(RegionError, match="1, a Sequential, is sharded") as caught:
        nc.compile(model, under="bf16")
    assert "a module of your own class around it" in str(caught.value)

    ran: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        return lambda *args: (ran.append(1), graph.forward(*args))[1]

    late = nn.Sequential(Block(), Block().inner)
    compiled = nc.compile(late, under="bf16")
    for block in late:
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(RegionError, match="1, a Sequential, is sharded"):  # since it was compiled
        compiled(torch.randn(2, 8))

    compiled = nc.compile(sharded([Block(), Block()]), under="bf16", backend=backend)
    for _ in range(2):
        compiled(torch.randn(2, 8)).sum().backward()
    assert len(ran) == 2 * 2  # each block, each time
