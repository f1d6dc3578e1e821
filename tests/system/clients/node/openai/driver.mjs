// The openai npm package: chat completions and responses.
import OpenAI from "openai";

import * as playing from "./playing.mjs";
import { CALL, HELLO, MODEL, SEARCH, play, thrown, troubles } from "./playing.mjs";

const TIMEOUT_MS = 300;
const client = new OpenAI({ baseURL: playing.BASE_URL, apiKey: playing.KEY, maxRetries: 0 });
const hanging = { headers: { "x-demo-fault": "hang" }, timeout: TIMEOUT_MS };

const user = (content) => ({ role: "user", content });
const chatTool = (offered) => ({ type: "function", function: offered });
const responseTool = (offered) => ({ type: "function", strict: true, ...offered });
const output = ({ call_id }, text) => ({ type: "function_call_output", call_id, output: text });
const callsOf = (response) => response.output.filter(({ type }) => type === "function_call");

const chat = (messages, more = {}, options = {}) =>
  client.chat.completions.create({ model: MODEL, messages, ...more }, options);

const respond = (input, more = {}, options = {}) =>
  client.responses.create({ model: MODEL, input, store: false, ...more }, options);

const chatTold = ({ choices: [{ message, finish_reason }], usage }) => ({
  text: message.content,
  calls: (message.tool_calls ?? []).map((call) => [call.function.name, call.function.arguments]),
  finish: finish_reason,
  usage,
});

const responseTold = (response) => ({
  text: response.output_text,
  calls: callsOf(response).map((call) => [call.name, call.arguments]),
  types: response.output.map(({ type }) => type),
  finish: response.status,
  usage: response.usage,
});

const chats = {
  "chat/text": async () => chatTold(await chat([user(HELLO)])),

  "chat/stream": async () => {
    const told = { text: "", chunks: 0, finish: null, usage: null };
    const more = { stream: true, stream_options: { include_usage: true } };
    for await (const { choices, usage } of await chat([user(HELLO)], more)) {
      told.chunks += 1;
      told.text += choices[0]?.delta.content ?? "";
      told.finish ??= choices[0]?.finish_reason;
      told.usage ??= usage;
    }
    return told;
  },

  "chat/helper": async () => {
    const asked = { model: MODEL, messages: [user(HELLO)], stream_options: { include_usage: true } };
    return chatTold(await client.chat.completions.stream(asked).finalChatCompletion());
  },

  "chat/tools": async () => {
    const tool = { type: "function", function: { ...SEARCH, parse: JSON.parse, function: playing.search } };
    const asked = { model: MODEL, messages: [user(CALL)], tools: [tool] };
    const runner = client.chat.completions.runTools(asked);
    return { text: await runner.finalContent(), usage: await runner.totalUsage() };
  },

  "chat/stream-tools": async () => {
    const asked = { model: MODEL, messages: [user(CALL)], tools: [chatTool(SEARCH)] };
    return chatTold(await client.chat.completions.stream(asked).finalChatCompletion());
  },

  "chat/error-404": () => thrown(chat([user(HELLO)], { model: "nobody" })),
  ...troubles("chat", (headers) => chat([user(HELLO)], {}, { headers })),
  "chat/timeout": () => thrown(chat([user(HELLO)], {}, hanging)),

  "chat/growing": async () => {
    const messages = [{ role: "system", content: playing.instructions }];
    const told = { texts: [], calls: [] };
    for (const said of playing.turns) {
      messages.push(user(said));
      for (let open = true; open; ) {
        const asked = { model: MODEL, messages, tools: [chatTool(playing.tool)] };
        const { content, tool_calls = [] } = await client.chat.completions.stream(asked).finalMessage();
        open = tool_calls.length > 0;
        messages.push({ role: "assistant", content, ...(open && { tool_calls }) });
        if (content) told.texts.push(content);
        for (const { id, function: { name, arguments: given } } of tool_calls) {
          told.calls.push([name, given]);
          messages.push({ role: "tool", tool_call_id: id, content: playing.lookup(JSON.parse(given)) });
        }
      }
    }
    return told;
  },
};

const responses = {
  "responses/text": async () => responseTold(await respond(HELLO, { instructions: "Be brief." })),

  "responses/stream": async () => ({
    types: await playing.types(await respond([user(HELLO)], { stream: true })),
  }),

  "responses/helper": async () => {
    const asked = { model: MODEL, input: [user(HELLO)], store: false };
    return responseTold(await client.responses.stream(asked).finalResponse());
  },

  "responses/tools": async () => {
    const input = [user(CALL)];
    const first = await respond(input, { tools: [responseTool(SEARCH)] });
    input.push(...first.output);
    input.push(...callsOf(first).map((call) => output(call, playing.search(JSON.parse(call.arguments)))));
    return [responseTold(first), responseTold(await respond(input, { tools: [responseTool(SEARCH)] }))];
  },

  "responses/stream-tools": async () => {
    const asked = { model: MODEL, input: [user(CALL)], tools: [responseTool(SEARCH)], store: false };
    return responseTold(await client.responses.stream(asked).finalResponse());
  },

  "responses/error-404": () => thrown(respond(HELLO, { model: "nobody" })),
  ...troubles("responses", (headers) => respond(HELLO, {}, { headers })),
  "responses/timeout": () => thrown(respond(HELLO, {}, hanging)),

  "responses/growing": async () => {
    const input = [];
    const told = { texts: [], calls: [] };
    for (const said of playing.turns) {
      input.push(user(said));
      for (let calls = [said]; calls.length > 0; ) {
        const asked = { model: MODEL, input, instructions: playing.instructions, store: false };
        const more = { tools: [responseTool(playing.tool)] };
        const answer = await client.responses.stream({ ...asked, ...more }).finalResponse();
        input.push(...answer.output);
        if (answer.output_text) told.texts.push(answer.output_text);
        calls = callsOf(answer);
        for (const call of calls) {
          told.calls.push([call.name, call.arguments]);
          input.push(output(call, playing.lookup(JSON.parse(call.arguments))));
        }
      }
    }
    return told;
  },
};

await play({ ...chats, ...responses });
