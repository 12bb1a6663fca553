// The conversations and all that can be done with them. Views read `store.state` and call methods.
import { ServerError, callTool, key, listModels, listToolServers } from "./api.js";
import { openDatabase } from "./database.js";
import { Live } from "./live.js";
import { keepSettings, lastSettings, lines, presets, requestBody } from "./settings.js";
import { fromFile, toFile, toMarkdown } from "./transfer.js";
import { branches, children, newestLeaf, pathTo } from "./tree.js";
import { Store, newId } from "./ui.js";

const RETRY_MS = 1500;
const MODEL = "vllmx.model";
const OPEN = "vllmx.chat";
const MOST_ROUNDS = 16; // of calls that nobody was asked about

export class Chats {
  constructor() {
    this.lives = new Map(); // by node
    this.runs = new Map(); // by node: {node, stop} of calls of tools
    addEventListener("pagehide", () => {
      for (const live of this.lives.values()) live.save(live.node);
    });
    this.store = new Store({
      list: [], // chats without their messages, the newest first
      chat: null, // the open one: {id, title, created, updated, leaf, settings, nodes}
      models: [],
      model: localStorage.getItem(MODEL) ?? "",
      servers: [], // MCP servers: {server_label, tools, error}
      compared: "", // whose answers are shown beside: "model:ID", "preset:NAME" or nobody's
      trouble: null, // {kind, message} while the server does not serve
      needsKey: false,
      isKept: true,
      said: "", // for screen readers
    });
  }

  get state() {
    return this.store.state;
  }

  async start() {
    this.database = await openDatabase();
    const list = (await this.database.list()).sort((a, b) => b.updated - a.updated);
    this.store.set({ list, isKept: this.database.isKept });
    const last = sessionStorage.getItem(OPEN);
    if (last && list.some((chat) => chat.id === last)) await this.open(last);
    else this.begin();
    await this.connect();
  }

  // --- the server -------------------------------------------------------------------------------

  /** Looks for the server and its models, again and again until they are there. */
  async connect() {
    clearTimeout(this.retry);
    try {
      const [models, servers] = await Promise.all([listModels(), listToolServers()]);
      const isKnown = models.some((model) => model.id === this.state.model);
      const model = isKnown ? this.state.model : (models[0]?.id ?? "");
      if (this.state.trouble) this.say("The server is back.");
      this.store.set({ models, servers, model, trouble: null, needsKey: false });
    } catch (error) {
      this.note(error);
    }
  }

  /** Lists models and MCP servers again, as somebody is about to choose one. */
  async look() {
    try {
      const [models, servers] = await Promise.all([listModels(), listToolServers()]);
      this.store.set({ models, servers });
    } catch (error) {
      this.note(error);
    }
  }

  /** What an error says about the server, beside what it says about the request. */
  note(error) {
    if (!(error instanceof ServerError)) return;
    if (error.kind === "key") {
      this.store.set({ needsKey: true, keyTrouble: key.value ? "The server refuses this key." : "" });
    } else if (error.kind === "offline" || (error.kind === "busy" && !this.state.models.length)) {
      if (!this.state.trouble) this.say(error.message);
      this.store.set({ trouble: { kind: error.kind, message: error.message } });
      clearTimeout(this.retry);
      this.retry = setTimeout(() => this.connect(), RETRY_MS);
    }
  }

  setKey(value, isKept) {
    key.set(value, isKept);
    return this.connect();
  }

  setModel(model) {
    localStorage.setItem(MODEL, model);
    this.store.set({ model });
  }

  /** Text for a screen reader. */
  say(said) {
    this.store.set({ said });
  }

  // --- chats ------------------------------------------------------------------------------------

  /** A new chat, which is kept once it has a message. */
  begin() {
    const now = Date.now();
    const chat = { id: newId(), title: "", created: now, updated: now, leaf: null };
    this.show({ ...chat, settings: lastSettings(), nodes: new Map() });
  }

  async open(id) {
    const found = this.state.list.find((chat) => chat.id === id);
    const nodes = new Map((await this.database.nodes(id)).map((node) => [node.id, node]));
    for (const node of nodes.values()) {
      const live = this.lives.get(node.id);
      if (live) nodes.set(node.id, live.node);
      else if (node.state === "streaming") node.state = "interrupted"; // the page was left
    }
    this.show({ ...found, nodes });
  }

  show(chat) {
    sessionStorage.setItem(OPEN, chat.id);
    this.store.set({ chat });
  }

  async remove(id) {
    this.stop(id);
    await this.database.remove(id);
    this.store.set({ list: this.state.list.filter((chat) => chat.id !== id) });
    if (this.state.chat.id === id) this.begin();
  }

  rename(id, title) {
    const chat = this.state.list.find((one) => one.id === id);
    this.update(chat, { title: title.trim() || chat.title });
  }

  setSettings(patch) {
    const settings = { ...this.state.chat.settings, ...patch };
    keepSettings(settings);
    this.update(this.state.chat, { settings });
  }

  /** Takes settings in place of those of the open chat; the form is drawn anew. */
  replaceSettings(settings) {
    keepSettings(settings);
    this.update(this.state.chat, { settings, preset: (this.state.chat.preset ?? 0) + 1 });
  }

  /** Changes fields of a chat, in the list, in what is shown and in what is kept. */
  update(chat, patch, nodes = []) {
    const { list, chat: shown } = this.state;
    const { nodes: all, ...old } = chat;
    const next = { ...old, ...patch };
    const isOpen = shown.id === next.id;
    if (isOpen) this.store.set({ chat: { ...shown, ...patch } });
    const isListed = list.some((one) => one.id === next.id);
    if (!isListed && !nodes.length) return;
    const others = list.filter((one) => one.id !== next.id);
    const isNewer = nodes.length > 0 || !isListed;
    this.store.set({ list: isNewer ? [next, ...others] : list.map((one) => (one.id === next.id ? next : one)) });
    this.keep({ chat: next, nodes });
  }

  keep(records) {
    this.database.put(records).catch(() => this.store.set({ isKept: false }));
  }

  /** All chats as the text of a file. */
  async exportAll() {
    const chats = this.state.list.map(async (chat) => ({ chat, nodes: await this.database.nodes(chat.id) }));
    return toFile(await Promise.all(chats));
  }

  /** A chat's current path as Markdown. */
  async markdown(id) {
    const chat = this.state.list.find((one) => one.id === id);
    const nodes = new Map((await this.database.nodes(id)).map((node) => [node.id, node]));
    return toMarkdown(chat.title, pathTo(nodes, chat.leaf));
  }

  /** The ids of the chats that have these words in a title or a message. */
  async search(words) {
    const sought = words.toLowerCase();
    const found = this.state.list.filter((chat) => chat.title.toLowerCase().includes(sought));
    return new Set([...found.map((chat) => chat.id), ...(await this.database.search(sought))]);
  }

  /** Adds the chats of a file; gives how many. */
  async importAll(text) {
    const found = fromFile(text);
    for (const records of found) await this.database.put(records);
    const list = [...found.map(({ chat }) => chat), ...this.state.list];
    this.store.set({ list: list.sort((a, b) => b.updated - a.updated) });
    return found.length;
  }

  // --- messages ---------------------------------------------------------------------------------

  get path() {
    const { chat } = this.state;
    return chat ? pathTo(chat.nodes, chat.leaf) : [];
  }

  /** Adds messages to the open chat; the last becomes its leaf. */
  add(...nodes) {
    const { chat } = this.state;
    for (const node of nodes) chat.nodes.set(node.id, node);
    const patch = { leaf: nodes.at(-1).id, updated: Date.now() };
    const first = nodes.find((node) => node.role === "user");
    if (!chat.title && first) patch.title = titleOf(first.content || first.files?.[0]?.name || first.audio?.[0]?.name || "");
    this.update(chat, patch, nodes);
  }

  node(parent, fields) {
    const { chat } = this.state;
    return { id: newId(), chat: chat.id, parent, order: Date.now() * 1000 + chat.nodes.size, content: "", ...fields };
  }

  /** `attached`: {images, files, audio}, each a list. */
  send(content, attached) {
    this.ask(this.state.chat.leaf, content, attached);
  }

  /** Another version of a message, with an answer of its own. */
  edit(node, content) {
    this.ask(node.parent, content, node);
  }

  ask(parent, content, { images, files, audio }) {
    const asked = this.node(parent, { role: "user", content, images, files, audio });
    this.answer(asked.id, [asked]);
  }

  /** Another answer to the same message. */
  regenerate(node) {
    this.answer(node.parent, []);
  }

  /** Results of the calls of an answer, by their ids; the model goes on with them. */
  sendResults(node, results) {
    let parent = node.id;
    const nodes = node.calls.map((one) => {
      const result = this.node(parent, { role: "tool", call: one.id, name: one.name, content: results[one.id] ?? "" });
      parent = result.id;
      return result;
    });
    this.answer(parent, nodes);
  }

  /** MCP servers that are used with these settings. */
  serversOf(settings) {
    const used = lines(settings.servers);
    return this.state.servers.filter((one) => used.includes(one.server_label));
  }

  /** The tool of an MCP server that a call means: models leave out the server's name where that is plain. */
  toolOf(name) {
    const tools = this.serversOf(this.state.chat.settings).flatMap(({ server_label: server, tools: own }) =>
      own.map((tool) => ({ server, name: tool.function.name })),
    );
    const found = tools.filter((tool) => tool.name === `${tool.server}__${name}`);
    return tools.find((tool) => tool.name === name) ?? (found.length === 1 ? found[0] : undefined);
  }

  /** Runs the calls of an answer that MCP servers take, and sends their results with the others', unless it was
   * stopped or another chat was opened. */
  async runCalls(node, results) {
    const controller = new AbortController();
    this.runs.set(node.id, { node, stop: () => controller.abort() });
    this.store.set({});
    const running = node.calls.map(async ({ id, name, arguments: args }) => {
      const tool = this.toolOf(name);
      if (tool && !results[id]) results[id] = await resultOf(tool, args, controller.signal);
    });
    await Promise.all(running);
    this.runs.delete(node.id);
    if (!controller.signal.aborted && this.state.chat.id === node.chat) this.sendResults(node, results);
    else this.store.set({});
  }

  /** Tools of this answer are no longer asked about in the open chat. */
  allow(node) {
    const { allowed } = this.state.chat.settings;
    const names = node.calls.map((call) => call.name).filter((name) => this.toolOf(name));
    this.setSettings({ allowed: [...new Set([...lines(allowed), ...names])].join("\n") });
  }

  /** Whether all calls of an answer may run without a question. */
  isAllowed(node) {
    const { chat } = this.state;
    const allowed = lines(chat.settings.allowed);
    const path = pathTo(chat.nodes, node.id);
    const rounds = path.slice(path.findLastIndex((one) => one.role === "user")).filter((one) => one.calls?.length);
    const isKnown = ({ name }) => allowed.includes(name) && this.toolOf(name);
    return rounds.length <= MOST_ROUNDS && node.calls.every(isKnown);
  }

  /** One answer, or two at once where answers are compared: the path goes on with the first. */
  answer(parent, before) {
    const askers = this.askers();
    const pair = askers.length > 1 ? newId() : undefined;
    const nodes = askers.map(({ model, preset }, at) => {
      const node = this.node(parent, { role: "assistant", state: "streaming", model, preset, pair });
      node.order += at;
      return node;
    });
    this.add(...before, ...nodes.toReversed());
    const path = pathTo(this.state.chat.nodes, parent);
    return Promise.all(nodes.map((node, at) => this.stream(node, path, false, askers[at])));
  }

  askers() {
    const { chat, model, compared } = this.state;
    const own = { model, settings: chat.settings };
    const [kind, ...rest] = compared.split(":");
    const name = rest.join(":");
    if (kind === "model" && name !== model && this.state.models.some((one) => one.id === name)) {
      return [own, { ...own, model: name }];
    }
    const preset = kind === "preset" && presets()[name];
    return preset ? [own, { model, preset: name, settings: preset }] : [own];
  }

  /** The answers that were made at once with this one, itself among them. */
  pairOf(node) {
    if (!node.pair) return [node];
    return children(this.state.chat.nodes, node.parent).filter((one) => one.pair === node.pair);
  }

  /** The chat goes on with this one of compared answers. */
  choose(node) {
    const { chat } = this.state;
    this.update(chat, { leaf: newestLeaf(chat.nodes, node.id) });
  }

  /** An answer that was cut off goes on where it ended. */
  goOn(node) {
    node.state = "streaming";
    delete node.error;
    const path = pathTo(this.state.chat.nodes, node.id);
    this.update(this.state.chat, {}, [node]);
    return this.stream(node, path, true, { model: this.state.model, settings: this.state.chat.settings });
  }

  async stream(node, path, goesOn, { model, settings }) {
    const live = new Live(node, (kept) => this.keep({ nodes: [kept] }));
    this.lives.set(node.id, live);
    this.say("The model answers.");
    this.store.set({});
    try {
      const functions = this.serversOf(settings).flatMap((one) => one.tools);
      await live.run(() => requestBody(path, settings, model, functions, goesOn));
    } finally {
      this.lives.delete(node.id);
      this.store.set({});
    }
    if (node.error) this.note(new ServerError(node.error.kind, node.error.message));
    this.say(node.error?.message ?? `Answer: ${node.content.slice(0, 2000)}`);
    const isShown = this.state.chat.id === node.chat && !node.pair;
    if (isShown && node.state === "done" && node.calls?.length && this.isAllowed(node)) await this.runCalls(node, {});
  }

  /** The answers of a chat that stream, and the calls of tools that run. */
  working(id = this.state.chat?.id) {
    return [...this.lives.values(), ...this.runs.values()].filter(({ node }) => node.chat === id);
  }

  stop(id) {
    for (const one of this.working(id)) one.stop();
  }

  /** Shows another version of a message, and what came after it. */
  turnTo(node, step) {
    const { chat } = this.state;
    const { at, ids } = branches(chat.nodes, node);
    const next = ids[at + step];
    if (next) this.update(chat, { leaf: newestLeaf(chat.nodes, next) });
  }
}

async function resultOf({ server, name }, args, signal) {
  try {
    return await callTool(server, name, JSON.parse(args || "{}"), signal);
  } catch (error) {
    return `The call failed: ${error.message}`; // for the model, which may try something else
  }
}

function titleOf(content) {
  const line = content.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line || "Images";
}
