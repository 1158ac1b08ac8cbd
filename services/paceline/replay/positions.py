"""What a table knows of its collectors: the last block of each."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import ReplacedError
from paceline.replay.logged import Position
from paceline.replay.metrics import TableMetrics
from paceline.telemetry import get_logger
from paceline.v1 import rows_pb2


class Positions:
    """The last block of each collector, by its index. One caller at a time changes it, any number look."""

    def __init__(self, table: str, metrics: TableMetrics) -> None:
        self._table, self._metrics = table, metrics
        self._last: dict[int, Position] = {}

    def items(self) -> list[tuple[int, Position]]:
        """Every collector's index and last block, by index."""
        return sorted(self._last.copy().items())

    def find(self, header: rows_pb2.BlockHeader) -> Position | None:
        """The last block of a block's collector, if that block came before or is it; None: the block is new.

        Raises:
            ReplacedError: a newer incarnation of the collector has sent blocks.
        """
        last = self._last.get(header.collector_index)
        if last is None:
            return None
        if header.collector_incarnation < last.incarnation:
            raise ReplacedError(
                f"collector {header.collector_index} sent a block as incarnation {header.collector_incarnation}, "
                f"and incarnation {last.incarnation} took over: this process should end"
            )
        is_known = header.collector_incarnation == last.incarnation and header.sequence <= last.sequence
        return last if is_known else None

    def note(self, header: rows_pb2.BlockHeader) -> None:
        """A block is stored."""
        self._last[header.collector_index] = Position(header.collector_incarnation, header.sequence, header.row_count)

    def note_gap(self, header: rows_pb2.BlockHeader) -> None:
        """Report it if blocks are missing before this one, which is new."""
        last = self._last.get(header.collector_index)
        same = last is not None and last.incarnation == header.collector_incarnation
        expected = last.sequence + 1 if last is not None and same else 1
        if header.sequence > expected:
            self._metrics.sequence_gaps.inc()
            get_logger().warning(
                "sequence_gap",
                table=self._table,
                collector_index=header.collector_index,
                expected_sequence=expected,
                sequence=header.sequence,
                meaning="blocks that were acknowledged are gone; Redis lost them in a crash",
            )

    def update(self, positions: Mapping[int, Position]) -> None:
        """Take over what the record says."""
        self._last.update(positions)
