// OpenAI's client for JavaScript.
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];

const answer = await client.chat.completions.create({ model: "tiny", messages });
assert.equal(answer.choices[0].message.content, "Hello there!");

let text = "";
for await (const chunk of await client.chat.completions.create({ model: "tiny", messages, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, "Hello there!");

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const runner = client.chat.completions.runTools({
  model: "tiny",
  messages: [{ role: "user", content: "How is the weather?" }],
  tools: [
    { type: "function", function: { name: "get_weather", parameters, parse: JSON.parse, function: () => "sunny" } },
  ],
});
const calls = [];
runner.on("functionToolCall", (call) => calls.push(call));
assert.equal(await runner.finalContent(), "Hello there!");
assert.deepEqual(calls.map((call) => [call.name, call.arguments]), [["get_weather", '{"city": "Bern"}']]);

const schema = { type: "object", properties: { age: { type: "integer" } }, required: ["age"], additionalProperties: false };
const held = await client.chat.completions.create({
  model: "tiny",
  messages,
  response_format: { type: "json_schema", json_schema: { name: "person", strict: true, schema } },
});
assert(Number.isInteger(JSON.parse(held.choices[0].message.content).age));

const stream = client.responses.stream({ model: "tiny", input: "Say hello." });
assert.equal((await stream.finalResponse()).output_text, "Hello there!");
await assert.rejects(client.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);
