"""Pairs of runs: of sound ones nothing is to be said, faults are to be named where they are.

python tests/conformance/trust/runs.py [--only WORD] [--show]
"""

import argparse
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "numerics"))
import torch
from pairs_of_runs import FAULTS, SOUND, Pair

import narrowcast as nc


def of_transformers() -> dict[str, Pair]:
    """Forwards against decoding with the library's own caches, two attentions, and formats."""
    import transformers as t

    torch.manual_seed(0)
    small = {"vocab_size": 97}
    gpt2 = t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **small)).eval()
    llama = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | small
    of_llama = t.LlamaForCausalLM(t.LlamaConfig(num_key_value_heads=2, **llama)).eval()
    t5 = t.T5ForConditionalGeneration(
        t.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, **small)
    ).eval()
    whisper = t.WhisperForConditionalGeneration(t.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=20, max_target_positions=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **small)).eval()  # fmt: skip
    ids = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(1))
    sounds = {"input_features": torch.randn(2, 8, 40)}
    texts = {"input_ids": ids[:, :9]}

    def decoded(model, given, dtype="", encodes=False) -> Pair:
        name = "decoder_input_ids" if given else "input_ids"

        def made():
            with torch.no_grad(), nc.capture() as a, nc.autocast("cpu", dtype or "bf16", enabled=bool(dtype)):
                more = {"encoder_outputs": model.get_encoder()(**given)} if given else {}
                model(**more, **{name: ids}, use_cache=False)
            with torch.no_grad(), nc.capture() as b, nc.autocast("cpu", dtype or "bf16", enabled=bool(dtype)):
                more = {"encoder_outputs": model.get_encoder()(**given)} if given else {}
                cache = None
                for part in (ids[:, :6], *(ids[:, n : n + 1] for n in range(6, 16))):
                    cache = model(**more, **{name: part}, past_key_values=cache, use_cache=True).past_key_values
            return a, b

        return made

    def attentions(model, **given) -> Pair:
        def made():
            with torch.no_grad():
                runs = []
                for name in ("sdpa", "eager"):
                    model.set_attn_implementation(name)
                    runs.append(nc.capture(model, (), given | {"use_cache": False}))
                return runs[0], runs[1]

        return made

    def formats(model, **given) -> Pair:
        def made():
            with torch.no_grad():
                return tuple(nc.capture(model, (), given | {"use_cache": False}, dtype=d) for d in (None, "bf16"))

        return made

    return {
        "GPT-2, cache": decoded(gpt2, {}), "GPT-2, cache, bf16": decoded(gpt2, {}, "bf16"),
        "Llama, cache": decoded(of_llama, {}), "Llama, cache, bf16": decoded(of_llama, {}, "bf16"),
        "T5, cache": decoded(t5, texts), "T5, cache, bf16": decoded(t5, texts, "bf16"),
        "Whisper, cache": decoded(whisper, sounds), "Whisper, cache, bf16": decoded(whisper, sounds, "bf16"),
        "Llama, two attentions": attentions(of_llama, input_ids=ids),
        "GPT-2, two attentions": attentions(gpt2, input_ids=ids),
        "T5 in bf16": formats(t5, input_ids=ids, decoder_input_ids=ids),
        "Llama in bf16": formats(of_llama, input_ids=ids),
        "Whisper in bf16": formats(whisper, **sounds, decoder_input_ids=ids),
    }  # fmt: skip


def scored(only: str, show: bool) -> Iterator[tuple[str, bool]]:
    """Of each pair its kind, and whether what is said of it is right."""
    for name, pair in (SOUND | of_transformers()).items():
        if only in name:
            found = nc.compare_runs(*pair())
            right = found.verdict != "values differ"
            print(f"{'' if right else 'FALSE ALARM '}sound: {name}: {found.verdict}", flush=True)
            if show or not right:
                print(found)
            yield "sound", right
    for name, (pair, where) in FAULTS.items():
        if only in name:
            found = nc.compare_runs(*pair())
            named = [str(row.b[0]) for row in found.producers[:1]] + [str(one.id) for one in found.alone[:5]]
            right = found.verdict == "values differ" and any(where in name for name in named)
            print(f"{'' if right else 'MISSED '}fault: {name}: {found.verdict}", flush=True)
            if show or not right:
                print(found)
            yield "fault", right


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_args()
    found = list(scored(asked.only, asked.show))
    for kind in ("sound", "fault"):
        rights = [right for which, right in found if which == kind]
        print(f"{kind}: {sum(rights)} of {len(rights)} right")
    return 0 if all(right for _, right in found) else 1


if __name__ == "__main__":
    sys.exit(main())
