// The AI SDK: text, stream, a tool loop and an object, by three of its providers.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const url = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "lockstep",
  baseURL: url,
  supportsStructuredOutputs: true,
  includeUsage: true, // without it this provider does not ask for a stream's usage
});
const anthropic = createAnthropic({ baseURL: url, apiKey: "none" });
const base = { temperature: 0, maxOutputTokens: 120, maxRetries: 0 };
const Person = z.object({ name: z.string(), age: z.number().int() });
for (const model of [openai("lockstep"), openai.chat("lockstep"), compatible("lockstep"), anthropic("lockstep")]) {
  const prompt = "List the first 5 primes.";
  const whole = await generateText({ ...base, model, prompt });
  const stream = streamText({ ...base, model, prompt });
  assert.equal(await stream.text, whole.text);
  assert.ok((await stream.usage).outputTokens > 0);

  const cities = [];
  const weather = tool({
    description: "Get the weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return `sunny, 25 degrees in ${city}`;
    },
  });
  const messages = [{ role: "user", content: "What is the weather in Rome?" }];
  const reply = await generateText({
    ...base,
    model,
    messages,
    tools: { get_weather: weather },
    stopWhen: isStepCount(4),
  });
  assert.ok(cities.length >= 1, `${model.provider}: no call in ${JSON.stringify(reply.content)}`);
  // The Responses provider names the answers of earlier turns by item_reference.
  messages.push(...reply.responseMessages, { role: "user", content: "List the first 5 primes." });
  const later = await generateText({ ...base, model, messages, tools: { get_weather: weather } });
  assert.ok(later.content.length > 0);

  const person = await generateText({
    ...base,
    model,
    prompt: "Ann is 31 years old.",
    output: Output.object({ schema: Person }),
  });
  assert.ok(Person.safeParse(person.output).success);
}
