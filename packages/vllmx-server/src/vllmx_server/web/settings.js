// What a user sets, how it is kept, and the request that it makes.

const KEPT = "vllmx.settings";
const TOP_LOGPROBS = 5;

/** Sampling fields: name, label, least, greatest, step, what it does. An empty one is the model's. */
export const NUMBERS = [
  ["temperature", "Temperature", 0, 100, 0.1, "0 always takes the likeliest token"],
  ["top_p", "Top p", 0, 1, 0.05, "share of probability that is drawn from"],
  ["top_k", "Top k", -1, 1 << 30, 1, "the number of likeliest tokens that are drawn from; -1 for all"],
  ["min_p", "Min p", 0, 1, 0.01, "least probability, relative to the likeliest"],
  ["max_tokens", "Max tokens", 1, 1 << 30, 1, "the most tokens of an answer"],
  ["seed", "Seed", 0, Number.MAX_SAFE_INTEGER, 1, "the same seed gives the same answer"],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "against tokens that occurred"],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, "the more often they occurred"],
  ["repetition_penalty", "Repetition penalty", 0.01, 100, 0.05, "1 is none"],
];
const TEXTS = ["system", "thinking", "stop", "schema", "tools", "logprobs", "servers", "allowed"];
const OF_A_CHAT = ["schema", "tools", "servers", "allowed"];

/** What of an object are settings: those that are known, of their types. */
export function settingsOf(object) {
  const found = {};
  for (const [name] of NUMBERS) if (Number.isFinite(object?.[name])) found[name] = object[name];
  for (const name of TEXTS) if (typeof object?.[name] === "string") found[name] = object[name];
  return found;
}

/** Those of a new chat: what was set last, but for the form of answers and the tools. */
export function lastSettings() {
  try {
    const found = settingsOf(JSON.parse(localStorage.getItem(KEPT)));
    for (const name of OF_A_CHAT) delete found[name];
    return found;
  } catch {
    return {};
  }
}

export function keepSettings(settings) {
  localStorage.setItem(KEPT, JSON.stringify(settings));
}

/** What is wrong with a text that should be JSON; null when it is, or is empty. */
export function jsonTrouble(text, isArray) {
  if (!text?.trim()) return null;
  try {
    const value = JSON.parse(text);
    if (!isArray) return isObject(value) ? null : "This must be an object: { … }";
    if (!Array.isArray(value)) return "This must be a list: [ … ]";
    return value.every(isObject) ? null : "Each of the list must be an object: { … }";
  } catch (error) {
    return error.message;
  }
}

function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

/** The body of a chat completion for the messages of a path. `functions`: tools of MCP servers. */
export function requestBody(path, settings, model, functions, goesOn) {
  const body = { messages: [], stream: true, stream_options: { include_usage: true } };
  if (model) body.model = model;
  if (settings.system?.trim()) body.messages.push({ role: "system", content: settings.system });
  body.messages.push(...path.map(message));
  for (const [name] of NUMBERS) {
    if (Number.isFinite(settings[name])) body[name] = settings[name];
  }
  const stop = lines(settings.stop);
  if (stop.length) body.stop = stop;
  if (settings.schema?.trim()) {
    const schema = JSON.parse(settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  const own = settings.tools?.trim() ? JSON.parse(settings.tools).map(asTool) : [];
  if (own.length || functions.length) body.tools = [...own, ...functions];
  if (settings.thinking) {
    const isOn = settings.thinking === "on";
    body.chat_template_kwargs = { enable_thinking: isOn, thinking: isOn };
  }
  if (settings.logprobs === "on") Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  if (goesOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

/** The lines of a setting that is a list. */
export function lines(text) {
  return (text ?? "").split("\n").filter(Boolean);
}

/** A function may stand alone, without what the API puts around it. */
function asTool(tool) {
  return tool.type === "function" ? tool : { type: "function", function: tool };
}

function message(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.call, content: node.content };
  if (node.role === "user") return { role: "user", content: parts(node) };
  const found = { role: "assistant", content: node.content };
  if (node.reasoning) found.reasoning_content = node.reasoning;
  if (node.calls?.length) {
    found.tool_calls = node.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return found;
}

function parts(node) {
  const text = withFiles(node);
  const images = (node.images ?? []).map((url) => ({ type: "image_url", image_url: { url } }));
  const audio = (node.audio ?? []).map(({ url }) => ({
    type: "input_audio",
    input_audio: { data: url.slice(url.indexOf(",") + 1), format: "wav" },
  }));
  const seen = [...images, ...audio];
  if (!seen.length) return text;
  return text ? [...seen, { type: "text", text }] : seen;
}

/** A message's text behind its files, each in a fence that is longer than any in it. */
export function withFiles({ content, files }) {
  const blocks = (files ?? []).map(({ name, text }) => {
    const runs = text.match(/`{3,}/g) ?? [];
    const fence = "`".repeat(1 + Math.max(2, ...runs.map((run) => run.length)));
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...blocks, content].filter(Boolean).join("\n\n");
}

// --- presets -------------------------------------------------------------------------------------
const PRESETS = "vllmx.presets";

/** Settings that were given a name, by name. */
export function presets() {
  try {
    const found = JSON.parse(localStorage.getItem(PRESETS));
    return Object.fromEntries(Object.entries(found ?? {}).map(([name, one]) => [name, settingsOf(one)]));
  } catch {
    return {};
  }
}

/** Keeps settings under a name, in place of those that had it; null removes them. */
export function keepPreset(name, settings) {
  const found = presets();
  if (settings) found[name] = settings;
  else delete found[name];
  localStorage.setItem(PRESETS, JSON.stringify(found));
}
