"""The pictures in docs/pictures, made from the sample model: python examples/pictures.py docs/pictures."""

import sys
from pathlib import Path

import torch

import jackfield as jf
from jackfield.plots import attention_heads, logit_lens

PROMPT = "The capital of France is"
LAYER = 23


def read(model: jf.Model, t: object) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's pattern [head query key], and each layer's next-token probabilities [layer token vocab]."""
    lens = []
    for number, layer in enumerate(model.layers):
        if number == LAYER:
            pattern = layer.attention_probabilities[0]
        lens.append(model.project_on_vocab(layer.layer_output)[0].softmax(-1))
    return pattern, torch.stack(lens)


def main() -> None:
    """Write both pictures into the folder that the command line names."""
    folder = Path(sys.argv[1])
    with jf.Model.demo() as model:
        result = model.run(PROMPT, read)
        pattern, lens = result.returned
        tokens = [model.tokenizer.decode([number]) for number in result.prompt_token_ids]
        best = lens.max(-1)
        tops = [[model.tokenizer.decode([number]) for number in row] for row in best.indices.tolist()]
    name = "SmolLM2-135M-Instruct"
    attention_heads(pattern, tokens, title=f"{name}, layer {LAYER}").savefig(folder / "patterns.png", dpi=100)
    logit_lens(tops, best.values, tokens=tokens, title=f"{name}: {PROMPT}").savefig(folder / "lens.png", dpi=100)


if __name__ == "__main__":
    main()
