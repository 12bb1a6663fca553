// The conversations and all that can be done with them. Views read `store.state` and call methods.
import { ServerError, key, listModels } from "./api.js";
import { openDatabase } from "./database.js";
import { Live } from "./live.js";
import { keepSettings, lastSettings, requestBody } from "./settings.js";
import { fromFile, toFile } from "./transfer.js";
import { branches, newestLeaf, pathTo } from "./tree.js";
import { Store, newId } from "./ui.js";

const RETRY_MS = 1500;
const MODEL = "vllmx.model";
const OPEN = "vllmx.chat";

export class Chats {
  constructor() {
    this.lives = new Map(); // by node
    addEventListener("pagehide", () => {
      for (const live of this.lives.values()) live.save(live.node);
    });
    this.store = new Store({
      list: [], // chats without their messages, the newest first
      chat: null, // the open one: {id, title, created, updated, leaf, settings, nodes}
      models: [],
      model: localStorage.getItem(MODEL) ?? "",
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
      const models = await listModels();
      const isKnown = models.some((model) => model.id === this.state.model);
      const model = isKnown ? this.state.model : (models[0]?.id ?? "");
      if (this.state.trouble) this.say("The server is back.");
      this.store.set({ models, model, trouble: null, needsKey: false });
    } catch (error) {
      this.note(error);
    }
  }

  /** Takes note of what has become of the models, as somebody is about to choose one. */
  async look() {
    try {
      this.store.set({ models: await listModels() });
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
    for (const live of this.lives.values()) if (live.node.chat === id) live.stop();
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
    if (!chat.title && first) patch.title = titleOf(first.content);
    this.update(chat, patch, nodes);
  }

  node(parent, fields) {
    const { chat } = this.state;
    return { id: newId(), chat: chat.id, parent, order: Date.now() * 1000 + chat.nodes.size, content: "", ...fields };
  }

  send(content, images = []) {
    this.ask(this.state.chat.leaf, content, images);
  }

  /** Another version of a message, with an answer of its own. */
  edit(node, content) {
    this.ask(node.parent, content, node.images);
  }

  ask(parent, content, images) {
    const asked = this.node(parent, { role: "user", content, images });
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

  answer(parent, before) {
    const node = this.node(parent, { role: "assistant", state: "streaming", model: this.state.model });
    this.add(...before, node);
    const path = pathTo(this.state.chat.nodes, parent);
    return this.stream(node, path, false);
  }

  /** An answer that was cut off goes on where it ended. */
  goOn(node) {
    node.state = "streaming";
    delete node.error;
    const path = pathTo(this.state.chat.nodes, node.id);
    this.update(this.state.chat, {}, [node]);
    return this.stream(node, path, true);
  }

  async stream(node, path, goesOn) {
    const live = new Live(node, (kept) => this.keep({ nodes: [kept] }));
    this.lives.set(node.id, live);
    this.say("The model answers.");
    this.store.set({});
    try {
      const { chat, model } = this.state;
      await live.run(() => requestBody(path, chat.settings, model, goesOn));
    } finally {
      this.lives.delete(node.id);
      this.store.set({});
    }
    if (node.error) this.note(new ServerError(node.error.kind, node.error.message));
    this.say(node.error?.message ?? `Answer: ${node.content.slice(0, 2000)}`);
  }

  /** The answer of the open chat that streams. */
  get live() {
    const { chat } = this.state;
    return [...this.lives.values()].find((live) => live.node.chat === chat?.id);
  }

  stop() {
    this.live?.stop();
  }

  /** Shows another version of a message, and what came after it. */
  turnTo(node, step) {
    const { chat } = this.state;
    const { at, ids } = branches(chat.nodes, node);
    const next = ids[at + step];
    if (next) this.update(chat, { leaf: newestLeaf(chat.nodes, next) });
  }
}

function titleOf(content) {
  const line = content.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line || "Images";
}
