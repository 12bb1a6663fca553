// Chats as a file, and back: what comes from a file is checked field by field and gets new ids.
import { settingsOf, withFiles } from "./settings.js";
import { newId } from "./ui.js";

const FORMAT = "vllmx-chats";
const VERSION = 1;
const STATES = ["done", "stopped", "interrupted", "failed"];
const IMAGE = /^data:image\/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/;

const AUDIO = /^data:audio\/wav;base64,[A-Za-z0-9+/]+=*$/;

/** `chats`: [{chat, nodes}]. */
export function toFile(chats) {
  const file = { format: FORMAT, version: VERSION, exported: new Date().toISOString(), chats };
  return JSON.stringify(file, null, 1);
}

/** The chats of a file, ready to be kept. Raises Error with a sentence on what is wrong. */
export function fromFile(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON.");
  }
  if (file?.format !== FORMAT) throw new Error("it is no file of chats.");
  if (file.version !== VERSION) throw new Error(`its version is ${file.version}, known is ${VERSION}.`);
  if (!Array.isArray(file.chats)) throw new Error("it has no list of chats.");
  return file.chats.map(readChat);
}

/** Offers a text as a file to keep. */
export function saveFile(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** The messages of a path as Markdown. */
export function toMarkdown(title, path) {
  const parts = path.map((node) => {
    if (node.role === "user") return `## You\n\n${withFiles(node)}`;
    if (node.role === "tool") return `## Result of ${node.name}\n\n${node.content}`;
    const calls = (node.calls ?? []).map((call) => `Calls \`${call.name}\` with \`${call.arguments}\``);
    return [`## ${node.model || "Answer"}`, node.content, ...calls].filter(Boolean).join("\n\n");
  });
  return `# ${title}\n\n${parts.join("\n\n")}\n`;
}

function readChat(record) {
  const { chat, nodes } = record ?? {};
  if (typeof chat?.title !== "string" || !Array.isArray(nodes) || !nodes.length) {
    throw new Error("a chat has no title or no messages.");
  }
  const ids = new Map(nodes.map((node) => [node?.id, newId()]));
  if (ids.size < nodes.length || ids.has(undefined)) throw new Error("two messages have one id, or one has none.");
  const id = newId();
  const kept = nodes.map((node) => readNode(node, id, ids));
  breakCircles(kept);
  const settings = settingsOf(chat.settings);
  delete settings.allowed; // only this browser's user may agree to calls
  const leaf = ids.get(chat.leaf) ?? kept.at(-1).id;
  const time = (value) => (Number.isFinite(value) ? value : Date.now());
  const { created, updated } = chat;
  return {
    chat: { id, title: chat.title.slice(0, 200), created: time(created), updated: time(updated), leaf, settings },
    nodes: kept,
  };
}

function readNode(node, chat, ids) {
  if (!["user", "assistant", "tool"].includes(node?.role) || typeof node.content !== "string") {
    throw new Error("a message has no role or no text.");
  }
  const found = { id: ids.get(node.id), chat, parent: ids.get(node.parent) ?? null, role: node.role, content: node.content };
  found.order = Number.isFinite(node.order) ? node.order : 0;
  for (const name of ["reasoning", "model", "finish", "name", "call"]) {
    if (typeof node[name] === "string") found[name] = node[name];
  }
  if (node.role === "assistant") found.state = STATES.includes(node.state) ? node.state : "interrupted";
  if (Array.isArray(node.images)) found.images = node.images.filter((url) => IMAGE.test(url));
  if (Array.isArray(node.audio)) {
    const isAudio = (one) => typeof one?.name === "string" && AUDIO.test(one.url);
    found.audio = node.audio.filter(isAudio).map(({ name, url }) => ({ name, url }));
  }
  if (Array.isArray(node.files)) {
    const isText = (file) => typeof file?.name === "string" && typeof file.text === "string";
    found.files = node.files.filter(isText).map(({ name, text }) => ({ name, text }));
  }
  found.stats = statsOf(node.stats);
  if (typeof node.error?.message === "string") found.error = { kind: "failed", message: node.error.message };
  if (Array.isArray(node.calls)) {
    found.calls = node.calls.map((call) => ({ id: String(call?.id), name: String(call?.name), arguments: String(call?.arguments) }));
  }
  return found;
}

/** A message that comes after itself becomes a first one. */
function breakCircles(nodes) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const seen = new Set();
  for (const node of nodes) {
    const way = new Set();
    let at = node;
    for (; at && !seen.has(at) && !way.has(at); at = byId.get(at.parent)) way.add(at);
    if (way.has(at)) at.parent = null;
    for (const one of way) seen.add(one);
  }
}

/** Numbers alone. */
function statsOf(object) {
  return Object.fromEntries(Object.entries(object ?? {}).filter(([, value]) => Number.isFinite(value)));
}
