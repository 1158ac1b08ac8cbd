"""What a Redis holds of a run, read as it lies there and not through the code under test."""

from __future__ import annotations

from collections.abc import Iterator

import redis

from paceline.v1 import rows_pb2


def read_record(
    client: redis.Redis, run_id: str, table: str = "transitions"
) -> Iterator[tuple[rows_pb2.BlockHeader, bytes]]:
    """Header and payload of every block, in order. A block whose payload is missing fails the test."""
    prefix = f"paceline:{{{run_id}}}:table:{table}"
    for identifier, fields in client.xrange(f"{prefix}:blocks"):
        header = rows_pb2.BlockHeader.FromString(fields[b"header"])
        assert int(identifier.split(b"-")[0]) == header.first_row + header.row_count
        payload = client.get(f"{prefix}:block:{header.first_row}")
        assert payload is not None, f"the block of row {header.first_row} has no payload"
        yield header, payload


def keys_of_payloads(client: redis.Redis, run_id: str, table: str = "transitions") -> set[int]:
    """First rows of the payloads that are there, in the index or not."""
    prefix = f"paceline:{{{run_id}}}:table:{table}:block:"
    return {int(key.rpartition(b":")[2]) for key in client.scan_iter(f"{prefix}*", count=1000)}
