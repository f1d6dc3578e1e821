// Plays every case with the openai npm package against BASE_URL and prints what came of each, as JSON.

import { readFile } from "node:fs/promises";
import { setTimeout as sleep } from "node:timers/promises";
import OpenAI, { AzureOpenAI, toFile } from "openai";

const { ROOT_URL, UNREACHABLE_URL, API_KEY, CONVERSATION } = process.env;
const MODEL = "demo-agent";
const HELLO = [{ role: "user", content: "Say héllo 🙂" }];
const TOOLS = ["search", "open"].map((name) => ({
  type: "function",
  function: { name, parameters: { type: "object", properties: {} } },
}));
const ASKED = [{ role: "user", content: 'call search {"query": "Grüße"}\ncall open {"path": "a/b.py"}' }];

const clientFor = (name, options = {}) =>
  new OpenAI({ baseURL: `${ROOT_URL}/v1`, apiKey: `${API_KEY}-${name}`, maxRetries: 0, ...options });

const answering = (answer, more = {}) => ({ headers: { "x-answer": answer, ...more } });

const ask = (client, fields = {}, options = {}) =>
  client.chat.completions.create({ model: MODEL, messages: HELLO, ...fields }, options);

const compaction = (headers) =>
  Object.fromEntries([...headers].filter(([name]) => name.startsWith("x-compaction-")));

async function textOf(stream) {
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  return text;
}

async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    return {
      kind: error.constructor.name,
      status: error.status ?? null,
      body: error.error ?? null,
      report: error.headers ? compaction(error.headers) : null,
      message: error.message,
    };
  }
  throw new Error("nothing was thrown");
}

function joined(calls, pieces) {
  for (const piece of pieces ?? []) {
    calls[piece.index] ??= { id: piece.id, type: "function", function: { name: piece.function.name, arguments: "" } };
    calls[piece.index].function.arguments += piece.function.arguments ?? "";
  }
}

async function message(stream) {
  let content = "";
  const calls = [];
  for await (const chunk of stream) {
    content += chunk.choices[0].delta.content ?? "";
    joined(calls, chunk.choices[0].delta.tool_calls);
  }
  return { role: "assistant", ...(content && { content }), ...(calls.length && { tool_calls: calls }) };
}

function long(count) {
  const filler = "alpha beta gamma delta ".repeat(75);
  const earlier = Array.from({ length: count }, (_, at) => ({
    role: at % 2 ? "assistant" : "user",
    content: `Step ${at}: ${filler}`,
  }));
  return [...earlier, { role: "user", content: "What now?" }];
}

const cases = {
  async plain(client) {
    const { choices, usage } = await ask(client);
    return { text: choices[0].message.content, finish: choices[0].finish_reason, counted: usage.total_tokens > 0 };
  },

  async streamed(client) {
    return textOf(await ask(client, { stream: true }));
  },

  async usage(client) {
    let usage = null;
    for await (const chunk of await ask(client, { stream: true, stream_options: { include_usage: true } })) {
      usage = chunk.usage;
    }
    return usage.prompt_tokens > 0;
  },

  async tools(client) {
    const first = (await ask(client, { messages: ASKED, tools: TOOLS })).choices[0];
    const calls = first.message.tool_calls;
    const results = calls.map(({ id, function: { name } }) => ({
      role: "tool",
      tool_call_id: id,
      content: `result ${name}`,
    }));
    const second = await ask(client, { messages: [...ASKED, first.message, ...results], tools: TOOLS });
    return {
      finish: first.finish_reason,
      calls: calls.map((call) => [call.function.name, call.function.arguments]),
      text: second.choices[0].message.content,
    };
  },

  async tools_streamed(client) {
    const made = await message(await ask(client, { messages: ASKED, tools: TOOLS, stream: true }));
    return made.tool_calls.map((call) => [call.function.name, call.function.arguments]);
  },

  async stream_helper(client) {
    const runner = client.chat.completions.stream({ model: MODEL, messages: HELLO });
    return (await runner.finalChatCompletion()).choices[0].message.content;
  },

  async raw(client) {
    const { data, response, request_id } = await ask(client, {}, answering("cookies")).withResponse();
    return {
      text: data.choices[0].message.content,
      cookies: response.headers.getSetCookie(),
      limit: response.headers.get("x-ratelimit-remaining-tokens"),
      report: compaction(response.headers),
      request_id,
    };
  },

  async response(client) {
    const response = await ask(client, { stream: true }).asResponse();
    const text = await response.text();
    return { report: compaction(response.headers), last: text.trimEnd().split("\n").at(-1) };
  },

  async parsed(client) {
    const schema = { type: "object", properties: { city: { type: "string" }, degrees: { type: "number" } } };
    const format = { type: "json_schema", json_schema: { name: "city", schema, strict: true } };
    const asked = { model: MODEL, messages: HELLO, response_format: format };
    const answer = await client.chat.completions.parse(asked, answering("city"));
    return JSON.parse(answer.choices[0].message.content);
  },

  async unicode(client) {
    return textOf(await ask(client, { stream: true }, answering("unicode")));
  },

  async zipped(client) {
    return (await ask(client, {}, answering("zipped"))).choices[0].message.content;
  },

  async zipped_stream(client) {
    return textOf(await ask(client, { stream: true }, answering("zipped-stream")));
  },

  async errors(client) {
    const found = {};
    for (const answer of ["bad-request", "unauthorized", "not-found", "limited", "server-error"]) {
      found[answer] = await failure(ask(client, {}, answering(answer)));
      found[`${answer} streamed`] = await failure(ask(client, { stream: true }, answering(answer)));
    }
    return found;
  },

  async retried(client, name) {
    const started = performance.now();
    const patient = clientFor(name, { maxRetries: 2 });
    const answer = await ask(patient, {}, answering("limited-once"));
    return { finish: answer.choices[0].finish_reason, waited: performance.now() - started >= 1000 };
  },

  async too_long(client) {
    const rules = { role: "system", content: "Never forget this rule. ".repeat(2500) };
    return failure(ask(client, { messages: [rules, ...HELLO] }));
  },

  async unreachable(_, name) {
    return failure(ask(clientFor(name, { baseURL: `${UNREACHABLE_URL}/v1` })));
  },

  async cut(client) {
    return failure(ask(client, {}, answering("cut")));
  },

  async cut_stream(client) {
    return failure(textOf(await ask(client, { stream: true }, answering("cut-stream"))));
  },

  async error_frame(client) {
    return failure(textOf(await ask(client, { stream: true }, answering("error-frame"))));
  },

  async timeout(client) {
    return failure(ask(client, {}, { ...answering("hang"), timeout: 200 }));
  },

  async aborted_before_the_first_byte(client) {
    const leaving = new AbortController();
    const asked = failure(ask(client, {}, { ...answering("hang"), signal: leaving.signal }));
    await sleep(200);
    leaving.abort();
    return asked;
  },

  async aborted_stream(client) {
    const stream = await ask(client, { stream: true }, answering("forever"));
    let chunks = 0;
    for await (const _ of stream) {
      if (++chunks === 3) stream.controller.abort();
    }
    return chunks;
  },

  async left_stream(client) {
    for await (const _ of await ask(client, { stream: true }, answering("forever"))) break;
    return true;
  },

  async relayed(client) {
    const models = await client.models.list();
    const embedded = await client.embeddings.create({ model: "embedder", input: "Grüße" });
    const file = await toFile(Buffer.alloc(1_000_000, "notes "), "notes.jsonl");
    const stored = await client.files.create({ file, purpose: "batch" });
    const content = await client.files.content("file-1");
    return {
      models: models.data.map((model) => model.id),
      embedding: embedded.data[0].embedding,
      stored: stored.bytes > 1_000_000,
      content: (await content.text()).length,
    };
  },

  async without_v1(_, name) {
    return (await ask(clientFor(name, { baseURL: ROOT_URL }))).choices[0].message.content;
  },

  async azure(_, name) {
    const apiKey = `${API_KEY}-${name}`;
    const client = new AzureOpenAI({ endpoint: ROOT_URL, apiKey, apiVersion: "2024-10-21", maxRetries: 0 });
    return textOf(await ask(client, { stream: true }));
  },

  async compacted(client) {
    const headers = { "x-session-id": "node" };
    const { data, response } = await ask(client, { messages: long(20), stream: true }, { headers }).withResponse();
    return { report: compaction(response.headers), text: await textOf(data) };
  },

  async compacted_error(client) {
    const options = answering("server-error", { "x-session-id": "node" });
    return failure(ask(client, { messages: long(20) }, options));
  },

  async modes(client) {
    const found = {};
    for (const mode of ["bypass", "shadow", "force"]) {
      const asked = ask(client, { messages: long(20) }, { headers: { "x-compaction": mode } });
      found[mode] = (await asked.withResponse()).response.headers.get("x-compaction-status");
    }
    return found;
  },

  async invalid_mode(client) {
    return failure(ask(client, {}, { headers: { "x-compaction": "off" } }));
  },

  async conversation(client) {
    const { system, tools, turns } = JSON.parse(await readFile(CONVERSATION, "utf-8"));
    const calls = turns.flatMap((turn) => turn.steps.flatMap((step) => step.calls ?? []));
    const results = new Map(calls.map((call) => [call.id, call.result]));
    const messages = [{ role: "system", content: system }];
    const statuses = new Set();
    for (const { user } of turns) {
      messages.push({ role: "user", content: user });
      for (let open = true; open; ) {
        const asked = ask(client, { messages, tools, max_tokens: 512, stream: true });
        const { data, response } = await asked.withResponse();
        statuses.add(response.headers.get("x-compaction-status"));
        const said = await message(data);
        messages.push(said);
        for (const { id } of said.tool_calls ?? []) {
          messages.push({ role: "tool", tool_call_id: id, content: results.get(id) });
        }
        open = Boolean(said.tool_calls);
      }
    }
    return { messages, statuses: [...statuses].sort() };
  },
};

const found = {};
for (const [name, play] of Object.entries(cases)) {
  try {
    found[name] = { came: await play(clientFor(name), name) };
  } catch (error) {
    found[name] = { threw: error.stack };
  }
}
process.stdout.write(JSON.stringify(found));
