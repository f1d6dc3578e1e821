// @anthropic-ai/sdk: messages, and counting their tokens.
import Anthropic from "@anthropic-ai/sdk";

import * as playing from "./playing.mjs";
import { CALL, HELLO, MODEL, SEARCH, play, thrown, troubles } from "./playing.mjs";

const TIMEOUT_MS = 300;
// This SDK adds /v1 by itself.
const client = new Anthropic({ baseURL: playing.ROOT_URL, apiKey: playing.KEY, maxRetries: 0 });
const hanging = { headers: { "x-demo-fault": "hang" }, timeout: TIMEOUT_MS };

const user = (content) => ({ role: "user", content });
const tool = ({ name, description, parameters }) => ({ name, description, input_schema: parameters });
const asking = (messages, more = {}) => ({ model: MODEL, max_tokens: 512, messages, ...more });
const ask = (messages, more, options) => client.messages.create(asking(messages, more), options);
const callsOf = ({ content }) => content.filter(({ type }) => type === "tool_use");
const textOf = ({ content }) => content.map(({ text = "" }) => text).join("");
const result = ({ id }, content) => ({ type: "tool_result", tool_use_id: id, content });
const thinking = { thinking: { type: "enabled", budget_tokens: 1024 }, max_tokens: 2048 };

const told = (message) => ({
  text: textOf(message),
  calls: callsOf(message).map(({ name, input }) => [name, input]),
  types: message.content.map(({ type }) => type),
  finish: message.stop_reason,
  usage: message.usage,
});

await play({
  "messages/text": async () => told(await ask([user(HELLO)], { system: "Be brief." })),

  "messages/stream": async () => ({
    types: await playing.types(await ask([user(HELLO)], { stream: true })),
  }),

  "messages/helper": async () => told(await client.messages.stream(asking([user(HELLO)])).finalMessage()),

  "messages/thinking": async () => {
    const first = await client.messages.stream(asking([user(HELLO)], thinking)).finalMessage();
    const messages = [user(HELLO), { role: "assistant", content: first.content }, user("And again.")];
    return [told(first), told(await ask(messages, thinking))];
  },

  "messages/tools": async () => {
    const messages = [user(CALL)];
    const first = await ask(messages, { tools: [tool(SEARCH)] });
    messages.push({ role: "assistant", content: first.content });
    messages.push(user(callsOf(first).map((call) => result(call, playing.search(call.input)))));
    return [told(first), told(await ask(messages, { tools: [tool(SEARCH)] }))];
  },

  "messages/stream-tools": async () => {
    const stream = client.messages.stream(asking([user(CALL)], { tools: [tool(SEARCH)] }));
    return told(await stream.finalMessage());
  },

  "messages/count-tokens": () => client.messages.countTokens({ model: MODEL, messages: [user(HELLO)] }),

  "messages/error-404": () => thrown(ask([user(HELLO)], { model: "nobody" })),
  ...troubles("messages", (headers) => ask([user(HELLO)], {}, { headers })),
  "messages/timeout": () => thrown(ask([user(HELLO)], {}, hanging)),

  "messages/growing": async () => {
    const system = [{ type: "text", text: playing.instructions, cache_control: { type: "ephemeral" } }];
    const more = { system, tools: [tool(playing.tool)] };
    const messages = [];
    const said = { texts: [], calls: [] };
    for (const text of playing.turns) {
      messages.push(user([{ type: "text", text }]));
      for (let calls = [text]; calls.length > 0; ) {
        const answer = await client.messages.stream(asking(messages, more)).finalMessage();
        messages.push({ role: "assistant", content: answer.content });
        if (textOf(answer)) said.texts.push(textOf(answer));
        calls = callsOf(answer);
        said.calls.push(...calls.map(({ name, input }) => [name, input]));
        if (calls.length > 0) {
          messages.push(user(calls.map((call) => result(call, playing.lookup(call.input)))));
        }
      }
    }
    return said;
  },
});
