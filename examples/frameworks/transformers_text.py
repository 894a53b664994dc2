"""transformers' Trainer with PrecisionMixin: a small GPT-2 on the text that Python ships, byte by byte."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import narrowcast as nc
from narrowcast.integrations.training import TrainingPrecision
from narrowcast.integrations.transformers import PrecisionMixin

STEPS, ACCUMULATED, BATCH, LENGTH, CLIP, RATE = 16, 2, 8, 64, 1.0, 1e-3
POLICY = nc.Policy.native().with_rules(
    nc.Rule("aten.linear", "full", module="lm_head", reason="logits in fp32"), name="text"
)


class Text(Dataset):
    """Pieces of the reference that `help()` shows, as bytes."""

    def __init__(self, first: int, count: int) -> None:
        self.bytes = "".join(topics.values()).encode()
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        start = (self.first + number) * LENGTH
        ids = torch.tensor(list(self.bytes[start : start + LENGTH]))
        return {"input_ids": ids, "labels": ids}


def make() -> GPT2LMHeadModel:
    """The same small GPT-2 each time, of 0.1 million parameters."""
    set_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=LENGTH,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


class OurTrainer(PrecisionMixin, Trainer):
    """All that a user writes."""

    def get_train_dataloader(self):
        """In order, so that the plain loop can read the same batches."""
        return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset, BATCH))


class Losses(TrainerCallback):
    """The loss of each step, as the Trainer logs it, but not rounded."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Each step is logged."""
        if "loss" in logs:
            self.seen.append(logs["loss"])


def fit(dtype: str, folder: Path, steps: int, resume: str | None = None, **settings):
    """Train, from the checkpoint on if there is one."""
    args = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=RATE,
        gradient_accumulation_steps=ACCUMULATED, max_grad_norm=CLIP, lr_scheduler_type="constant", logging_steps=1,
        save_steps=STEPS // 2, report_to=[], use_cpu=True, disable_tqdm=True, bf16=False, fp16=False,
        optim="adamw_torch", weight_decay=0.0, dataloader_pin_memory=False, logging_nan_inf_filter=False,
        per_device_eval_batch_size=BATCH,
    )  # fmt: skip
    losses = Losses()
    trainer = OurTrainer(
        model=make(), args=args, train_dataset=Text(0, STEPS * ACCUMULATED * BATCH), eval_dataset=Text(5000, 64),
        callbacks=[losses], precision=TrainingPrecision(policy=POLICY, dtype=dtype, **settings),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer, losses.seen


def plain_losses(dtype: str) -> list[float]:
    """The loop without a framework."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == "fp16")
    losses, total = [], torch.tensor(0.0)
    for number, batch in enumerate(torch.utils.data.DataLoader(Text(0, STEPS * ACCUMULATED * BATCH), BATCH), 1):
        tokens = BATCH * LENGTH * ACCUMULATED  # the Trainer divides by the tokens of the whole step
        with nc.autocast("cpu", dtype, policy=POLICY) if dtype else nullcontext():
            loss = model(**batch, num_items_in_batch=torch.tensor(tokens)).loss
        scaler.scale(loss).backward()
        total += loss.detach()
        if number % ACCUMULATED == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(total.item())
            total = torch.tensor(0.0)
    return losses


def main() -> None:
    """Train, compare, resume from the middle, evaluate, generate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    dtype = parser.parse_args().dtype
    folder = Path(tempfile.mkdtemp())
    trainer, losses = fit(dtype, folder, STEPS, ledger_every=4, ledger_to=folder / "ledgers")
    _, resumed = fit(dtype, folder, STEPS, str(folder / f"checkpoint-{STEPS // 2}"))
    plain = plain_losses(dtype)
    words = trainer.model.generate(torch.tensor([list(b"The ")]), max_new_tokens=8, do_sample=False)
    print(f"transformers, {dtype}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, "
          f"evaluation {trainer.evaluate()['eval_loss']:.4f}, {words.shape[1] - 4} bytes generated")  # fmt: skip
    same, again = losses == plain, resumed[-STEPS // 2 :] == plain[STEPS // 2 :]
    print(f"  as the plain loop, bit for bit: {same}; after a checkpoint in the middle: {again}")
    print(f"  {trainer.precision.ledger!r}")
    if not (same and again) or not losses[-1] < losses[0]:
        raise SystemExit(f"transformers: losses differ\n{losses}\n{plain}\n{resumed}")


if __name__ == "__main__":
    sys.exit(main())
