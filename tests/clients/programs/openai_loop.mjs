// The npm package openai: chat, stream, tools by runTools, parsed output, and Responses.
import assert from "node:assert";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const base = { model: "lockstep", temperature: 0, max_tokens: 80 };
const messages = [{ role: "user", content: "List the first 5 primes." }];
const whole = await client.chat.completions.create({ ...base, messages });
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...base, messages, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, whole.choices[0].message.content);

const cities = [];
const runner = client.chat.completions.runTools({
  ...base,
  messages: [{ role: "user", content: "What is the weather in Rome?" }],
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "Get the weather of a city",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
        parse: JSON.parse,
        function: ({ city }) => {
          cities.push(city);
          return `sunny, 25 degrees in ${city}`;
        },
      },
    },
  ],
});
assert.ok((await runner.finalContent()) !== undefined);
assert.equal(cities.length, 1);

const Person = z.object({ name: z.string(), age: z.number().int() });
const parsed = await client.chat.completions.parse({
  ...base,
  messages: [{ role: "user", content: "Ann is 31 years old." }],
  response_format: zodResponseFormat(Person, "person"),
});
assert.ok(Person.safeParse(parsed.choices[0].message.parsed).success);

const first = await client.responses.create({ model: "lockstep", input: "List the first 5 primes.", temperature: 0, max_output_tokens: 80 });
assert.ok(first.output_text);
const stream = client.responses.stream({ model: "lockstep", input: "And the next?", previous_response_id: first.id, max_output_tokens: 40 });
const last = await stream.finalResponse();
assert.ok(["completed", "incomplete"].includes(last.status));
