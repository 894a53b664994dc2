"""What mypy says of users' code: types that come back, names that do not exist. Checked by `make lint`; never run."""

from typing import assert_type

import torch

import narrowcast as nc
from narrowcast.results import Differences, Headroom, Repair, RunDifferences, TrainingCheck

model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(2, 4)

assert_type(nc.compile(model, under="bf16", goal="fast"), torch.nn.Sequential)
assert_type(nc.pin(model, "fp32"), torch.nn.Sequential)
assert_type(nc.pin(torch.nn.Linear, "fp32"), type[torch.nn.Linear])
assert_type(nc.capture(model, x).headroom(), Headroom)
assert_type(nc.compare(model, {"input": x}, under=torch.bfloat16), Differences)
assert_type(nc.diff(nc.capture(model, x), "run.json.gz"), RunDifferences)
assert_type(nc.repair(nc.Case(model, x, evaluate=lambda m: 1.0)), Repair)
assert_type(nc.explain(model, (x,), under=nc.autocast("cpu", torch.float16), device="cuda"), nc.Explanation)
assert_type(nc.check_training(lambda: None), TrainingCheck)
nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="head"), nc.Rule("aten.mm", "to(fp16)"))
nc.compile(model, goal=nc.Goal.memory(slowdown_limit=4.0))


@nc.compile(under="bf16")
def compiled(values: torch.Tensor) -> torch.Tensor:
    return values @ values.T


assert_type(compiled(x), torch.Tensor)

nc.autocst("cpu")  # type: ignore[attr-defined]
nc.Rule("aten.linear", "ful")  # type: ignore[arg-type]
nc.compile(model, goal="quick")  # type: ignore[call-overload]
nc.compare(model, x, dtype="bf16")  # type: ignore[call-arg]
