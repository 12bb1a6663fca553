// The server's API: requests with the key, and errors in words.
import { EventReader } from "./sse.js";
import { pause } from "./ui.js";

const SLICE_MS = 8;
const WRONG_KEY = "invalid_api_key";

/** `kind`: "key" (none, or a wrong one), "offline", "busy" (try later), "refused" or "failed". */
export class ServerError extends Error {
  constructor(kind, message, code = null) {
    super(message);
    this.kind = kind;
    this.code = code;
  }
}

const KEY = "vllmx.key";

/** The API key: of this tab, or of this browser where the user asked for that. */
export const key = {
  get value() {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
  },
  get isKept() {
    return localStorage.getItem(KEY) !== null;
  },
  set(value, isKept) {
    this.forget();
    if (value) (isKept ? localStorage : sessionStorage).setItem(KEY, value);
  },
  forget() {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
  },
};

/** The answer to a request, whose status is a good one. Raises ServerError. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (key.value) headers.authorization = `Bearer ${encodeKey(key.value)}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("offline", "The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Headers hold bytes: a key with other characters goes as UTF-8. */
function encodeKey(value) {
  return String.fromCharCode(...new TextEncoder().encode(value));
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // A proxy's page: the status has to do.
  }
  const message = error.message ?? `The server answered with status ${response.status}.`;
  const kinds = { 401: "key", 429: "busy", 502: "offline", 503: "busy", 504: error.code ? "failed" : "offline" };
  const kind = kinds[response.status] ?? (response.status < 500 ? "refused" : "failed");
  return new ServerError(error.code === WRONG_KEY ? "key" : kind, message, error.code);
}

export async function listModels() {
  return (await (await call("v1/models")).json()).data;
}

/** The MCP servers that this key may use, with their tools. */
export async function listToolServers() {
  return (await (await call("v1/mcp/servers")).json()).data;
}

/** The text of a tool's result, which may say that the call failed. */
export async function callTool(server, name, args, signal) {
  const body = { server_label: server, name, arguments: args };
  return (await (await call("v1/mcp/call", { body, signal })).json()).output;
}

/** Streams a chat; `take` is given each chunk. Raises ServerError, also for what fails later, and
 * AbortError when `signal` says so. */
export async function streamChat(body, signal, take) {
  const response = await call("v1/chat/completions", { body, signal });
  const stream = response.body.getReader();
  const reader = new EventReader();
  let since = performance.now();
  for (;;) {
    const { done, value } = await readFrom(stream);
    if (done) throw new ServerError("offline", "The connection ended before the answer did.");
    for (const data of reader.feed(value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError("failed", chunk.error.message, chunk.error.code);
      take(chunk);
      if (performance.now() - since > SLICE_MS) {
        await pause();
        since = performance.now();
      }
    }
  }
}

async function readFrom(stream) {
  try {
    return await stream.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("offline", "The connection to the server broke.");
  }
}
