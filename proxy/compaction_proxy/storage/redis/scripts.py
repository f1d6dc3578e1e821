"""Lua scripts that a Redis server runs atomically. Each key that a script reads or writes is one of its KEYS.

A script that fails has written nothing. The server checks free memory and the permission to write at the
first write of the script or earlier. The scripts ensure that no later command fails because a key has the
wrong type.
"""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LuaScript:
    """A Lua script, and the digest under which a server caches it."""

    text: str
    digest: str


def _build_script(text: str) -> LuaScript:
    return LuaScript(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


_LUA_FUNCTIONS = """
local function text_at(key)
  if redis.call('TYPE', key).ok == 'string' then return redis.call('GET', key) end
  return false
end
local function is_held(key, fence)
  local there = text_at(key)
  return there and string.match(there, '^%d+') == fence
end
local function prolong(key, ttl)
  if redis.call('PTTL', key) < tonumber(ttl) then redis.call('PEXPIRE', key, ttl) end
end
"""

# Writes the items of a commit or of a plain write. In a commit, the first item is the claim (`Store.commit`).
# Every ttl in these scripts is in milliseconds.
# KEYS: the lease of the claim, the set of the keys of the scope, then the key of each item.
# ARGV: 1 if the first item is a claim, else 0; the fence of the lease, empty for none; the ttl of the set of
# keys, 0 for no set; then for each item the number of lines to keep (0 for a record), its ttl (0 for no
# expiry), and its value.
# Returns 1 if all items were written, the stored value if the key of the claim has one, or nil if the lease
# is lost.
WRITE = _build_script(
    _LUA_FUNCTIONS
    + """
if ARGV[1] == '1' then
  local standing = text_at(KEYS[3])
  if standing then return standing end
  if ARGV[2] ~= '' and not is_held(KEYS[1], ARGV[2]) then return false end
end
for i = 3, #KEYS do
  local at = 3 * i - 5
  local keep, ttl, value = tonumber(ARGV[at]), ARGV[at + 1], ARGV[at + 2]
  if keep == 0 and ttl == '0' then
    redis.call('SET', KEYS[i], value)
  elseif keep == 0 then
    redis.call('SET', KEYS[i], value, 'PX', ttl)
  else
    local kind = redis.call('TYPE', KEYS[i]).ok
    if kind ~= 'list' and kind ~= 'none' then redis.call('DEL', KEYS[i]) end
    redis.call('RPUSH', KEYS[i], value)
    redis.call('LTRIM', KEYS[i], -keep, -1)
    redis.call('PEXPIRE', KEYS[i], ttl)
  end
  if ARGV[3] ~= '0' then redis.call('SADD', KEYS[2], KEYS[i]) end
end
if ARGV[3] ~= '0' then prolong(KEYS[2], ARGV[3]) end
return 1
"""
)

# Acquires a lease and returns its fence, or nil if there is a lease on the key already.
# KEYS: the lease, its counter (the last fence). ARGV: the ttl of the lease, a random token of the caller, the
# ttl of the counter.
# A fence is at least the server's time in microseconds, so fences rise even if the counter was lost. If the
# connection breaks before the response arrives, redis-py repeats the call. The token is the same, so the
# repeated call returns the same fence.
ACQUIRE = _build_script(
    _LUA_FUNCTIONS
    + """
local there = text_at(KEYS[1])
if there then
  local fence, token = string.match(there, '^(%d+):(.*)$')
  if token == ARGV[2] then return fence end
  return false
end
local time = redis.call('TIME')
local fence = math.max(time[1] * 1000000 + time[2], tonumber(text_at(KEYS[2]) or '0') + 1)
local text = string.format('%.0f', fence)
redis.call('SET', KEYS[1], text .. ':' .. ARGV[2], 'PX', ARGV[1])
redis.call('SET', KEYS[2], text, 'PX', ARGV[3])
return text
"""
)

# Extends a lease. Returns 1, or 0 if the lease has expired or was released.
# KEYS: the lease. ARGV: its fence, the new ttl.
RENEW = _build_script(
    _LUA_FUNCTIONS
    + """
if not is_held(KEYS[1], ARGV[1]) then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
)

# Releases a lease. Returns 1, or 0 if the lease has expired or was released.
# KEYS: the lease. ARGV: its fence.
RELEASE = _build_script(
    _LUA_FUNCTIONS
    + """
if not is_held(KEYS[1], ARGV[1]) then return 0 end
return redis.call('DEL', KEYS[1])
"""
)

# Registers a write to a scope of a tenant, in a sorted set. A scope is the start of a key up to its closing
# brace. If the set has too many scopes, removes and returns those whose last write is oldest, oldest first.
# The caller deletes their keys. Scopes whose last write is older than the ttl are removed, but not returned.
# KEYS: the sorted set of the tenant's scopes by the time of their last write.
# ARGV: the scope, its ttl, the maximum number of scopes, the maximum number that one call removes.
REGISTER_SCOPE = _build_script(
    _LUA_FUNCTIONS
    + """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'zset' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
prolong(KEYS[1], ARGV[2])
local over = math.min(redis.call('ZCARD', KEYS[1]) - ARGV[3], tonumber(ARGV[4]))
local leaving = {}
if over > 0 then
  local popped = redis.call('ZPOPMIN', KEYS[1], over)
  for i = 1, #popped, 2 do leaving[#leaving + 1] = popped[i] end
end
return leaving
"""
)
