// The page: puts its parts together and hears its keys.
import { Chats } from "./chats.js";
import { Composer } from "./composer.js";
import { KeyDialog } from "./dialogs.js";
import { Message } from "./message.js";
import { Sidebar } from "./sidebar.js";
import { Icon, IconButton, html, render, useEffect, useLayoutEffect, useRef, useState, useStore } from "./ui.js";

const NEAR = 90; // pixels from the end within which the page follows an answer

function App({ chats }) {
  const state = useStore(chats.store);
  const [hasList, showList] = useState(false);
  useKeys(chats);
  useEffect(() => {
    document.title = state.chat?.title ? `${state.chat.title} · vllmx` : "vllmx";
  }, [state.chat?.title]);
  if (!state.chat) return null;
  return html`<div class=${hasList ? "page with-list" : "page"}>
    <a class="skip" href="#composer">Skip to the message</a>
    <${Sidebar} chats=${chats} state=${state} close=${() => showList(false)} />
    <div class="veil" onClick=${() => showList(false)}></div>
    <main>
      <${Header} chats=${chats} state=${state} openList=${() => showList(true)} />
      ${state.trouble && html`<p class="banner" role="status"><span class="working"></span>${state.trouble.message} Trying again …</p>`}
      <${Conversation} chats=${chats} state=${state} />
      <${Composer} chats=${chats} state=${state} />
    </main>
    ${state.needsKey && html`<${KeyDialog} chats=${chats} state=${state} />`}
    <p class="hidden" role="status" aria-live="polite">${state.said}</p>
  </div>`;
}

function Header({ chats, state, openList }) {
  return html`<header>
    <${IconButton} icon="menu" class="icon-button narrow-only" label="Chats" onClick=${openList} />
    <label class="model"><span class="hidden">Model</span>
      <select value=${state.model} onChange=${(event) => chats.setModel(event.target.value)} disabled=${!state.models.length}>
        ${!state.models.length && html`<option value="">no model</option>`}
        ${state.models.map((model) => html`<option key=${model.id} value=${model.id}>${model.id}</option>`)}
      </select>
    </label>
    <span class="grow"></span>
    <${ThemeButton} />
  </header>`;
}

const THEMES = { auto: "Colours as the system has them", light: "Light", dark: "Dark" };

function ThemeButton() {
  const root = document.documentElement;
  const [theme, setTheme] = useState(root.dataset.theme ?? "auto");
  const next = { auto: "light", light: "dark", dark: "auto" }[theme];
  const turn = () => {
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    localStorage.setItem("vllmx.theme", next);
    setTheme(next);
  };
  return html`<${IconButton} icon=${{ auto: "auto", light: "sun", dark: "moon" }[theme]} label=${THEMES[theme]} onClick=${turn} />`;
}

/** The messages. It follows the end while the reader is there. */
function Conversation({ chats, state }) {
  const box = useRef();
  const inner = useRef();
  const follows = useRef(true);
  const [isAway, setAway] = useState(false);
  const { path } = chats;
  const toEnd = () => (box.current.scrollTop = box.current.scrollHeight);
  useEffect(() => {
    const observer = new ResizeObserver(() => follows.current && toEnd());
    observer.observe(inner.current);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    follows.current = true;
    toEnd();
  }, [state.chat.id, path.length]);
  const onScroll = () => {
    const { scrollTop, clientHeight, scrollHeight } = box.current;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR;
    setAway(!follows.current);
  };
  return html`<div class="conversation" ref=${box} onScroll=${onScroll} tabindex="-1">
    <div class="messages" role="log" aria-live="off" aria-label="Conversation" ref=${inner}>
      ${path.length
        ? path.map((node, at) => html`<${Message} key=${node.id} node=${node} chats=${chats} isLast=${at === path.length - 1} />`)
        : html`<${Welcome} state=${state} />`}
    </div>
    ${isAway && html`<button type="button" class="to-end" aria-label="To the end" onClick=${toEnd}><${Icon} name="down" /></button>`}
  </div>`;
}

function Welcome({ state }) {
  const card = state.models.find((model) => model.id === state.model);
  return html`<div class="welcome">
    <h1>${state.model || "vllmx"}</h1>
    ${card && html`<p>${card.max_model_len.toLocaleString("en")} tokens of context</p>`}
  </div>`;
}

function useKeys(chats) {
  useEffect(() => {
    const onKeyDown = (event) => {
      const isTyping = event.target.matches?.("input, textarea, select");
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) chats.stop();
      else if (event.key === "/" && !isTyping) {
        event.preventDefault();
        document.getElementById("composer").focus();
      }
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, [chats]);
}

const chats = new Chats();
render(html`<${App} chats=${chats} />`, document.getElementById("app"));
chats.start();
