"""Runs the kernel and its double on random recipes and rows, and says how far apart they are, as JSON per case.

A program of its own: on a CPU Triton's interpreter has to be asked for before Triton is imported.
"""

import json
import random
import sys
from typing import Any

import torch
from torch import Tensor

from jackfield.engines.vllm.tables.bank import Bank
from jackfield.engines.vllm.tables.buffers import Launch
from jackfield.engines.vllm.tables.columns import Columns
from jackfield.engines.vllm.tables.launching import by_kernel, by_torch
from jackfield.engines.vllm.tables.ops import EDITS, Act, Kept, Kind, Numbers, Op, Part
from jackfield.engines.vllm.tables.recipes import Recipe
from jackfield.interleave.site import Port, Site

SITES = [Site("a", Port.OUTPUT), Site("b", Port.OUTPUT)]
HEADS = 4


def random_op(
    chance: random.Random, generator: torch.Generator, site: Site, width: int, dtype: torch.dtype, number: int
) -> tuple[Op, Act]:
    """Any operation, on the row or on one head of it, and its numbers."""
    kind = Kind(chance.randrange(len(Kind)))
    of_head = kind not in (Kind.STASH, Kind.RESTORE) and chance.random() < 0.4
    size = width // HEADS if of_head else width
    start = chance.randrange(HEADS) * size if of_head else 0
    count = {Kind.PROJECT: 3, Kind.PROBE: chance.choice([1, 3, 11])}.get(kind, 1)
    vectors = torch.randn(count, size, generator=generator)
    if kind == Kind.PROJECT:
        vectors = torch.linalg.qr(vectors.T)[0].T.contiguous()
    numbers = Numbers.of(vectors, torch.randn(count, generator=generator) if kind == Kind.PROBE else None)
    kept = None
    if kind in (Kind.CAPTURE, Kind.PROBE):
        wide = size if kind == Kind.CAPTURE else count
        name = f"{kind}{chance.random()}"
        kept = Kept(name, site, wide, dtype if kind == Kind.CAPTURE else torch.float32, ((start, size),))
    has_numbers = kind not in (Kind.SCALE, Kind.CAPTURE, Kind.STASH, Kind.RESTORE)
    scale = chance.choice([0.0, -1.5, 0.25, 2.0])
    summed = not of_head and chance.random() < 0.5
    op = Op(kind, site, summed, start, size, number, count if has_numbers else 0, kept)
    return op, Act(scale, numbers if has_numbers else None)


class Case:
    """The same rows, recipes and buffers, to be run twice."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str, width: int, rows: int) -> None:
        self.chance, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype, self.device, self.width, self.rows = dtype, torch.device(device), width, rows
        self.columns = Columns()
        self.recipes: dict[int, Recipe] = {}
        self.bank = Bank({site: i for i, site in enumerate(SITES)}, self.device, numbers=2**18, ops=512, recipes=16)
        for _ in range(5):
            count = self.chance.randrange(1, 5)
            made = [
                (site, random_op(self.chance, self.generator, site, width, dtype, number))
                for number, site in enumerate(site for site in SITES for _ in range(count))
            ]
            by_site: dict[Site, list[Op]] = {site: [] for site in SITES}
            for site, (op, _) in made:
                by_site[site].append(op)
                if op.kept is not None:
                    self.columns.take(op.kept)
            part, acts = Part(by_site), [act for _, (_, act) in made]
            entry = self.bank.add(part, acts, self.columns)
            assert entry is not None
            self.recipes[entry.number] = Recipe(entry.number, (Any, frozenset()), part, acts, entry)
        numbers = [*self.recipes, -1]
        self.bank.send()
        slots = [self.chance.choice(numbers) for _ in range(rows)]
        self.slots = torch.tensor(slots, dtype=torch.int32, device=self.device)
        given = torch.randn(2, 2, rows, width, generator=self.generator).to(self.device, dtype)
        given[0, 0, :, 3] = -torch.inf if self.chance.random() < 0.2 else 1.0
        self.given = given

    def run(self, launch: Launch, *, halves: bool) -> list[Tensor]:
        """Everything that a run leaves behind."""
        x, other = self.given[0].clone(), self.given[1].clone()
        stash = torch.zeros(self.rows, self.width, dtype=self.dtype, device=self.device)
        left: list[Tensor] = []
        for number, site in enumerate(SITES):
            kept = {
                dtype: torch.zeros(
                    self.rows, self.columns.widths.get((site, dtype), 0) or 1, dtype=dtype, device=self.device
                )
                for dtype in {self.dtype, torch.float32}
            }
            launch(number, x[number], other[number] if halves else None, self.slots, kept, stash)
            left += kept.values()
        return [*left, x, other, stash]


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, of the largest entry of its row; infinity where one is not finite and the other is."""
    one, other = one.float(), other.float()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    one, other = (torch.nan_to_num(each, 0.0, 0.0, 0.0) for each in (one, other))
    apart = (one - other).abs().amax(-1) / other.abs().amax(-1).clamp_min(1.0)
    return float(apart.max())


def spoil(bank: Bank, field: str) -> None:
    """Has one field of all operations say something else."""
    if field:
        column, wrong = {"scale": (6, 0x3F000000), "bank": (3, 5), "column": (5, 1), "summed": (0, 16)}[field]
        bank.ops[:, column] = bank.ops[:, column] ^ wrong


def main(device: str, seeds: int, spoiled: str = "") -> None:
    """Prints one line per case, and per case how many rows were changed."""
    for seed in range(seeds):
        for dtype in (torch.float32, torch.bfloat16):
            width = random.Random(seed).choice([16, 48, 128])
            case = Case(seed, dtype, device, width, rows=9)
            spoil(case.bank, spoiled)
            double = by_torch(SITES.__getitem__, case.recipes.__getitem__, case.columns)
            for halves in (True, False):
                with torch.inference_mode():
                    got, want = case.run(by_kernel(case.bank), halves=halves), case.run(double, halves=halves)
                edited = int((want[-3] != case.given[0]).any(-1).sum())
                kinds = sorted(
                    {op.kind.name for each in case.recipes.values() for ops in each.part.by_site.values() for op in ops}
                )
                line: dict[str, Any] = {"seed": seed, "dtype": str(dtype), "halves": halves, "edited": edited}
                line |= {"apart": max(map(distance, got, want)), "kinds": kinds}
                print(json.dumps(line), flush=True)
    assert EDITS


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
