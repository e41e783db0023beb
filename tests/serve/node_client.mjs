// Asks a server with npm's `openai`, and prints the answers as JSON. Arguments: a folder with node_modules, the URL, a recording.

import fs from "node:fs";
import { createRequire } from "node:module";

const [folder, url, wav] = process.argv.slice(2);
const { OpenAI, toFile } = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });

const chat = { model: "chat", messages: [{ role: "user", content: "the oil" }], max_tokens: 12 };
const schema = { type: "object", properties: { a: { type: "integer", minimum: 0, maximum: 9 } }, required: ["a"], additionalProperties: false };
const format = { type: "json_schema", json_schema: { name: "digit", schema } };
const speech = { model: "audio", response_format: "verbose_json", timestamp_granularities: ["word"] };

const answers = {};
answers.models = (await client.models.list()).data.map((model) => model.id);
answers.chat = (await client.chat.completions.create(chat)).choices[0].message.content;
answers.stream = "";
for await (const part of await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } })) {
  answers.stream += part.choices[0]?.delta?.content ?? "";
  answers.usage = part.usage;
}
answers.json = (await client.chat.completions.create({ ...chat, max_tokens: 60, response_format: format })).choices[0].message.content;
answers.vectors = (await client.embeddings.create({ model: "vector", input: ["a day", "bad"] })).data.map((one) => [...one.embedding]);
answers.audio = await client.audio.transcriptions.create({ ...speech, file: await toFile(fs.readFileSync(wav), "a.wav") });
answers.error = await client.embeddings.create({ model: "chat", input: "a" }).catch((error) => [error.status, error.message]);
console.log(JSON.stringify(answers));
