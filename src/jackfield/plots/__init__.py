"""Pictures of what a model computes: arrays in, a matplotlib Figure out.

Nothing here loads a model, opens a window or touches pyplot's state. A figure is kept with `figure.savefig(path)`, and
a notebook shows the one a cell ends with. Needs the extra `plots`.
"""

from jackfield.plots.lens import logit_lens
from jackfield.plots.pattern import attention_heads, attention_pattern

__all__ = ["attention_heads", "attention_pattern", "logit_lens"]
