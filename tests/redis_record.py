"""What a Redis holds of a run, read as it lies there and not through the code under test."""

from __future__ import annotations

from collections.abc import Iterator

import redis

from contract.memory_log import MemoryLog
from paceline.replay.blocks import HeldBlock
from paceline.replay.log import RedisLog
from paceline.replay.logged import LogState
from paceline.v1 import rows_pb2


def read_record(
    client: redis.Redis, run_id: str, table: str = "transitions"
) -> Iterator[tuple[rows_pb2.BlockHeader, bytes]]:
    """Header and payload of every block, in order. A block whose payload is missing fails the test."""
    prefix = f"paceline:{{{run_id}}}:table:{table}"
    headers: list[rows_pb2.BlockHeader] = []
    for identifier, fields in client.xrange(f"{prefix}:blocks"):
        header = rows_pb2.BlockHeader.FromString(fields[b"header"])
        assert int(identifier.split(b"-")[1]) == header.first_row + header.row_count
        while headers and headers[-1].first_row + headers[-1].row_count > header.first_row:
            headers.pop()  # what was written later counts
        headers.append(header)
    for header in headers:
        payload = client.get(f"{prefix}:block:{header.first_row}")
        assert payload is not None, f"the block of row {header.first_row} has no payload"
        yield header, payload


def keys_of_payloads(client: redis.Redis, run_id: str, table: str = "transitions") -> set[int]:
    """First rows of the payloads that are there, in the index or not."""
    prefix = f"paceline:{{{run_id}}}:table:{table}:block:"
    return {int(key.rpartition(b":")[2]) for key in client.scan_iter(f"{prefix}*", count=1000)}


def held(log: RedisLog | MemoryLog, *first_rows: int, rows: int = 10) -> list[HeldBlock]:
    """Blocks of so many rows, as a process knows them that wrote them."""
    return [HeldBlock(first_row, rows, 0, None, log.epoch) for first_row in first_rows]


def settle(log: RedisLog | MemoryLog) -> LogState | None:
    """Begin an epoch as a process does that takes the record as it is; what it says, or None where there is none."""
    view = log.view()
    if view is None:
        return None
    log.settle(view, view.state)
    return view.state
