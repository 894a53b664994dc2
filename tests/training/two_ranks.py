"""A program run by two processes that talk over gloo."""

import json
import subprocess
import sys

HEAD = """
import json, multiprocessing, sys, warnings
import torch, torch.distributed as dist

FOLDER = sys.argv[1]
"""
TAIL = """def work(rank):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", rank=rank, world_size=2)
    with open(f"{FOLDER}/{rank}.json", "w") as file:
        json.dump(found(rank), file)
    dist.destroy_process_group()

if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    sys.exit(sum(rank.exitcode != 0 for rank in ranks))
"""


def run_on_two_ranks(program, folder, *given):
    """Run a program on two ranks; return what its `found(rank)` returns on each."""
    file = folder / "ranks.py"
    file.write_text(f"{HEAD}{program}\n{TAIL}", encoding="utf-8")
    command = [sys.executable, str(file), str(folder), *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
