"""What DescribeTables says of a table."""

from __future__ import annotations

from paceline.replay.table import Table
from paceline.rpc.wire import row_spec_to_wire
from paceline.v1 import replay_pb2 as pb


def describe(table: Table) -> pb.TableDescription:
    """The message that describes a table."""
    settings, config, tiers, memory = table.limiter.settings, table.config, table.tiers, table.memory
    limiter = pb.LimiterDescription(
        min_row_count=settings.min_rows,
        samples_per_insert=settings.samples_per_insert,
        window_row_count=settings.window_rows,
    )
    whole = table.is_whole  # before the rows are counted: of a whole table all are
    limiter.deadline.FromMilliseconds(round(settings.deadline_seconds * 1000))
    return pb.TableDescription(
        name=table.name,
        row_spec=row_spec_to_wire(table.spec),
        capacity_row_count=table.capacity_rows,
        row_count=memory.row_count,
        block_count=tiers.block_count,
        inserted_row_count=tiers.inserted,
        sampled_row_count=table.limiter.sampled,
        memory_bytes=memory.memory_bytes,
        kind=config.kind,
        sampler=memory.settings.sampler,
        remover=config.remover,
        max_times_sampled=config.max_times_sampled,
        first_row=memory.first_row,
        consumed_row=tiers.consumed if config.queue else None,
        dropped_row_count=tiers.dropped,
        log_bytes=tiers.log_bytes,
        whole=whole,
        limiter=limiter,
        collectors=[
            pb.CollectorPosition(
                collector_index=collector,
                collector_incarnation=position.incarnation,
                sequence=position.sequence,
            )
            for collector, position in tiers.positions.items()
        ],
    )
