// A chat with three streamed turns, using the official OpenAI client for Node.
//
//   npm install openai && node examples/chat.mjs [URL]
import { randomUUID } from "node:crypto";
import OpenAI from "openai";

const url = process.argv[2] ?? "http://127.0.0.1:8000";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });
const model = (await client.models.list()).data[0].id;
const headers = { "x-session-id": `node-${randomUUID()}` }; // one id per conversation
const messages = [{ role: "system", content: "You are the clerk of a harbour. ".repeat(12) }];

for (const question of ["May I come in?", "Where do I sign?", "Thank you. Anything else?"]) {
  messages.push({ role: "user", content: question });
  const request = { model, messages, max_tokens: 12, stream: true, stream_options: { include_usage: true } };
  const { data: stream, response } = await client.chat.completions.create(request, { headers }).withResponse();
  let answer = "";
  let usage;
  for await (const chunk of stream) {
    answer += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  messages.push({ role: "assistant", content: answer });
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const where = `${response.headers.get("x-homing-backend")} ${response.headers.get("x-homing-affinity")}`;
  console.log(`${where.padEnd(20)} ${cached} of ${usage.prompt_tokens} prompt tokens cached`);
}
