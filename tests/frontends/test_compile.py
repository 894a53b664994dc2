"""Regions around compiled code: a policy of ours forces a new graph, or is an error; never a stale one."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import narrowcast as nc
from narrowcast.runtime.regions.native_state import Identity, carried_by

lin = torch.nn.Linear(8, 8)
x = torch.randn(2, 8)
TO_FP16 = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "to(fp16)"))
TO_FP32 = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full"))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_each_policy_gets_its_own_graph(backend):
    """Whatever was compiled before, under the same native state."""
    compiled = torch.compile(lambda t: F.gelu(lin(t)), backend=backend)
    for _ in range(2):
        for region, dtype in (
            (torch.autocast("cpu"), torch.bfloat16),
            (nc.autocast("cpu", policy=TO_FP16), torch.float16),
            (nc.autocast("cpu", policy=TO_FP32), torch.float32),
            (nc.autocast("cpu"), torch.bfloat16),
        ):
            with region:
                assert compiled(x).dtype is dtype
    assert compiled(x).dtype is torch.float32


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("policy", [TO_FP16, None])
def test_a_region_inside_compiled_code_keeps_its_policy(backend, policy):
    """It is a mark in the graph."""

    def inside(t):
        t = t * 2
        with nc.autocast("cpu", policy=policy):
            out = F.gelu(lin(t))
        return out + 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo says that it breaks the graph
        compiled = torch.compile(inside, backend=backend)
        for _ in range(2):
            assert compiled(x).dtype is (torch.bfloat16 if policy is None else torch.float16)
    assert not torch.is_autocast_enabled("cpu")


def test_place_conditions_hold_or_are_an_error_inside_compiled_code():
    """Modules are not on the stack there. AOTAutograd says where a call is; the eager backend does not."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="1"))
    compiled = torch.compile(model, backend="aot_eager")
    with nc.autocast("cpu", policy=policy):
        assert compiled(x).dtype is torch.float32
    with nc.autocast("cpu"):
        assert compiled(x).dtype is torch.bfloat16
    with pytest.raises(Exception, match="without saying where"), nc.autocast("cpu", policy=policy):
        torch.compile(model, backend="eager")(x)


def carried():
    return [(torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name, _ in carried_by("0", "cpu")]


def test_the_state_that_carries_the_identity_is_restored():
    """Also after an exception; native regions do not touch it."""
    before = carried()
    assert len(before) == 3
    with nc.autocast("cpu"):
        assert carried() == before
    with pytest.raises(ZeroDivisionError), nc.autocast("cpu", policy=TO_FP16), nc.autocast("cpu", policy=TO_FP32):
        raise ZeroDivisionError
    assert carried() == before


def test_different_policies_carry_different_states_the_same_in_each_process():
    """Caches on disk are keyed by it."""
    seen = set()
    for n in range(200):
        identity = Identity(carried_by(f"{n * 7919:012x}" + "0" * 52, "cpu"))
        seen.add(tuple(carried()))
        identity.restore()
    assert len(seen) == 200


def test_a_native_region_inside_one_of_ours_rules_in_compiled_code_too(fresh_dynamo):
    """Dynamo does not see the difference: the format is the same, and so is all the state that it guards on."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full"))
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    for first in ("ours", "native"):
        compiled = nc.compile(model, backend="aot_eager")
        for inner in (first, "ours" if first == "native" else "native") * 2:
            with nc.autocast("cpu", policy=policy):
                if inner == "native":
                    with torch.autocast("cpu"):
                        assert torch.equal(compiled(x), model(x)) and model(x).dtype is torch.bfloat16
                else:
                    assert torch.equal(compiled(x), model(x)) and model(x).dtype is torch.float32
        torch._dynamo.reset()
