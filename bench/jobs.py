"""What is measured: the jobs, their prompts and lengths, and how the processes name what they time.

A *job* is a model and a prompt. In a job every library has some *cases*: a case is called, and gives back the tensors
that it read. Only torch is needed here: this is read in every library's own environment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from torch import Tensor

Case: TypeAlias = Callable[[], Sequence[Tensor]]
Cases: TypeAlias = dict[str, Case]

# Plain transformers, and what a careful user would write on top of it: forward hooks, `output_attentions`.
PLAIN: Final = "transformers"
BY_HAND: Final = "by hand"
LIBRARIES: Final = ("jackfield", "nnsight", "TransformerLens")

# The sample model goes on with this for more than 32 tokens: nobody ends early.
PROMPT: Final = "The history of the city of Paris begins in"
NEW_TOKENS: Final = 32
PROMPT_TOKENS: Final = 256
LONG_TOKENS: Final = 1024
LONG_LAYER: Final = 15
OVERHEAD_TOKENS: Final = 10
OVERHEAD_LAYERS: Final = 24
OVERHEAD_WIDTH: Final = 64


@dataclass(frozen=True, slots=True)
class Job:
    """A model and a prompt, and about how many seconds all processes together may time it on this machine."""

    name: str
    budget_s: float

    def repeats(self, once_s: float, rounds: int) -> int:
        """How often each process goes through its cases in a turn, where all of them take `once_s` to do it once."""
        return max(1, round(self.budget_s / rounds / once_s))


JOBS: Final = (Job("generation", 110.0), Job("prompt", 90.0), Job("overhead", 50.0))


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """A case whose memory is measured in a process of its own, in `library`'s environment."""

    library: str
    job: str
    key: str


def key(library: str, case: str) -> str:
    """A case's name among those of its process, which has plain transformers' as well."""
    return f"{library}.{case}"


def _memory(library: str, job: str, *cases: str, of: str | None = None) -> list[MemoryCase]:
    return [MemoryCase(library, job, key(of or library, case)) for case in cases]


MEMORY: Final = (
    *_memory("jackfield", "long", "forward", "generate", of=PLAIN),
    *_memory("jackfield", "long", "layer", of=BY_HAND),
    *(each for library in LIBRARIES for each in _memory(library, "long", "layer")),
    *_memory("jackfield", "prompt", "forward", "generate", of=PLAIN),
    *_memory("jackfield", "prompt", "patterns", of=BY_HAND),
    *(each for library in LIBRARIES for each in _memory(library, "prompt", "patterns")),
)
