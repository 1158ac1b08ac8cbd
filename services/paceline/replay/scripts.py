"""What changes in Redis in one atomic step, as Lua.

Every script first looks whether this process still owns the run. Each ends in one word; `paceline.replay.log` says what
follows from it. Keys: paceline:{run}:owner, ...:meta, and of the table ...:spec, :state, :positions, :blocks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Script:
    """Lua text and its SHA-1, by which Redis knows it."""

    text: str
    sha: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode()).hexdigest().encode())


_OWNER = """
local owner = redis.call('GET', KEYS[1])
if not owner then return 'lost' end
if owner ~= ARGV[1] then return 'fenced' end
"""

APPEND = Script(
    _OWNER
    + """
-- KEYS owner, state, positions, blocks
-- ARGV owner, number, oldest number to keep, collector, incarnation, sequence, rows stored, inserted, sampled,
--      number of the block before, header, rows
if tonumber(redis.call('HGET', KEYS[2], 'last_block') or -1) ~= tonumber(ARGV[10]) then return 'out_of_step' end
local incarnation, sequence = string.match(redis.call('HGET', KEYS[3], ARGV[4]) or '0 0 0', '^(%d+) (%d+)')
incarnation, sequence = tonumber(incarnation), tonumber(sequence)
if tonumber(ARGV[5]) < incarnation then return 'replaced' end
if tonumber(ARGV[5]) == incarnation and tonumber(ARGV[6]) <= sequence then return 'duplicate' end
-- The first write is the one that a full store refuses: after it nothing can fail, so all of it happens or nothing.
redis.call('XADD', KEYS[4], ARGV[2] .. '-0', 'header', ARGV[11], 'rows', ARGV[12])
redis.call('XTRIM', KEYS[4], 'MINID', ARGV[3])
redis.call('HSET', KEYS[3], ARGV[4], ARGV[5] .. ' ' .. ARGV[6] .. ' ' .. ARGV[7])
redis.call('HSET', KEYS[2], 'last_block', ARGV[2], 'inserted', ARGV[8], 'sampled', ARGV[9])
return 'stored'
"""
)

SAVE = Script(
    _OWNER
    + """
-- KEYS owner, state; ARGV owner, number of the last block, sampled
if tonumber(redis.call('HGET', KEYS[2], 'last_block') or -1) ~= tonumber(ARGV[2]) then return 'out_of_step' end
redis.call('HSET', KEYS[2], 'sampled', ARGV[3])
return 'stored'
"""
)

TRIM = Script(
    _OWNER
    + """
-- KEYS owner, blocks; ARGV owner, oldest number to keep
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])
return 'stored'
"""
)

BEGIN = Script(
    """
-- Makes a table's record, or makes it again after Redis lost it.
-- KEYS owner, meta, spec, state, positions, blocks
-- ARGV owner, format, spec, limiter, last block, inserted, sampled, then collector and position in turn
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 'fenced' end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSETNX', KEYS[2], 'format', ARGV[2])
redis.call('SET', KEYS[3], ARGV[3])
redis.call('UNLINK', KEYS[4], KEYS[5], KEYS[6])
redis.call('HSET', KEYS[4], 'limiter', ARGV[4], 'last_block', ARGV[5], 'inserted', ARGV[6], 'sampled', ARGV[7])
for i = 8, #ARGV, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
return 'stored'
"""
)
