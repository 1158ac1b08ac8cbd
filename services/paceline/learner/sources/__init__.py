"""Where batches come from: drawn by replay, drawn here from rows that were followed, or taken from a queue.

`BatchSource` is all that the training loop knows.
"""

from paceline.learner.sources.batch import SHARD_BITS, Batch, BatchSource, RowCounts, RowsEndedError, ShardSource
from paceline.learner.sources.followed import FollowSource
from paceline.learner.sources.opening import open_followed, open_samples, require_ring_fits
from paceline.learner.sources.queued import QueueSource
from paceline.learner.sources.sampled import SampleSource
from paceline.learner.sources.sharded import QueueShards, ShardedSource

__all__ = [
    "SHARD_BITS",
    "Batch",
    "BatchSource",
    "FollowSource",
    "QueueShards",
    "QueueSource",
    "RowCounts",
    "RowsEndedError",
    "SampleSource",
    "ShardSource",
    "ShardedSource",
    "open_followed",
    "open_samples",
    "require_ring_fits",
]
