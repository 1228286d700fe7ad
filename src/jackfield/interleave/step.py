"""Whose rows are whose in one step of a batch, and where they stand in the request.

Step 0 is the whole prompt, step n the n-th generated token going back in. Prompts of different lengths stand in one
batch padded on the left; what a block sees is cut here, so that padding never reaches it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one request in a left-padded batch: its index, its padding, and the tokens of its prompt."""

    index: int
    pad: int
    prompt_length: int

    def tokens(self, step: int) -> slice:
        """This step's rows on the token axis of a padded tensor."""
        return slice(self.pad, None) if step == 0 else slice(None)

    def num_tokens(self, step: int) -> int:
        """How many rows this step has."""
        return self.prompt_length if step == 0 else 1

    def num_keys(self, step: int) -> int:
        """How many tokens the request has at this step: the length of the key axis."""
        return self.prompt_length + step

    def positions(self, step: int) -> range:
        """The absolute positions of this step's rows."""
        last = self.num_keys(step)
        return range(last - self.num_tokens(step), last)
