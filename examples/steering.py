"""A steering vector out of a difference of means: what layer 12 says about glad sentences, less what about sad ones.

python examples/steering.py joy.safetensors
jackfield generate "I think that today" --steer joy.safetensors --layer 12 --scale 1
"""

import sys

import torch
from safetensors.torch import save_file

import jackfield as jf

LAYER = 12
GLAD = [
    "I love this so much, it is wonderful",
    "What a beautiful, happy day",
    "She laughed with joy and delight",
    "This is the best thing that ever happened",
]
SAD = [
    "I hate this so much, it is terrible",
    "What an awful, miserable day",
    "She cried with grief and despair",
    "This is the worst thing that ever happened",
]


def last_token(model: jf.Model, t: object) -> torch.Tensor:
    """The stream at the prompt's last token [d_model]."""
    return model.layers[LAYER].layer_output[0, -1]


def mean(model: jf.Model, prompts: list[str]) -> torch.Tensor:
    """The mean of that over prompts [d_model]."""
    return torch.stack([result.returned for result in model.run(prompts, last_token)]).mean(0)


def main() -> None:
    """Write the vector to the file that the command line names."""
    with jf.Model.demo() as model:
        vector = mean(model, GLAD) - mean(model, SAD)
    save_file({"vector": vector.cpu().contiguous()}, sys.argv[1])
    print(f"The direction from sad to glad at layer {LAYER}, of norm {vector.norm():.1f}, is in {sys.argv[1]}")


if __name__ == "__main__":
    main()
