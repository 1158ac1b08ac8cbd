"""What changes in Redis in one atomic step, as Lua.

Every script that writes first looks whether this process still owns the run, and ends in one word, to which COMMIT adds
how many blocks it stored; `paceline.replay.log` says what follows from it. Keys: paceline:{run}:owner, ...:meta, and of
the table ...:spec, :state, :positions, :blocks (the index), :pages, :staged:<number> (a payload on its way), and
:block:<first row> (the payload of that block).
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
-- Removes the payloads KEYS[from] to KEYS[to]; how many bytes that frees.
local function unlink(from, to)
  local freed = 0
  for i = from, to do
    freed = freed + redis.call('STRLEN', KEYS[i])
    redis.call('UNLINK', KEYS[i])
  end
  return freed
end
-- Removes every entry of the index up to that of the block whose first row is `last`.
local function trim(index, last)
  -- Ids are ends of blocks: the first one above `last` is its own, unless it has left already. A damaged entry, which
  -- does not say whose it is, leaves too.
  local entry = redis.call('XRANGE', index, last .. '-1', '+', 'COUNT', 1)[1]
  local id = last
  if entry and (entry[2][1] ~= 'first_row' or entry[2][2] == last) then id = string.match(entry[1], '^%d+') end
  redis.call('XTRIM', index, 'MINID', id .. '-1')
end
"""

CLAIM = Script(
    """#!lua flags=allow-oom
-- Takes the run over, on a Redis that is full as well: whoever does may be about to make room. Gives the format that
-- its record had before, and changes nothing if that is not ours, or if there may be none; false where there was none.
-- KEYS owner, meta; ARGV owner, format, 1 where there may be a record
local found = redis.call('HGET', KEYS[2], 'format')
-- Our own, where the answer to the first call was lost.
if found and redis.call('GET', KEYS[1]) == ARGV[1] then return ARGV[3] == '1' and found end
if found and (ARGV[3] ~= '1' or found ~= ARGV[2]) then return found end
redis.call('HSET', KEYS[2], 'format', ARGV[2])
redis.call('SET', KEYS[1], ARGV[1])
return found
"""
)

COMMIT = Script(
    _REMOVE
    + """
-- Comes right after a SET of each staged payload, in one transaction. Stores the blocks up to the first that is
-- refused, and says how many, or why the first one was.
-- KEYS owner, state, positions, blocks, then of each block: staged, payload, and the payloads that leave for it
-- ARGV owner, then of each block: header, and in one string key of the next row, first row, end row, collector,
--      incarnation, sequence, rows stored, sampled, consumed, dropped, bytes of the payload, how many payloads leave,
--      first row of the last block that leaves
local owner, next_row = redis.call('GET', KEYS[1]), redis.call('HGET', KEYS[2], 'inserted')
local function refusal(block, size)
  if not owner then return 'lost' end
  if owner ~= ARGV[1] then return 'fenced' end
  if next_row ~= block[1] or size ~= tonumber(block[11]) then return 'out_of_step' end
  local position = redis.call('HGET', KEYS[3], block[4]) or '0 0 0'
  local incarnation, sequence = string.match(position, '^(%d+) (%d+)')
  incarnation, sequence = tonumber(incarnation), tonumber(sequence)
  if tonumber(block[5]) < incarnation then return 'replaced' end
  if tonumber(block[5]) == incarnation and tonumber(block[6]) <= sequence then return 'duplicate' end
end
local stored, grown, k, word, last, gone = 0, 0, 5
for a = 2, #ARGV, 2 do
  local block = {}
  for digits in string.gmatch(ARGV[a + 1], '%S+') do block[#block + 1] = digits end
  local size, leaving = redis.call('STRLEN', KEYS[k]), tonumber(block[12])
  word = word or refusal(block, size)
  if word then
    redis.call('UNLINK', KEYS[k])
  else
    -- First what fails where the index is damaged: then nothing has changed.
    redis.call('XADD', KEYS[4], block[3] .. '-0', 'first_row', block[2], 'header', ARGV[a])
    redis.call('RENAME', KEYS[k], KEYS[k + 1])
    redis.call('HSET', KEYS[3], block[4], block[5] .. ' ' .. block[6] .. ' ' .. block[7])
    grown = grown + size - unlink(k + 2, k + 1 + leaving)
    if leaving > 0 then gone = block[13] end
    stored, last, next_row = stored + 1, block, block[3]
  end
  k = k + 2 + leaving
end
if stored == 0 then return word end
if gone then trim(KEYS[4], gone) end
redis.call('HSET', KEYS[2], 'inserted', next_row, 'sampled', last[8], 'consumed', last[9], 'dropped', last[10])
redis.call('HINCRBY', KEYS[2], 'payload_bytes', grown)
return 'stored ' .. stored
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
local freed = unlink(5, #KEYS)
if #KEYS > 4 then trim(KEYS[3], ARGV[6]) end
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
