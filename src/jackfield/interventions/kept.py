"""What captures and probes keep of a request, from step to step: all rows, the last, or the mean."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from jackfield.errors import NotReached
from jackfield.interventions.places import Place


class Kept(ABC):
    """Rows of one place, the newest last: each [tokens, ...], of which the last axis may grow with the keys."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._unseen = -torch.inf if place.name == "attention_scores" else 0.0  # what a key holds that came later

    @abstractmethod
    def add(self, rows: Tensor) -> None:
        """Takes the rows of a step. They are the keeper's own from then on."""

    @abstractmethod
    def result(self) -> Tensor:
        """What is kept of all of them."""

    def results(self) -> Mapping[str, Tensor]:
        """The same under the names that it has in `Result.saved`."""
        return {str(self.place): self.result()}

    def widened(self, rows: Tensor, width: int) -> Tensor:
        """Rows of fewer keys, as rows of `width`."""
        missing = width - rows.shape[-1]
        return torch.nn.functional.pad(rows, (0, missing), value=self._unseen) if missing else rows


class AllRows(Kept):
    """Every row: [tokens, ...]; `nothing` [0, ...] where none came."""

    def __init__(self, place: Place, nothing: Tensor) -> None:
        super().__init__(place)
        self._rows: list[Tensor] = []
        self._nothing = nothing

    def add(self, rows: Tensor) -> None:
        self._rows.append(rows)

    def result(self) -> Tensor:
        if not self._rows:
            return self._nothing
        if len(self._rows) == 1:
            return self._rows[0].contiguous()
        if self._rows[0].ndim == 1:
            return torch.cat(self._rows)
        width = self._rows[-1].shape[-1]
        return torch.cat([self.widened(rows, width) for rows in self._rows])


class LastRow(Kept):
    """The last row that came: [...]."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._row: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        self._row = rows[-1].clone()

    def result(self) -> Tensor:
        return _came(self._row, self.place)


class MeanRow(Kept):
    """The mean of the rows, in float32 (float64 for a float64 model): [...]."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, rows: Tensor) -> None:
        self.add_sum(rows.to(torch.promote_types(rows.dtype, torch.float32)).sum(0), len(rows))

    def add_sum(self, total: Tensor, count: int) -> None:
        """Takes the sum of `count` rows, in the dtype of the mean."""
        self._count += count
        if self._sum is not None:
            total = total + (self.widened(self._sum, total.shape[-1]) if total.ndim else self._sum)
        self._sum = total

    def result(self) -> Tensor:
        return _came(self._sum, self.place) / self._count


class Largest(Kept):
    """The `count` largest of each row, and where in the row they are. `values` and `indices` keep them alike."""

    def __init__(self, place: Place, count: int, values: Kept, indices: Kept) -> None:
        super().__init__(place)
        self._count, self._values, self._indices = count, values, indices

    def add(self, rows: Tensor) -> None:
        values, indices = rows.topk(self._count)
        self._values.add(values)
        self._indices.add(indices)

    def result(self) -> Tensor:
        return self._values.result()

    def results(self) -> Mapping[str, Tensor]:
        return {str(self.place): self.result(), indices_of(self.place): self._indices.result()}


class LargestOfMean(Kept):
    """The `count` largest of the rows' mean, and where in it they are."""

    def __init__(self, place: Place, count: int) -> None:
        super().__init__(place)
        self._count, self._mean = count, MeanRow(place)

    def add(self, rows: Tensor) -> None:
        self._mean.add(rows)

    def result(self) -> Tensor:
        return self._mean.result().topk(self._count).values

    def results(self) -> Mapping[str, Tensor]:
        values, indices = self._mean.result().topk(self._count)
        return {str(self.place): values, indices_of(self.place): indices}


def indices_of(place: Place) -> str:
    """Under which name `Result.saved` has which directions the largest products at a place are of."""
    return f"{place}.indices"


def _came(found: Tensor | None, place: Place) -> Tensor:
    if found is None:
        raise NotReached(f"{place} was to be reduced over positions of which none came before the request ended.")
    return found
