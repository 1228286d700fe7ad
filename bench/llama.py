"""`python -m bench.llama`: the native Llama beside transformers' `generate`, the same weights and tokens, as ratios.

Both run in one process and take turns, another one first each time; a ratio is of two times a moment apart.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import AutoModelForCausalLM

import jackfield as jf
from jackfield.engines.transformers.sample import sample_model

LONG_TOKENS = 1024
MOST = {"decode, batch 1": 1.0, "decode, batch 8": 1.0, f"a prompt of {LONG_TOKENS} tokens": 1.1}

Case = Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    for name, (ours, theirs) in cases(options.tokens).items():
        ratios = sorted(timed(ours, theirs, options.repeats))
        lower, median, upper = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        met = "met" if median <= MOST[name] else "NOT MET"
        print(f"{name}: {median:.3f} of transformers' time ({lower:.3f} to {upper:.3f}); {MOST[name]:.1f} {met}")


def cases(tokens: int) -> dict[str, tuple[Case, Case]]:
    """What is timed: ours, and theirs."""
    folder = sample_model()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    ours = jf.Model(folder, engine="llama", max_seq_len=LONG_TOKENS + 8, max_batch_size=8)
    ids = torch.randint(5, 40000, (8, 16), generator=torch.Generator().manual_seed(0))
    long = torch.randint(5, 40000, (1, LONG_TOKENS), generator=torch.Generator().manual_seed(1))
    jobs = {"decode, batch 1": (ids[:1], tokens), "decode, batch 8": (ids, tokens)}
    jobs[f"a prompt of {LONG_TOKENS} tokens"] = (long, 1)
    return {
        name: (partial(_ours, ours, prompts, new), partial(_theirs, theirs, prompts, new))
        for name, (prompts, new) in jobs.items()
    }


def timed(ours: Case, theirs: Case, repeats: int) -> list[float]:
    """Ours over theirs, pair by pair. ValueError where they do not make the same tokens."""
    if ours() != theirs():
        raise ValueError("the two do not make the same tokens")
    ratios: list[float] = []
    for repeat in range(repeats):
        seconds = {case: _seconds(case) for case in ((ours, theirs) if repeat % 2 else (theirs, ours))}
        ratios.append(seconds[ours] / seconds[theirs])
    return ratios


def _seconds(case: Case) -> float:
    began = time.perf_counter()
    case()
    return time.perf_counter() - began


def _ours(model: jf.Model, prompts: torch.Tensor, new: int) -> list[list[int]]:
    results = model.run(prompts.tolist(), max_tokens=new, ignore_eos=True)
    return [result.token_ids for result in results]


def _theirs(model: torch.nn.Module, prompts: torch.Tensor, new: int) -> list[list[int]]:
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "eos_token_id": None}
    found = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    return found[:, prompts.shape[1] :].tolist()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.llama", description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens when decoding")
    parser.add_argument("--repeats", type=int, default=12, help="pairs of times")
    return parser


if __name__ == "__main__":
    main()
