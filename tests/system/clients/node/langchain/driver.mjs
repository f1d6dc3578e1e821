// LangChain for JavaScript: ChatOpenAI over chat completions and over responses, and ChatAnthropic.
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage, SystemMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";

import * as playing from "./playing.mjs";
import { CALL, HELLO, MODEL, SEARCH, play, thrown, troubles } from "./playing.mjs";

const usual = { model: MODEL, apiKey: playing.KEY, maxRetries: 0, maxTokens: 512 };

const models = {
  chat: (more = {}, defaultHeaders = {}) =>
    new ChatOpenAI({ ...usual, configuration: { baseURL: playing.BASE_URL, defaultHeaders }, ...more }),
  responses: (more = {}, headers = {}) =>
    models.chat({ useResponsesApi: true, zdrEnabled: true, ...more }, headers),
  messages: (more = {}, defaultHeaders = {}) =>
    new ChatAnthropic({ ...usual, anthropicApiUrl: playing.ROOT_URL, clientOptions: { defaultHeaders }, ...more }),
};

const runnable = ({ name, description, parameters }, run) => tool(run, { name, description, schema: parameters });
const search = runnable(SEARCH, playing.search);
const lookup = runnable(playing.tool, playing.lookup);

const told = (message) => ({
  text: message.text,
  calls: (message.tool_calls ?? []).map(({ name, args }) => [name, args]),
  usage: message.usage_metadata,
});

const whole = async (stream) => {
  let all;
  for await (const piece of stream) all = all === undefined ? piece : all.concat(piece);
  return all;
};

const casesOf = (wire, model) => ({
  [`${wire}/text`]: async () => told(await model().invoke(HELLO)),
  [`${wire}/stream`]: async () => told(await whole(await model().stream(HELLO))),

  [`${wire}/tools`]: async () => {
    const equipped = model().bindTools([search]);
    const said = [new HumanMessage(CALL)];
    const first = await equipped.invoke(said);
    said.push(first);
    for (const call of first.tool_calls) said.push(await search.invoke(call));
    return [told(first), told(await equipped.invoke(said))];
  },

  [`${wire}/stream-tools`]: async () => told(await whole(await model().bindTools([search]).stream(CALL))),

  [`${wire}/error-404`]: () => thrown(model({ model: "nobody" }).invoke(HELLO)),
  ...troubles(wire, (headers) => model({}, headers).invoke(HELLO)),

  [`${wire}/growing`]: async () => {
    const equipped = model().bindTools([lookup]);
    const history = [new SystemMessage(playing.instructions)];
    const said = { texts: [], calls: [] };
    for (const text of playing.turns) {
      history.push(new HumanMessage(text));
      for (let calls = [text]; calls.length > 0; ) {
        const answer = await equipped.invoke(history);
        history.push(answer);
        calls = answer.tool_calls;
        if (answer.text) said.texts.push(answer.text);
        for (const call of calls) {
          said.calls.push([call.name, call.args]);
          history.push(await lookup.invoke(call));
        }
      }
    }
    return said;
  },
});

await play(Object.assign({}, ...Object.entries(models).map(([wire, model]) => casesOf(wire, model))));
