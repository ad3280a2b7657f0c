// npm's openai against the address in argv[2] (/v1): speech whole and streamed, embeddings, models, errors.
// Prints one JSON object of what it got; the test compares.
const { OpenAI } = require("openai");

async function main() {
  const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
  const wanted = { model: "tone", voice: "sine", response_format: "pcm" };
  const whole = await client.audio.speech.create({ ...wanted, input: "hello" });
  const streamed = await client.audio.speech.create({ ...wanted, input: "pieces:3:0.05" });
  const sizes = [];
  for await (const chunk of streamed.body) sizes.push(chunk.length);
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  const refused = await client.audio.speech.create({ ...wanted, input: "hello", speed: 9 }).catch((e) => e);
  const unknown = await client.embeddings.create({ model: "tone", input: "hello" }).catch((e) => e);
  return {
    whole: (await whole.arrayBuffer()).byteLength,
    type: whole.headers.get("content-type"),
    streamed: sizes.reduce((a, b) => a + b, 0),
    models,
    refused: [refused.constructor.name, refused.status, refused.param, refused.code],
    unknown: [unknown.constructor.name, unknown.status, unknown.code],
    requestId: typeof refused.requestID,
  };
}

async function embed() {
  const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
  const answer = await client.embeddings.create({ model: "minilm", input: ["one", "two words"] });
  return { lengths: answer.data.map((row) => row.embedding.length), tokens: answer.usage.total_tokens };
}

(process.argv[3] === "embed" ? embed() : main()).then(
  (found) => console.log(JSON.stringify(found)),
  (error) => { console.error(error); process.exit(1); },
);
