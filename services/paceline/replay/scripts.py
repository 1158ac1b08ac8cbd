"""What changes in Redis in one atomic step, as Lua.

Every script that writes first looks whether this process still owns the run, and ends in one word;
`paceline.replay.log` says what follows from it. Keys: paceline:{run}:owner, ...:meta, and of the table ...:spec,
:state, :positions, :blocks (the index), :pages, :staged (a payload on its way), and :block:<first row> (the payload of
that block).
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


_REMOVE = """
-- Removes the payloads KEYS[from] and after, and from the index every entry up to that of the block whose first row is
-- `last`; how many bytes that frees.
local function remove(from, index, last)
  if from > #KEYS then return 0 end
  local freed = 0
  for i = from, #KEYS do
    freed = freed + redis.call('STRLEN', KEYS[i])
    redis.call('UNLINK', KEYS[i])
  end
  -- Ids are ends of blocks: the first one above `last` is its own, unless it has left already. A damaged entry, which
  -- does not say whose it is, leaves too.
  local entry = redis.call('XRANGE', index, last .. '-1', '+', 'COUNT', 1)[1]
  local id = last
  if entry and (entry[2][1] ~= 'first_row' or entry[2][2] == last) then id = string.match(entry[1], '^%d+') end
  redis.call('XTRIM', index, 'MINID', id .. '-1')
  return freed
end
"""

COMMIT = Script(
    _REMOVE
    + """
-- Comes right after a SET of KEYS[5], in one transaction.
-- KEYS owner, state, positions, blocks, staged, payload of this block, then payloads that leave
-- ARGV owner, key of the next row, first row, end row, collector, incarnation, sequence, rows stored, sampled,
--      consumed, dropped, first row of the last block that leaves, header, bytes of the payload, then of the block that
--      came before it in one message, if any, collector and position, which must be there
local function refuse(word)
  redis.call('UNLINK', KEYS[5])
  return word
end
local owner = redis.call('GET', KEYS[1])
if not owner then return refuse('lost') end
if owner ~= ARGV[1] then return refuse('fenced') end
if redis.call('HGET', KEYS[2], 'inserted') ~= ARGV[2] then return refuse('out_of_step') end
-- The record may be ahead of its owner by another block, and so be where this one belongs though the one before failed.
if ARGV[15] and redis.call('HGET', KEYS[3], ARGV[15]) ~= ARGV[16] then return refuse('out_of_step') end
local incarnation, sequence = string.match(redis.call('HGET', KEYS[3], ARGV[5]) or '0 0 0', '^(%d+) (%d+)')
incarnation, sequence = tonumber(incarnation), tonumber(sequence)
if tonumber(ARGV[6]) < incarnation then return refuse('replaced') end
if tonumber(ARGV[6]) == incarnation and tonumber(ARGV[7]) <= sequence then return refuse('duplicate') end
local size = redis.call('STRLEN', KEYS[5])
if size ~= tonumber(ARGV[14]) then return refuse('out_of_step') end
redis.call('RENAME', KEYS[5], KEYS[6])
redis.call('XADD', KEYS[4], ARGV[4] .. '-0', 'first_row', ARGV[3], 'header', ARGV[13])
local freed = remove(7, KEYS[4], ARGV[12])
redis.call('HSET', KEYS[3], ARGV[5], ARGV[6] .. ' ' .. ARGV[7] .. ' ' .. ARGV[8])
redis.call('HSET', KEYS[2], 'inserted', ARGV[4], 'sampled', ARGV[9], 'consumed', ARGV[10], 'dropped', ARGV[11])
redis.call('HINCRBY', KEYS[2], 'payload_bytes', size - freed)
return 'stored'
"""
)

SAVE = Script(
    _REMOVE
    + """
-- KEYS owner, state, blocks, pages, then payloads that leave
-- ARGV owner, key of the next row, sampled, consumed, dropped, first row of the last block that leaves, first page that
--      stays, then page and data in turn
local owner = redis.call('GET', KEYS[1])
if not owner then return 'lost' end
if owner ~= ARGV[1] then return 'fenced' end
if redis.call('HGET', KEYS[2], 'inserted') ~= ARGV[2] then return 'out_of_step' end
-- What frees memory comes first: a full store refuses the first write alone, and only if it is one that needs memory.
local freed = remove(5, KEYS[3], ARGV[6])
for page = tonumber(redis.call('HGET', KEYS[2], 'first_page') or ARGV[7]), tonumber(ARGV[7]) - 1 do
  redis.call('HDEL', KEYS[4], page)
end
for i = 8, #ARGV, 2 do redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[2], 'sampled', ARGV[3], 'consumed', ARGV[4], 'dropped', ARGV[5], 'first_page', ARGV[7],
           'saved_at', redis.call('TIME')[1])
redis.call('HINCRBY', KEYS[2], 'payload_bytes', 0 - freed)
return 'stored'
"""
)

CLEAR = Script(
    """
-- Removes blocks of a record that is about to be made anew.
-- KEYS owner, blocks, then payloads that leave; ARGV owner, id of the last of their entries
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 'fenced' end
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
redis.call('XTRIM', KEYS[2], 'MINID', string.match(ARGV[2], '^%d+') .. '-1')
return 'stored'
"""
)

BEGIN = Script(
    """
-- Makes a table's record, or makes it again after Redis lost it.
-- KEYS owner, meta, spec, state, positions, blocks, pages
-- ARGV owner, format, table, spec, limiter, inserted, sampled, consumed, dropped, then collector and position in turn
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 'fenced' end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSETNX', KEYS[2], 'format', ARGV[2])
redis.call('HSET', KEYS[2], 'table:' .. ARGV[3], '')
redis.call('SET', KEYS[3], ARGV[4])
redis.call('UNLINK', KEYS[4], KEYS[5], KEYS[6], KEYS[7])
redis.call('HSET', KEYS[4], 'limiter', ARGV[5], 'inserted', ARGV[6], 'sampled', ARGV[7], 'consumed', ARGV[8],
           'dropped', ARGV[9], 'payload_bytes', 0, 'saved_at', redis.call('TIME')[1])
for i = 10, #ARGV, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
return 'stored'
"""
)

RESTATE = Script(
    """
-- Makes the record of a table say what another one did, whose blocks it has got.
-- KEYS owner, state, positions; ARGV owner, inserted, sampled, consumed, dropped, then collector and position in turn
local owner = redis.call('GET', KEYS[1])
if not owner then return 'lost' end
if owner ~= ARGV[1] then return 'fenced' end
redis.call('UNLINK', KEYS[3])
redis.call('HSET', KEYS[2], 'inserted', ARGV[2], 'sampled', ARGV[3], 'consumed', ARGV[4], 'dropped', ARGV[5])
for i = 6, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
return 'stored'
"""
)

NOTE_LEARNER = Script(
    """
-- Says whose the record is. KEYS owner, meta; ARGV owner, the learner's id and incarnation
local owner = redis.call('GET', KEYS[1])
if not owner then return 'lost' end
if owner ~= ARGV[1] then return 'fenced' end
redis.call('HSET', KEYS[2], 'learner', ARGV[2])
return 'stored'
"""
)

READ = Script(
    """
-- KEYS owner, spec, state, positions
return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2]),
        redis.call('HGETALL', KEYS[3]), redis.call('HGETALL', KEYS[4])}
"""
)
