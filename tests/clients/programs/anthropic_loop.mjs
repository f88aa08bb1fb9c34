// The npm package @anthropic-ai/sdk: messages, stream, a tool loop, and a count of tokens.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const base = { model: "lockstep", max_tokens: 80, temperature: 0 };
const messages = [{ role: "user", content: "List the first 5 primes." }];
const whole = await client.messages.create({ ...base, messages });
const streamed = await client.messages.stream({ ...base, messages }).finalMessage();
assert.deepEqual(streamed.content, whole.content);
const counted = await client.messages.countTokens({ model: "lockstep", messages });
assert.equal(counted.input_tokens, whole.usage.input_tokens + (whole.usage.cache_read_input_tokens ?? 0));

const tools = [
  {
    name: "get_weather",
    description: "Get the weather of a city",
    input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
];
const history = [{ role: "user", content: "What is the weather in Rome?" }];
const call = await client.messages.create({ ...base, messages: history, tools, tool_choice: { type: "any" } });
const use = call.content.find((block) => block.type === "tool_use");
assert.equal(call.stop_reason, "tool_use");
assert.equal(typeof use.input.city, "string");
history.push({ role: "assistant", content: call.content });
history.push({ role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "sunny" }] });
const answer = await client.messages.create({ ...base, messages: history, tools });
assert.ok(answer.content.length > 0);
