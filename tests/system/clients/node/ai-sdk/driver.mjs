// The Vercel AI SDK with three providers: OpenAI-compatible chat, OpenAI's responses, Anthropic's messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

import * as playing from "./playing.mjs";
import { CALL, HELLO, MODEL, SEARCH, play, thrown, troubles } from "./playing.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const reached = { baseURL: playing.BASE_URL, apiKey: playing.KEY };
const wires = {
  chat: createOpenAICompatible({ name: "provider", includeUsage: true, ...reached }).chatModel,
  responses: createOpenAI(reached).responses,
  messages: createAnthropic(reached).messages,
};

const equipped = ({ name, description, parameters }, execute) => ({
  [name]: tool({ description, inputSchema: jsonSchema(parameters), execute }),
});
const search = equipped(SEARCH, playing.search);
const lookup = equipped(playing.tool, playing.lookup);

/** What the way to every wire has in common; the responses stay on this side. */
const asking = (model, more) => ({
  model,
  maxRetries: 0,
  maxOutputTokens: 512,
  stopWhen: stepCountIs(5),
  onError: () => {},
  providerOptions: { openai: { store: false } },
  ...more,
});

const stepTold = ({ text, toolCalls, finishReason, usage }) => ({
  text,
  calls: toolCalls.map(({ toolName, input }) => [toolName, input]),
  finish: finishReason,
  usage,
});

const told = async ({ steps }) => (await steps).map(stepTold);

const casesOf = (wire, model) => ({
  [`${wire}/text`]: async () => told(await generateText(asking(model(MODEL), { prompt: HELLO }))),
  [`${wire}/stream`]: async () => told(streamText(asking(model(MODEL), { prompt: HELLO }))),

  [`${wire}/tools`]: async () =>
    told(await generateText(asking(model(MODEL), { prompt: CALL, tools: search }))),

  [`${wire}/stream-tools`]: async () => told(streamText(asking(model(MODEL), { prompt: CALL, tools: search }))),

  [`${wire}/error-404`]: () => thrown(generateText(asking(model("nobody"), { prompt: HELLO }))),
  ...troubles(wire, (headers) => generateText(asking(model(MODEL), { prompt: HELLO, headers }))),

  [`${wire}/growing`]: async () => {
    const messages = [];
    const said = { texts: [], calls: [] };
    for (const content of playing.turns) {
      messages.push({ role: "user", content });
      const more = { system: playing.instructions, messages, tools: lookup };
      const answer = streamText(asking(model(MODEL), more));
      for (const step of await told(answer)) {
        if (step.text) said.texts.push(step.text);
        said.calls.push(...step.calls);
      }
      messages.push(...(await answer.responseMessages));
    }
    return said;
  },
});

await play(Object.assign({}, ...Object.entries(wires).map(([wire, model]) => casesOf(wire, model))));
