"""How a site's operations are run: by the kernel, or by its double in torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from jackfield.engines.vllm.tables import double
from jackfield.engines.vllm.tables.bank import Bank
from jackfield.engines.vllm.tables.buffers import Launch
from jackfield.engines.vllm.tables.columns import Columns
from jackfield.engines.vllm.tables.ops import Op
from jackfield.engines.vllm.tables.recipes import Recipe
from jackfield.interleave.site import Site

if TYPE_CHECKING:
    from jackfield.engines.vllm.tables.tables import Tables


def by_kernel(bank: Bank) -> Launch:
    """One launch for all rows. Triton is imported here: no other device has it."""
    from jackfield.engines.vllm.tables import kernel

    def launch(
        site: int, x: Tensor, residual: Tensor | None, slots: Tensor, kept: dict[torch.dtype, Tensor], stash: Tensor
    ) -> None:
        captured = kept.get(x.dtype, kept[torch.float32])
        ranges = bank.ranges[:, site]
        kernel.run(x, residual, slots, ranges, bank.ops, bank.numbers, captured, kept[torch.float32], stash)

    return launch


def by_torch(site_of: Callable[[int], Site], recipe_of: Callable[[int], Recipe], columns: Columns) -> Launch:
    """One after another for the recipes that rows say."""

    def launch(
        site: int, x: Tensor, residual: Tensor | None, slots: Tensor, kept: dict[torch.dtype, Tensor], stash: Tensor
    ) -> None:
        numbers: set[int] = set(cast("list[int]", slots.tolist()))
        for number in sorted(numbers - {-1}):
            recipe = recipe_of(number)
            ops = recipe.part.by_site.get(site_of(site), ())
            which = torch.nonzero(slots == number)[:, 0]

            def keep(op: Op, rows: Tensor, which: Tensor = which) -> None:
                first, buffer = columns.of(op), kept[rows.dtype]
                buffer[which, first : first + rows.shape[1]] = rows

            if ops:
                double.run(ops, recipe.acts, x, residual, which, keep, stash[:, : x.shape[1]])

    return launch


def launch_for(tables: "Tables", bank: Bank | None) -> Launch:
    """What runs operations on the device of `tables`, which has a bank where it has the kernel."""
    if bank is not None:
        return by_kernel(bank)
    return by_torch(tables.sites.__getitem__, tables.recipes.numbered.__getitem__, tables.columns)
