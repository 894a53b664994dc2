"""Energies of molecules to 1 meV, with one rule, where native autocast in bf16 is off by 11.5 meV.

    python examples/energies.py

ANI2xt sums the energies of atoms, which one network per element gives. Rounding what goes into a matrix product to
bf16 costs 10.5 meV by itself, whatever the product adds up in (printed below), so not every product can be in bf16. The
rule in examples/policies/energies.toml keeps the networks of H, C, N and O in fp32; those of F, S and Cl stay in bf16.
Weights come with Auto3D, the molecules with ase (the G2 set). Nothing is downloaded.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import narrowcast as nc

POLICY = Path(__file__).parent / "policies/energies.toml"


def case() -> nc.Case:
    """The model on 40 molecules of the G2 set. Energies are fp64, in eV."""
    warnings.filterwarnings("ignore")
    from ase.collections import g2
    from Auto3D.engines.models.ani2xt import ANI2xt

    index = {number: n for n, number in enumerate((1, 6, 7, 8, 9, 16, 17))}
    molecules = [m for m in g2 if all(z in index for z in m.numbers) and len(m) > 4][:40]
    size = max(map(len, molecules))
    species, places = torch.full((len(molecules), size), -1), torch.zeros(len(molecules), size, 3)
    for n, molecule in enumerate(molecules):
        species[n, : len(molecule)] = torch.tensor([index[z] for z in molecule.numbers])
        places[n, : len(molecule)] = torch.from_numpy(molecule.positions).float()
    return nc.Case(ANI2xt(torch.device("cpu")).eval(), (species, places), name="ANI2xt on 40 molecules")


def mean_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The mean absolute error of energies, in meV."""
    return float((found.double() - expected.double()).abs().mean() * 1000)


def rounding_alone(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The energies if only what goes into the products is rounded to bf16, and everything else is exact fp32."""
    rounded = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    weights = [m.weight.detach().clone() for m in rounded]
    hooks = [m.register_forward_pre_hook(lambda _, args: (args[0].bfloat16().float(),)) for m in rounded]
    try:
        for module in rounded:
            module.weight.data = module.weight.data.bfloat16().float()
        return run()
    finally:
        for module, weight, hook in zip(rounded, weights, hooks, strict=True):
            module.weight.data = weight
            hook.remove()


@torch.no_grad()
def main() -> None:
    """Energies in fp32, under native autocast, and under the rule; in which format the products ran."""
    print(POLICY.read_text())
    one = case()
    run = lambda: one.model(*one.inputs)  # noqa: E731
    expected = run()
    print(f"only rounding what goes into products  {mean_error(rounding_alone(one.model, run), expected):7.3f} meV")
    regions = {"native": torch.autocast("cpu"), "one rule": nc.autocast("cpu", policy=POLICY)}
    for name, region in regions.items():
        with region:
            found = run()
        with nc.record() as ledger, region:
            run()
        products = ledger.op_formats()["aten.linear.default"]
        low, every = products.get("bf16", 0), sum(products.values())
        error = mean_error(found, expected)
        print(f"{name:38} {error:7.3f} meV, {low} of {every} products in bf16")
    sys.exit(error >= 1 or not low)


if __name__ == "__main__":
    main()
