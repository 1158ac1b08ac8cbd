"""What changes in Redis in one atomic step, as Lua.

Every script that writes first looks whether this process still owns the run, and ends in one word, to which some add
a number; `paceline.replay.log` says what follows from it. Keys: paceline:{run}:owner, ...:meta, and of the table
...:spec, :state, :positions, :blocks (the index), :pages, :staged:<number> (a payload on its way), and
:block:<first row> (the payload of that block).

A step may come about in part, whatever Redis promises: 7.0, when it is killed in the midst of writing a transaction,
cuts its append-only file within it at the next load, and at the one after that carries out the beginning together with
the next transaction of anybody. Two things make this harmless. The beginning of a COMMIT is one of fewer blocks:
payloads lie where they belong before the index names them, and what follows from the index comes after it (in format 2
an entry came before its payload: one without a payload counts for nothing). And a
process that wrote to another run of the server, or to none, first begins an epoch (BEGIN, RESTATE): all that a cut step
may have touched is written anew, and entries of the index count for more than those of earlier epochs. (The blocks that
were to leave for a cut step may be gone: the oldest ones, for which its own would have come. And a payload of it that
the index never named may stay until the run is deleted.)
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
-- Removes every entry of the index below the id `floor`, and payloads; how many bytes they had. The index comes first:
-- an entry without its payload would count as damaged.
local function remove(index, floor, payloads)
  redis.call('XTRIM', index, 'MINID', floor)
  local freed = 0
  for _, key in ipairs(payloads) do
    freed = freed + redis.call('STRLEN', key)
    redis.call('UNLINK', key)
  end
  return freed
end
"""

_NEXT_EPOCH = """
-- Above every one that the table's record was ever written in, of which the caller knows `known`. A record of format 2
-- has none; its ids are ends of blocks, of a step that was cut as well, so of some that it does not know of yet.
local function next_epoch(state, known)
  local noted, inserted = redis.call('HGET', state, 'epoch'), redis.call('HGET', state, 'inserted')
  if not noted and inserted then noted = inserted + 2 ^ 40 end
  return string.format('%.0f', math.max(tonumber(noted or 0), tonumber(known)) + 1)
end
"""

_KNOWN = """
-- Whether no epoch has begun that the caller does not know of: what comes late must not undo what came after it.
local function is_known(state, latest)
  return tonumber(redis.call('HGET', state, 'epoch') or 0) <= tonumber(latest)
end
"""

CLAIM = Script(
    """#!lua flags=allow-oom
-- Takes the run over, on a Redis that is full as well: whoever does may be about to make room. Gives the format that
-- its record had before, and changes nothing if we cannot read that, or if there may be none; false where there was
-- none.
-- KEYS owner, meta; ARGV owner, format, an older one that we read too, 1 where there may be a record
local found = redis.call('HGET', KEYS[2], 'format')
-- Our own, where the answer to the first call was lost.
if found and redis.call('GET', KEYS[1]) == ARGV[1] then return ARGV[4] == '1' and found end
if found and (ARGV[4] ~= '1' or (found ~= ARGV[2] and found ~= ARGV[3])) then return found end
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
-- ARGV owner, epoch, then of each block: header, and in one string key of the next row, first row, end row, collector,
--      incarnation, sequence, rows stored, sampled, consumed, dropped, bytes of the payload, how many payloads leave,
--      id below which entries leave with them, 1 where it is written again (its collector's position is no matter)
local owner, next_row = redis.call('GET', KEYS[1]), redis.call('HGET', KEYS[2], 'inserted')
local epoch, held, positions = redis.call('HGET', KEYS[2], 'epoch'), redis.call('HGET', KEYS[2], 'payload_bytes'), {}
local function refusal(block, size)
  if not owner then return 'lost' end
  if owner ~= ARGV[1] then return 'fenced' end
  if epoch ~= ARGV[2] or next_row ~= block[1] or size ~= tonumber(block[11]) then return 'out_of_step' end
  if block[14] == '1' then return nil end
  local position = positions[block[4]] or redis.call('HGET', KEYS[3], block[4]) or '0 0 0'
  local incarnation, sequence = string.match(position, '^(%d+) (%d+)')
  incarnation, sequence = tonumber(incarnation), tonumber(sequence)
  if tonumber(block[5]) < incarnation then return 'replaced' end
  if tonumber(block[5]) == incarnation and tonumber(block[6]) <= sequence then return 'duplicate' end
end
local stored, grown, leaving, k, word, last, floor = 0, 0, {}, 5
for a = 3, #ARGV, 2 do
  local block = {}
  for part in string.gmatch(ARGV[a + 1], '%S+') do block[#block + 1] = part end
  local size, count = redis.call('STRLEN', KEYS[k]), tonumber(block[12])
  word = word or refusal(block, size)
  if word then
    redis.call('UNLINK', KEYS[k])
  else
    redis.call('RENAME', KEYS[k], KEYS[k + 1])
    redis.call('XADD', KEYS[4], ARGV[2] .. '-' .. block[3], 'first_row', block[2], 'header', ARGV[a])
    positions[block[4]] = block[5] .. ' ' .. block[6] .. ' ' .. block[7]
    for i = k + 2, k + 1 + count do leaving[#leaving + 1] = KEYS[i] end
    if count > 0 then floor = block[13] end
    stored, grown, last, next_row = stored + 1, grown + size, block, block[3]
  end
  k = k + 2 + count
end
if stored == 0 then return word end
local fields = {}
for collector, position in pairs(positions) do
  fields[#fields + 1] = collector
  fields[#fields + 1] = position
end
redis.call('HSET', KEYS[3], unpack(fields))
redis.call('HSET', KEYS[2], 'inserted', next_row, 'sampled', last[8], 'consumed', last[9], 'dropped', last[10],
           'payload_bytes', string.format('%.0f', (held or 0) + grown))
if floor then redis.call('HINCRBY', KEYS[2], 'payload_bytes', 0 - remove(KEYS[4], floor, leaving)) end
return 'stored ' .. stored
"""
)

SAVE = Script(
    _REMOVE
    + """
-- KEYS owner, state, blocks, pages, then payloads that leave
-- ARGV owner, epoch, key of the next row, sampled, consumed, dropped, bytes of the payloads that stay (empty: reckon),
--      id below which entries leave, first page that stays, then page and data in turn
local owner = redis.call('GET', KEYS[1])
if not owner then return 'lost' end
if owner ~= ARGV[1] then return 'fenced' end
if redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[2] then return 'out_of_step' end
if redis.call('HGET', KEYS[2], 'inserted') ~= ARGV[3] then return 'out_of_step' end
-- What frees memory comes first: a full store refuses the first write alone, and only if it is one that needs memory.
local freed = #KEYS > 4 and remove(KEYS[3], ARGV[8], {unpack(KEYS, 5)}) or 0
for page = tonumber(redis.call('HGET', KEYS[2], 'first_page') or ARGV[9]), tonumber(ARGV[9]) - 1 do
  redis.call('HDEL', KEYS[4], page)
end
for i = 10, #ARGV, 2 do redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 1]) end
local held = ARGV[7] ~= '' and ARGV[7] or string.format('%.0f', redis.call('HGET', KEYS[2], 'payload_bytes') - freed)
redis.call('HSET', KEYS[2], 'sampled', ARGV[4], 'consumed', ARGV[5], 'dropped', ARGV[6], 'payload_bytes', held,
           'first_page', ARGV[9], 'saved_at', redis.call('TIME')[1])
return 'stored'
"""
)

CLEAR = Script(
    _REMOVE
    + _KNOWN
    + """
-- Removes blocks of a record that is about to be made anew.
-- KEYS owner, state, blocks, then payloads that leave; ARGV owner, latest epoch, id below which entries leave
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 'fenced' end
if not is_known(KEYS[2], ARGV[2]) then return 'out_of_step' end
remove(KEYS[3], ARGV[3], {unpack(KEYS, 4)})
return 'stored'
"""
)

BEGIN = Script(
    _NEXT_EPOCH
    + _KNOWN
    + """
-- Makes a table's record, or makes it again after Redis lost it; says which epoch it begins in.
-- KEYS owner, meta, spec, state, positions, blocks, pages
-- ARGV owner, latest epoch, format, table, spec, limiter, inserted, sampled, consumed, dropped, then collector and
--      position in turn
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 'fenced' end
if not is_known(KEYS[4], ARGV[2]) then return 'out_of_step' end
local epoch = next_epoch(KEYS[4], ARGV[2])
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSETNX', KEYS[2], 'format', ARGV[3])
redis.call('HSET', KEYS[2], 'table:' .. ARGV[4], '')
redis.call('SET', KEYS[3], ARGV[5])
redis.call('UNLINK', KEYS[4], KEYS[5], KEYS[6], KEYS[7])
redis.call('HSET', KEYS[4], 'epoch', epoch, 'limiter', ARGV[6], 'inserted', ARGV[7], 'sampled', ARGV[8],
           'consumed', ARGV[9], 'dropped', ARGV[10], 'payload_bytes', 0, 'saved_at', redis.call('TIME')[1])
for i = 11, #ARGV, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
return 'stored ' .. epoch
"""
)

RESTATE = Script(
    _NEXT_EPOCH
    + """
-- Begins an epoch of a table's record, in which it says what it is told to, if it still says what was read; which one.
-- KEYS owner, state, positions, positions to be, then payloads that no block has
-- ARGV owner, an epoch that it is above, epoch (empty: none) and key of the next row that were read, inserted, sampled,
--      consumed, dropped, bytes of payloads that it has not counted yet, then collector and position in turn
local owner, held = redis.call('GET', KEYS[1]), redis.call('HGET', KEYS[2], 'payload_bytes')
if not owner or not held then return 'lost' end
if owner ~= ARGV[1] then return 'fenced' end
if (redis.call('HGET', KEYS[2], 'epoch') or '') ~= ARGV[3] then return 'out_of_step' end
if redis.call('HGET', KEYS[2], 'inserted') ~= ARGV[4] then return 'out_of_step' end
local epoch = next_epoch(KEYS[2], ARGV[2])
-- What needs no memory comes first, so that a full store refuses nothing.
redis.call('UNLINK', KEYS[4])
-- The new positions take the place of the old ones at once, and of any that a cut step before this one brings.
redis.call('HSET', KEYS[4], 'epoch', epoch)
for i = 10, #ARGV, 2 do redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 1]) end
redis.call('RENAME', KEYS[4], KEYS[3])
redis.call('HSET', KEYS[2], 'epoch', epoch, 'inserted', ARGV[5], 'sampled', ARGV[6], 'consumed', ARGV[7],
           'dropped', ARGV[8], 'payload_bytes', string.format('%.0f', held + ARGV[9]))
-- Last: until it is written which row comes next, a cut step before this one may bring a block for such a payload.
for i = 5, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 'stored ' .. epoch
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
-- Owner, spec, state, positions, and the first entries of the index past what the state says.
-- KEYS owner, spec, state, positions, blocks
local epoch, inserted = redis.call('HGET', KEYS[3], 'epoch'), redis.call('HGET', KEYS[3], 'inserted')
local further = {}
if inserted and string.match(inserted, '^%d+$') and string.match(epoch or '0', '^%d+$') then
  local last = epoch and epoch .. '-' .. inserted or inserted .. '-0'
  further = redis.call('XRANGE', KEYS[5], '(' .. last, '+', 'COUNT', 1000)
end
return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2]),
        redis.call('HGETALL', KEYS[3]), redis.call('HGETALL', KEYS[4]), further}
"""
)
