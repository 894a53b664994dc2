"""What Narrowcast adds to an eager forward: MiniLM, batch 1 x 16 tokens, native policy, three changed ops, recording.

    python benchmarks/eager_overhead.py [--rounds N]

Bounds: native at most 1.01 of torch.autocast, a policy that changes three ops at most 1.10, recording at most 3.
`policy, by hand` makes the same casts as the policy in the model's own code, under torch.autocast: the policy's price
without Narrowcast's.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import minilm
from alternate import alternate, ratio
from machine import facts

import narrowcast as nc
from narrowcast.core.decide import Argument, Call, Region, decide
from narrowcast.core.policy import Site

BOUNDS = {"nc.autocast, native": 1.01, "nc.autocast, three ops changed": 1.10, "recording": 3.0}
BASE = "torch.autocast"


def cast_by_hand(model: torch.nn.Module) -> list[object]:
    """Forward hooks that make layer_norm low and gelu full, as the policy does; returns their handles."""
    low = torch.bfloat16
    handles = []
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            forward = module.forward

            def norm(x, module=module):
                weight, bias = module.weight.to(low), module.bias.to(low)
                return torch.nn.functional.layer_norm(x.to(low), module.normalized_shape, weight, bias, module.eps)

            module.forward = norm
            handles.append((module, forward))
        elif type(module).__name__ == "GELUActivation":
            forward = module.forward
            module.forward = lambda x: torch.nn.functional.gelu(x.float())
            handles.append((module, forward))
    return handles


def best_decision_us() -> float:
    """Microseconds of `decide`, which no plan is remembered for: the best of several runs."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="encoder.layer.3.*"))
    arguments = tuple(Argument(name, nc.formats.fp32) for name in ("input", "weight", "bias"))
    call = Call("aten.linear.default", arguments, Site("encoder.layer.4"))
    region, best = Region("cpu", nc.formats.bf16), float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(500):
            decide(call, policy, region)
        best = min(best, (time.perf_counter() - start) / 500)
    return round(best * 1e6, 2)


def main() -> int:
    """Measure, print a table, write the result file; exit code 1 if a bound is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    subject = minilm.subject(documents=1)
    tokens = {name: tensor[:, :16] for name, tensor in subject.kwargs.items()}
    model = subject.model
    policy = nc.Policy.native().with_rules(
        nc.Rule("aten.softmax", "lower"), nc.Rule("aten.layer_norm", "lower"), nc.Rule("aten.gelu", "full")
    )

    def native():
        with torch.autocast("cpu"):
            return model(**tokens)

    def ours():
        with nc.autocast("cpu"):
            return model(**tokens)

    def changed():
        with nc.autocast("cpu", policy=policy):
            return model(**tokens)

    def recording():
        with nc.record(), nc.autocast("cpu"):
            return model(**tokens)

    edited = minilm.subject(documents=1).model
    cast_by_hand(edited)

    def by_hand():
        with torch.autocast("cpu"):
            return edited(**tokens)

    sides = {
        BASE: native,
        "torch.autocast, again": native,
        "nc.autocast, native": ours,
        "policy, by hand": by_hand,
        "nc.autocast, three ops changed": changed,
        "recording": recording,
    }
    with torch.no_grad():
        times = alternate(sides, options.rounds)
        equal = all(torch.equal(a, b) for a, b in zip(by_hand().values(), changed().values(), strict=True))
    decision_us = best_decision_us()
    result = {
        "benchmark": "eager_overhead: MiniLM-L6, batch 1 x 16 tokens, bf16, no_grad",
        "machine": facts(),
        "rounds": options.rounds,
        "milliseconds": {name: round(sorted(t)[len(t) // 2], 3) for name, t in times.items()},
        "ratio_to_torch_autocast": {name: ratio(times, name, BASE) for name in sides if name != BASE},
        "policy_over_by_hand": ratio(times, "nc.autocast, three ops changed", "policy, by hand"),
        "policy_equals_by_hand_bit_for_bit": equal,
        "decision_us": decision_us,
        "bounds": BOUNDS,
    }
    print(f"{'side':34}{'ms':>9}{'ratio':>9}{'quartiles':>18}{'bound':>8}")
    missed = []
    for name in sides:
        row = result["ratio_to_torch_autocast"].get(name)
        bound = BOUNDS.get(name)
        if row is None:
            print(f"{name:34}{result['milliseconds'][name]:9.3f}")
            continue
        quartiles = f"{row['lower_quartile']:.3f} to {row['upper_quartile']:.3f}"
        print(f"{name:34}{result['milliseconds'][name]:9.3f}{row['median']:9.4f}{quartiles:>18}{bound or '':>8}")
        if bound and row["median"] > bound:
            missed.append(name)
    print(f"policy over the same casts by hand: {result['policy_over_by_hand']['median']:.4f}; same bits: {equal}")
    print(f"one decision under a policy with a rule about a module: {decision_us} us (bound 10)")
    if decision_us > 10:
        missed.append("one decision")
    file = Path(__file__).parent / "results/eager_overhead.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if missed:
        print(f"over the bound: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
