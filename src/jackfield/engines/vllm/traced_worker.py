"""A block beside a request of vLLM's: its copies may have been made for it, and what it writes may be done again."""

from typing import Any

from torch import Tensor

from jackfield.interleave.channel import WHOLE, Channel, Selection
from jackfield.interleave.site import Site
from jackfield.interleave.step import Rows
from jackfield.interleave.worker import Worker


class TracedWorker(Worker):
    """A worker that keeps what its block writes in a pass, by the site, so that the pass can be run again.

    `gathered` is the copy that was made of what it waits for, together with those of others.
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows, inside_operators=True)
        self.written: dict[Site, list[tuple[Channel, Selection, Any]]] = {}
        self.wrote = False  # in this pass or an earlier one
        self.gathered: tuple[Channel, Tensor] | None = None

    @property
    def stopped(self) -> bool:
        """Whether the request ends after the step that goes on. Its first one is always run, whatever comes before."""
        interleaver = vars(self).get("interleaver")  # none when it is closed
        return self._stopped and (interleaver is None or interleaver.step >= 0)

    def write_again(self, site: Site, passing: Any) -> None:
        """Writes what the block wrote at a site to what passes there now."""
        for channel, selection, value in self.written[site]:
            channel.write(passing, self, selection, value)

    def _given(self, value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    def _copy(self, channel: Channel, selection: Selection) -> Any:
        gathered, self.gathered = self.gathered, None
        if gathered is not None and gathered[0] is channel and selection is WHOLE:
            return gathered[1]
        return super()._copy(channel, selection)

    def _put(self, channel: Channel, selection: Selection, value: Any) -> None:
        self.wrote = True  # also where the write fails halfway
        super()._put(channel, selection, value)
        self.written.setdefault(channel.site, []).append((channel, selection, value))
