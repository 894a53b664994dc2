"""nc.store with shards and replicas: two processes, which talk over gloo; a checkpoint of both is read by one."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import narrowcast as nc

sys.path.insert(0, str(Path(__file__).parent))

from two_ranks import run_on_two_ranks

PROGRAM = '''
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
import narrowcast as nc

FORMS = json.loads(sys.argv[2])
X, Y = (torch.randn(8, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (6, 3))

def net(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))

def sharded(form, make, **more):
    model = net().bfloat16()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), **more)
    optimizer = getattr(torch.optim, make)(model.parameters(), lr=1e-2)
    return model, optimizer, nc.store(model, optimizer, form)

def step(model, optimizer, rank):
    optimizer.zero_grad()
    (model(X[rank::2]) - Y[rank::2]).float().square().mean().backward()
    optimizer.step()

def full(model):
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}

def resumed(rank, name, form, make):
    """Save after two steps, in shards; go on, and go on from what was saved."""
    folder = f"{FOLDER}/{name}-{make}"
    model, optimizer, stored = sharded(form, make)
    for _ in range(2):
        step(model, optimizer, rank)
    kept = {n: w.full_tensor() for n, w in stored.weights().items()}
    dcp.save({"model": model.state_dict(), "storage": stored}, checkpoint_id=folder)
    other, second, again = sharded(form, make)
    read = {"model": other.state_dict()}
    dcp.load(read, checkpoint_id=folder)
    other.load_state_dict(read["model"])
    again.load_state_dict(folder)
    for one, two in ((model, optimizer), (other, second)):
        step(one, two, rank)
    if rank == 0:
        torch.save(kept, f"{folder}.pt")
    a, b = full(model), full(other)
    return all(torch.equal(a[n], b[n]) for n in a)

def same_words(rank):
    """The same gradients give the same bits, in shards along either dimension and whole."""
    from torch.distributed.tensor import Shard
    found = []
    form = {"weight": "bf16", "rounding": "stochastic", "moments": "bf16"}
    for dim in (0, 1):
        model, optimizer, _ = sharded(form, "AdamW", shard_placement_fn=lambda p: Shard(min(dim, p.dim() - 1)))
        whole = net().bfloat16()
        single = torch.optim.AdamW(whole.parameters(), lr=1e-2)
        nc.store(whole, single, form)
        for number in range(3):
            for one, two in zip(model.parameters(), whole.parameters()):
                two.grad = torch.randn(two.shape, generator=torch.Generator().manual_seed(number)).bfloat16()
                one.grad = torch.distributed.tensor.distribute_tensor(two.grad, one.device_mesh, one.placements)
            optimizer.step()
            single.step()
        found.append(all(torch.equal(p, whole.get_parameter(n)) for n, p in full(model).items()))
    return found

def replicated(rank, name):
    """Models of other seeds are alike on both ranks, with what completes their weights; nothing is said of it."""
    model = net(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stored = nc.store(model, optimizer, FORMS[name])
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        step(wrapped, optimizer, rank)
    row = torch.cat([one.flatten() for one in stored.weights().values()])
    rows = [torch.empty_like(row) for _ in range(2)]
    dist.all_gather(rows, row)
    return torch.equal(*rows) and not stored.notes

def said(make, form):
    try:
        return make(form).notes
    except nc.errors.RunError as error:
        return str(error)

def words(rank):
    """What is refused, and what is noted."""
    def replica(form):
        model = torch.nn.parallel.DistributedDataParallel(net())
        return nc.store(model, torch.optim.AdamW(model.parameters()), form)
    def shard(form):
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = net()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=low)
        return nc.store(model, torch.optim.AdamW(model.parameters()), form)
    forms = ({"weight": "bf16"}, {"gradient": "bf16"}, {"moments": "bf16"})
    return [said(make, form) for make in (replica, shard) for form in forms]

def found(rank):
    found = {f"{n} {m}": resumed(rank, n, form, m) for n, form in FORMS.items() for m in ("AdamW", "RMSprop")}
    replicas = {f"replicas, {name}": replicated(rank, name) for name in FORMS}
    return found | replicas | {"words": same_words(rank), "said": words(rank)}
'''
BF16 = {"weight": "bf16"}
FORMS = {
    "stochastic": BF16 | {"rounding": "stochastic", "moments": "bf16"},
    "remainder": BF16 | {"master": "remainder"},
    "kahan": BF16 | {"rounding": "kahan"},
    "master": BF16 | {"master": "fp32"},
}


def test_shards_and_replicas_are_stored_and_resumed(tmp_path):
    """FSDP2 and DDP: alike on both ranks, resumed bit for bit on two, and read by one; what cannot be is refused."""
    for found in run_on_two_ranks(PROGRAM, tmp_path, json.dumps(FORMS)):
        buckets, reduced, noted, converted, shards, both = found.pop("said")
        assert found.pop("words") == [True, True]
        assert all(found.values()), found
        assert "has made its buckets for 0.weight in fp32" in buckets
        assert "reduces gradients of 0.weight in fp32, not in bf16" in reduced
        assert noted == []
        assert "model.to(torch.bfloat16) before it is sharded" in converted
        assert "gradients of 0.weight are kept in the format of its shards" in shards
        assert "fully_shard reduces gradients in bf16" in both[0]
    for name, form in FORMS.items():
        for make in (torch.optim.AdamW, torch.optim.RMSprop):
            folder = tmp_path / f"{name}-{make.__name__}"
            model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))
            optimizer = make(model.parameters(), lr=1e-2)
            stored = nc.store(model, optimizer, form)
            read = {"model": model.state_dict()}
            dcp.load(read, checkpoint_id=folder, no_dist=True)
            model.load_state_dict(read["model"])
            stored.load_state_dict(folder)
            kept = torch.load(tmp_path / f"{folder.name}.pt")
            assert all(torch.equal(exact, kept[n]) for n, exact in stored.weights().items())
            assert stored.update == 2
