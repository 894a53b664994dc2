"""nc.Scaler where gradients are sharded: all ranks skip the same steps. Two processes, which talk over gloo."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from two_ranks import run_on_two_ranks

PROGRAM = '''
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import narrowcast as nc
from narrowcast.training.scaler.scaler import Scaler

INF = float("inf")

def sharded(rank, kind, fused):
    """FSDP2: at the second of three steps rank 0 alone holds what is not finite."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    scaler = Scaler("cpu", model=model) if kind == "ours" else torch.amp.GradScaler("cpu")
    steps = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    said = []
    for number in range(3):
        steps.zero_grad()
        scaler.scale(model(torch.ones(2, 4) * (rank + 1)).sum()).backward()
        if number == 1 and rank == 0:
            model[0].weight.grad.to_local()[0, 0] = INF
        result = scaler.step(steps)
        scaler.update()
        said.append(scaler.get_scale())
        if kind == "ours":
            said.append(result.why)
    return said + [p.to_local().tolist() for p in model.parameters()]

def grouped(rank):
    """Plain tensors of a group, the last rank without a gradient."""
    scaler = Scaler("cpu", process_group=dist.group.WORLD)
    weight = torch.nn.Parameter(torch.ones(2))
    steps = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight * INF).sum()).backward()
    if rank == 1:
        weight.grad = None
    result = scaler.step(steps)
    scaler.update()
    return [result.skipped, result.parameters, scaler.get_scale()]

def closure(rank):
    """A closure's step is undone on both ranks when one overflows."""
    scaler = Scaler("cpu", process_group=dist.group.WORLD)
    weight = torch.nn.Parameter(torch.ones(2))
    steps = torch.optim.LBFGS([weight], max_iter=2)
    def loss():
        steps.zero_grad()
        scaler.scale((weight * (INF if rank else 1)).sum()).backward()
        return weight.sum()
    result = scaler.step(steps, loss)
    scaler.update()
    return [result.skipped, weight.tolist(), scaler.get_scale()]

def found(rank):
    found = {f"{kind} {fused}": sharded(rank, kind, fused) for kind in ("ours", "torch") for fused in (False, True)}
    return found | {"group": grouped(rank), "closure": closure(rank)}
'''


def test_all_ranks_skip_the_same_steps(tmp_path):
    """FSDP2 with and without a fused optimizer, as torch's scaler to the bit; groups of plain tensors; closures."""
    ranks = run_on_two_ranks(PROGRAM, tmp_path)
    for rank, found in enumerate(ranks):
        for fused in (False, True):
            ours = found[f"ours {fused}"]
            scales, whys, weights = ours[:6:2], ours[1:6:2], ours[6:]
            assert scales == [65536, 32768, 32768] and [bool(why) for why in whys] == [False, True, False]
            assert ("0.weight is infinite" in whys[1]) == (rank == 0) and ("another rank" in whys[1]) == (rank == 1)
            assert [*scales, *weights] == found[f"torch {fused}"]
        names = ["parameter 0 of group 0 (2,)"] if rank == 0 else []
        assert found["group"] == [True, names, 32768]
        assert found["closure"] == [True, [1, 1], 32768]
