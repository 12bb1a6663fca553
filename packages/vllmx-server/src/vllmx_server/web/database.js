// Conversations in IndexedDB: one record for each chat and one for each of its messages.
// Where the browser keeps nothing (as some private windows do) they last as long as the page.

const NAME = "vllmx";

export async function openDatabase() {
  try {
    return new Database(await opened(indexedDB.open(NAME, 1)));
  } catch {
    return new Memory();
  }
}

function opened(request) {
  request.onupgradeneeded = () => {
    request.result.createObjectStore("chats", { keyPath: "id" });
    request.result.createObjectStore("nodes", { keyPath: "id" }).createIndex("chat", "chat");
  };
  return resultOf(request);
}

function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

class Database {
  constructor(connection) {
    this.connection = connection;
    this.isKept = true;
  }

  /** All chats without their messages. */
  async list() {
    return resultOf(this.connection.transaction("chats").objectStore("chats").getAll());
  }

  /** The messages of a chat. */
  async nodes(chat) {
    const store = this.connection.transaction("nodes").objectStore("nodes");
    return resultOf(store.index("chat").getAll(chat));
  }

  /** The chats with a message that has these words, in small letters. */
  search(words) {
    const request = this.connection.transaction("nodes").objectStore("nodes").openCursor();
    const found = new Set();
    return new Promise((resolve, reject) => {
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) return resolve(found);
        if (cursor.value.content.toLowerCase().includes(words)) found.add(cursor.value.chat);
        return cursor.continue();
      };
    });
  }

  /** Keeps a chat, messages, or both. */
  put({ chat, nodes = [] }) {
    return this.write((chats, store) => {
      if (chat) chats.put(chat);
      for (const node of nodes) store.put(node);
    });
  }

  async remove(id) {
    const nodes = await this.nodes(id);
    return this.write((chats, store) => {
      chats.delete(id);
      for (const node of nodes) store.delete(node.id);
    });
  }

  write(change) {
    const transaction = this.connection.transaction(["chats", "nodes"], "readwrite");
    change(transaction.objectStore("chats"), transaction.objectStore("nodes"));
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(transaction.error);
    });
  }
}

class Memory {
  constructor() {
    this.chats = new Map();
    this.kept = new Map();
    this.isKept = false;
  }

  async list() {
    return [...this.chats.values()];
  }

  async nodes(chat) {
    return [...this.kept.values()].filter((node) => node.chat === chat);
  }

  async search(words) {
    const found = [...this.kept.values()].filter((node) => node.content.toLowerCase().includes(words));
    return new Set(found.map((node) => node.chat));
  }

  async put({ chat, nodes = [] }) {
    if (chat) this.chats.set(chat.id, chat);
    for (const node of nodes) this.kept.set(node.id, node);
  }

  async remove(id) {
    this.chats.delete(id);
    for (const node of await this.nodes(id)) this.kept.delete(node.id);
  }
}
