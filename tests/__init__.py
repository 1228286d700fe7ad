"""Tests of jackfield. They mirror `src/`; `zoo` and `reference` are what they compare with.

`type_checker` is imported because jaxtyping's pytest option looks for it as an attribute of this package.
"""

from tests import type_checker as type_checker
