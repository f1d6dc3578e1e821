// What the drivers share: what is asked, the conversation that grows, and how they tell what came of a case.
import { readSync } from "node:fs";
import { readFile } from "node:fs/promises";

export const { BASE_URL: ROOT_URL, KEY, MODEL } = process.env;
export const BASE_URL = `${ROOT_URL}/v1`;

export const HELLO = "Say héllo 🙂";
// By such a line the provider is asked to call a tool.
export const CALL = 'call search {"query": "Grüße"}';
export const SEARCH = {
  name: "search",
  description: "Searches.",
  parameters: {
    type: "object",
    properties: { query: { type: "string" } },
    required: ["query"],
    additionalProperties: false,
  },
};
export const search = ({ query }) => `found ${query}`;

const { CASES, CONVERSATION } = process.env;
/** The conversation that grows: `instructions`, `tool`, `turns`, `results` by topic. */
export const { instructions, tool, turns, results } = JSON.parse(await readFile(CONVERSATION, "utf-8"));
export const lookup = ({ topic }) => results[topic];

/** What a rejected promise shows to whoever catches it. */
export const thrown = (promise) =>
  promise.then(
    () => "no error",
    (error) => ({
      error: error.constructor.name,
      status: error.status ?? error.statusCode ?? null,
      message: error.message.replace(/req_\w+/, "req_…"),
    }),
  );

/** A case for each kind of trouble; `ask` is given the headers by which the provider is asked for it. */
export const troubles = (wire, ask) => {
  const words = { "error-400": "status=400", "error-429": "status=429", "error-500": "status=500", cut: "cut=2" };
  const told = ([name, word]) => [`${wire}/${name}`, () => thrown(ask({ "x-demo-fault": word }))];
  return Object.fromEntries(Object.entries(words).map(told));
};

/** How many events of each type there were, in the order of their first. */
export const types = async (stream) => {
  const seen = new Map();
  for await (const { type } of stream) seen.set(type, (seen.get(type) ?? 0) + 1);
  return [...seen];
};

/** Plays the cases asked for, else all, in order, one line of JSON each. */
export const play = async (cases) => {
  const names = CASES ? CASES.split(" ") : Object.keys(cases);
  for (const name of names) {
    const told = { case: name, outcome: await cases[name]() };
    await new Promise((written) => process.stdout.write(`${JSON.stringify(told)}\n`, written));
    readSync(0, Buffer.alloc(1)); // until the frame has noted which requests came so far
  }
};
