// The list of chats.
import { saveFile } from "./transfer.js";
import { Icon, IconButton, html, useEffect, useRef, useState } from "./ui.js";

const DAY_MS = 86400e3;
const TYPING_MS = 200;

export function Sidebar({ chats, state, close }) {
  const [words, setWords] = useState("");
  const [found, setFound] = useState(null); // ids, or null: all
  useEffect(() => {
    if (!words.trim()) {
      setFound(null);
      return undefined;
    }
    const timer = setTimeout(async () => setFound(await chats.search(words.trim())), TYPING_MS);
    return () => clearTimeout(timer);
  }, [words, state.list]);
  const list = found ? state.list.filter((chat) => found.has(chat.id)) : state.list;
  const groups = Map.groupBy(list, (chat) => age(chat.updated));
  const pick = (id) => {
    chats.open(id);
    close();
  };
  return html`<nav class="sidebar" aria-label="Chats">
    <div class="brand">
      <span class="name">vllmx</span>
      <${IconButton} icon="close" class="icon-button narrow-only" label="Close the list" onClick=${close} />
    </div>
    <button type="button" class="new" onClick=${() => (chats.begin(), close())}><${Icon} name="plus" />New chat</button>
    ${state.list.length > 0 && html`<input type="search" class="search" aria-label="Search chats" placeholder="Search chats" value=${words}
      onInput=${(event) => setWords(event.target.value)} />`}
    <div class="list">
      ${[...groups].map(([name, list]) => html`<section key=${name}>
        <h2>${name}</h2>
        <ul>${list.map((chat) => html`<${Entry} key=${chat.id} chat=${chat} chats=${chats} pick=${pick} isOpen=${chat.id === state.chat?.id} />`)}</ul>
      </section>`)}
      ${state.list.length > 0 && !list.length && html`<p class="hint" role="status">Nothing found.</p>`}
      ${!state.list.length && html`<p class="hint">Chats are kept in this browser only.</p>`}
    </div>
    ${!state.isKept && html`<p class="hint">This browser keeps nothing: chats end with the page.</p>`}
  </nav>`;
}

function Entry({ chat, chats, pick, isOpen }) {
  const [isRenamed, setRenamed] = useState(false);
  const cancelled = useRef(false);
  if (isRenamed) {
    const end = (event) => {
      if (!cancelled.current) chats.rename(chat.id, event.target.value);
      setRenamed(false);
    };
    const onKeyDown = (event) => {
      cancelled.current = event.key === "Escape";
      if (event.key === "Enter" || event.key === "Escape") event.target.blur();
      event.stopPropagation();
    };
    return html`<li><input class="rename" aria-label="Name of the chat" defaultValue=${chat.title} onBlur=${end} onKeyDown=${onKeyDown}
      ref=${(input) => input?.focus()} /></li>`;
  }
  return html`<li class=${isOpen ? "open" : ""}>
    <button type="button" class="title" aria-current=${isOpen ? "page" : undefined} onClick=${() => pick(chat.id)}>${chat.title || "New chat"}</button>
    <${IconButton} icon="save" label=${`Export ${chat.title} as Markdown`} onClick=${async () => saveFile(await chats.markdown(chat.id), `${fileName(chat.title)}.md`, "text/markdown")} />
    <${IconButton} icon="edit" label=${`Rename ${chat.title}`} onClick=${() => ((cancelled.current = false), setRenamed(true))} />
    <${IconButton} icon="trash" label=${`Delete ${chat.title}`}
      onClick=${() => confirm(`Delete “${chat.title}” with all its messages?`) && chats.remove(chat.id)} />
  </li>`;
}

function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
}

function age(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY_MS) return "Yesterday";
  return time >= midnight - 7 * DAY_MS ? "This week" : "Earlier";
}
