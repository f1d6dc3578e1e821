// Plays cases with the openai npm package and prints what came of each; tests/system/recall/test_node.py looks at it.
import OpenAI from "openai";

const { ROOT_URL, KEYS } = process.env;
const TOOLS = [{ type: "function", function: { name: "open", parameters: { type: "object", properties: {} } } }];
const ASKED = { model: "always", messages: [{ role: "user", content: "What was the budget?" }], tools: TOOLS };

const told = ({ id, choices: [{ message, finish_reason }], usage }) => ({
  id,
  role: message.role,
  text: message.content ?? "",
  calls: (message.tool_calls ?? []).map(({ id, function: { name, arguments: given } }) => [id, name, given]),
  finish: finish_reason,
  tokens: usage.prompt_tokens,
});

const ways = {
  create: async (client) => told(await client.chat.completions.create(ASKED)),
  helper: async (client) => {
    const runner = client.chat.completions.stream({ ...ASKED, stream_options: { include_usage: true } });
    return told(await runner.finalChatCompletion());
  },
};

const found = {};
for (const [name, key] of Object.entries(JSON.parse(KEYS))) {
  const client = new OpenAI({
    baseURL: `${ROOT_URL}/v1`,
    apiKey: key,
    maxRetries: 0,
    defaultHeaders: { "x-session-id": key },
  });
  try {
    found[name] = await ways[name.split(" ")[0]](client);
  } catch (error) {
    found[name] = { threw: error.stack };
  }
}
process.stdout.write(JSON.stringify(found));
