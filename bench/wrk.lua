-- Requests for wrk from the pieces of conversations that bench/wrk.py writes; prints what it measured as JSON.
-- wrk … -s wrk.lua URL -- FOLDER SESSIONS_A_THREAD FIRST_NUMBER

local MARK = "##########"
local threads = 0

function setup(thread)
  thread:set("index", threads)
  threads = threads + 1
end

local function piece(file)
  local length = file:read("*n")
  file:read(1)
  return file:read(length)
end

local function conversation(path, first)
  local file = assert(io.open(path, "rb"))
  local made = { head = piece(file), start = piece(file), stop = piece(file), turns = {} }
  for _ = 1, file:read("*n") do
    made.turns[#made.turns + 1] = piece(file)
  end
  file:close()
  made.number, made.turn, made.grown = first, 0, ""
  return made
end

function init(args)
  sessions, current = {}, 0
  local each = tonumber(args[2])
  for number = index * each, (index + 1) * each - 1 do
    sessions[#sessions + 1] = conversation(args[1] .. "/" .. number, tonumber(args[3]))
  end
end

function request()
  current = current % #sessions + 1
  local session = sessions[current]
  session.turn = session.turn + 1
  if session.turn > #session.turns then
    session.turn, session.grown, session.number = 1, "", session.number + 1
  end
  local digits = string.format("%010d", session.number)
  session.grown = session.grown .. string.gsub(session.turns[session.turn], MARK, digits)
  local length = #session.start + #session.grown + #session.stop
  local ending = string.format("content-length: %d\r\n\r\n", length)
  return table.concat({ session.head, ending, session.start, session.grown, session.stop })
end

function done(summary, latency, requests)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
  io.write(string.format(
    '\nmeasured {"answers": %d, "elapsed_s": %.6f, "p50_s": %.6f, "p99_s": %.6f, "failed": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6, failed))
end
