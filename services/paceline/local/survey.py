"""What a run's record holds, in words and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.config import redact_url
from paceline.config.models import SHARD
from paceline.replay.archive_format import Manifest
from paceline.replay.record import RunRecord, TableSurvey


def to_text(record: RunRecord, tables: Sequence[TableSurvey]) -> str:
    """A few lines for each table."""
    owners = ", ".join(owner or "nobody" for owner in record.owners())
    lines = [f"run {record.run_id} in {record.shown}: {len(tables)} table(s), owned by replay process {owners}"]
    for table in tables:
        state, shard = table.state, "" if table.shard is None else f" of shard {table.shard}"
        columns = ", ".join(
            f"{column.name} {column.dtype}{list(column.shape) if column.shape else ''}"
            for column in state.row_spec.columns
        )
        lines += [
            f"table {table.table}{shard}",
            f"  rows       {table.row_count} in {table.block_count} blocks, keys {table.first_row} to {state.inserted}",
            f"  bytes      {table.payload_bytes} of payloads, {state.row_spec.row_bytes} of a row in memory",
            f"  columns    {columns}",
            f"  counters   {state.inserted} inserted, {state.sampled} sampled, {state.consumed} consumed, "
            f"{state.dropped} dropped; {table.page_count} pages of priorities",
            *(
                f"  collector  {collector}: incarnation {position.incarnation}, block {position.sequence}"
                for collector, position in sorted(state.positions.items())
            ),
            f"  saved      {_ago(table.seconds_since_save)}",
            f"  damage     {_damage(table)}",
            *(
                f"             rows {block.first_row} to {block.first_row + block.row_count}: {block.problem}"
                for block in table.damage
            ),
        ]
    return "\n".join(lines)


def to_json(record: RunRecord, tables: Sequence[TableSurvey]) -> str:
    """The same for programs."""
    described = {"run_id": record.run_id, "redis_url": record.shown, "owners": record.owners()}
    return json.dumps({**described, "tables": [_as_dict(table) for table in tables]}, indent=2)


def describe_archive(manifest: Manifest, what: str) -> str:
    """A line on an archive that was written or read."""
    blocks = sum(table.block_count for table in manifest.tables)
    rows = sum(table.row_count for table in manifest.tables)
    size = sum(table.payload_bytes for table in manifest.tables)
    damaged = sum(table.damaged_blocks for table in manifest.tables)
    left_out = f"; {damaged} damaged block(s) left out" if damaged else ""
    return f"run {manifest.run_id}: {rows} rows in {blocks} blocks, {size} bytes, {what}{left_out}"


def describe_use(manifest: Manifest, run_id: str, *, folder: Path | None, redis_url: str | None) -> str:
    """The commands that use what was imported into the folder of a run, or into the Redis of `redis_url`."""
    shards = "" if manifest.shards == 1 else f" replay.shards={manifest.shards}"
    if folder is None:
        url = None if redis_url is None else redact_url(redis_url)
        look = "" if url is None else f" --redis-url {url}"
        look += f" --shards {manifest.shards}" if SHARD in (url or "") else ""
        serve = "" if url is None else f" replay.redis_url={url}"
        each = f"{shards} --shard 0 (to {manifest.shards - 1})" if shards else ""
        return (
            f"look at it: paceline replay inspect {run_id}{look}\n"
            f"serve it, with the settings of run {manifest.run_id} as CONFIG: "
            f"paceline replay CONFIG run.id={run_id}{serve} --resume{each}"
        )
    look = f"look at it: paceline replay inspect {folder}"
    if manifest.settings is None:
        return (
            f"{look}\nthe archive has no settings, so the folder has the defaults; go on with it, with the settings of "
            f"run {manifest.run_id} as CONFIG: "
            f"paceline train CONFIG run.id={run_id} run.directory={folder.parent}{shards} --resume"
        )
    return f"{look}\ngo on with it: paceline train {folder} --resume"


def _as_dict(table: TableSurvey) -> dict[str, Any]:
    state = table.state
    return {
        "table": table.table,
        "shard": table.shard,
        "columns": [
            {"name": column.name, "dtype": column.dtype, "shape": column.shape} for column in state.row_spec.columns
        ],
        "row_bytes": state.row_spec.row_bytes,
        "first_row": table.first_row,
        "row_count": table.row_count,
        "block_count": table.block_count,
        "payload_bytes": table.payload_bytes,
        "page_count": table.page_count,
        "inserted": state.inserted,
        "sampled": state.sampled,
        "consumed": state.consumed,
        "dropped": state.dropped,
        "limiter": json.loads(state.limiter_json or "null"),
        "collectors": [
            {
                "collector_index": collector,
                "incarnation": position.incarnation,
                "sequence": position.sequence,
                "stored_row_count": position.stored_row_count,
            }
            for collector, position in sorted(state.positions.items())
        ],
        "seconds_since_save": table.seconds_since_save,
        "checked": table.checked,
        "damage": [
            {"first_row": block.first_row, "row_count": block.row_count, "problem": block.problem}
            for block in table.damage
        ],
    }


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.0f} s ago"


def _damage(table: TableSurvey) -> str:
    if not table.checked:
        return "not looked for; --check reads every block"
    return f"{len(table.damage)} block(s)" if table.damage else "none"
