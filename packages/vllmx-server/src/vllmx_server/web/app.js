// The page: puts its parts together and hears its keys.
import { Chats } from "./chats.js";
import { Composer } from "./composer.js";
import { KeyDialog, KeysDialog } from "./dialogs.js";
import { Message } from "./message.js";
import { Panel } from "./panel.js";
import { SettingsDrawer } from "./settings_view.js";
import { Sidebar } from "./sidebar.js";
import { Icon, IconButton, html, render, useEffect, useLayoutEffect, useRef, useState, useStore } from "./ui.js";

const NEAR = 90; // pixels from the end within which the page follows an answer

function App({ chats }) {
  const state = useStore(chats.store);
  const [hasList, showList] = useState(false);
  const [drawer, setDrawer] = useState(""); // "settings", "panel" or ""
  const [hasKeys, showKeys] = useState(false);
  const turn = (name) => setDrawer((old) => (old === name ? "" : name));
  const close = () => setDrawer("");
  useKeys(chats, { settings: () => turn("settings"), panel: () => turn("panel"), keys: () => showKeys(true), close });
  useEffect(() => {
    document.title = state.chat?.title ? `${state.chat.title} · vllmx` : "vllmx";
  }, [state.chat?.title]);
  if (!state.chat) return null;
  return html`<div class=${hasList ? "page with-list" : drawer ? "page with-drawer" : "page"}>
    <a class="skip" href="#composer">Skip to the message</a>
    <${Sidebar} chats=${chats} state=${state} close=${() => showList(false)} />
    <div class="veil" onClick=${() => (showList(false), close())}></div>
    <main>
      <h1 class="hidden">${state.chat.title || "New chat"}</h1>
      <${Header} chats=${chats} state=${state} openList=${() => showList(true)} drawer=${drawer} turn=${turn} />
      ${state.trouble && html`<p class="banner" role="status"><span class="working"></span>${state.trouble.message} Trying again …</p>`}
      <${Conversation} chats=${chats} state=${state} />
      <${Composer} chats=${chats} state=${state} />
    </main>
    ${drawer === "settings" && html`<${SettingsDrawer} chats=${chats} state=${state} close=${close} />`}
    ${drawer === "panel" && html`<${Panel} chats=${chats} close=${close} />`}
    ${hasKeys && html`<${KeysDialog} close=${() => showKeys(false)} />`}
    ${state.needsKey && html`<${KeyDialog} chats=${chats} state=${state} />`}
    <p class="hidden" role="status" aria-live="polite">${state.said}</p>
  </div>`;
}

function Header({ chats, state, openList, drawer, turn }) {
  return html`<header>
    <${IconButton} icon="menu" class="icon-button narrow-only" label="Chats" onClick=${openList} />
    <label class="model"><span class="hidden">Model</span>
      <select value=${state.model} onChange=${(event) => chats.setModel(event.target.value)} onFocus=${() => chats.look()} disabled=${!state.models.length}>
        ${!state.models.length && html`<option value="">no model</option>`}
        ${state.models.map((model) => html`<option key=${model.id} value=${model.id}>${model.id}${shownState(model)}</option>`)}
      </select>
    </label>
    <span class="grow"></span>
    <${ThemeButton} />
    <${IconButton} icon="pulse" label="Server status" aria-pressed=${drawer === "panel"} onClick=${() => turn("panel")} />
    <${IconButton} icon="sliders" label="Settings" aria-pressed=${drawer === "settings"} onClick=${() => turn("settings")} />
  </header>`;
}

const STATES = { unloaded: "on demand", loading: "loading …", failed: "cannot be loaded" };

/** What the picker says of a model beside its name; nothing of one that is there. */
function shownState(model) {
  return Object.hasOwn(STATES, model.state) ? ` (${STATES[model.state]})` : "";
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
  const lastTop = useRef(0);
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
    // What grows below moves the end away too: only who scrolls up has left it.
    if (scrollHeight - scrollTop - clientHeight < NEAR) follows.current = true;
    else if (scrollTop < lastTop.current) follows.current = false;
    lastTop.current = scrollTop;
    setAway(!follows.current);
  };
  return html`<div class="conversation" ref=${box} onScroll=${onScroll} tabindex="-1">
    <div class="messages" role="log" aria-live="off" aria-label="Conversation" ref=${inner}>
      ${path.length
        ? path.map((node, at) => html`<${Turn} key=${node.pair ?? node.id} node=${node} chats=${chats} isLast=${at === path.length - 1} />`)
        : html`<${Welcome} state=${state} />`}
    </div>
    ${isAway && html`<button type="button" class="to-end" aria-label="To the end" onClick=${toEnd}><${Icon} name="down" /></button>`}
  </div>`;
}

/** A message of the path; compared answers stand side by side. */
function Turn({ node, chats, isLast }) {
  const pair = chats.pairOf(node);
  if (pair.length < 2) return html`<${Message} node=${node} chats=${chats} isLast=${isLast} />`;
  return html`<div class="pair">${pair.map((one) => html`<div key=${one.id} class=${one === node ? "side" : "side other"}>
    <${Message} node=${one} chats=${chats} isLast=${isLast && one === node} />
    ${one !== node && one.state !== "streaming" && html`<button type="button" class="quiet" onClick=${() => chats.choose(one)}>Continue with this answer</button>`}
  </div>`)}</div>`;
}

function Welcome({ state }) {
  const card = state.models.find((model) => model.id === state.model);
  return html`<div class="welcome">
    <h2>${state.model || "vllmx"}</h2>
    ${card?.max_model_len && html`<p>${card.max_model_len.toLocaleString("en")} tokens of context</p>`}
  </div>`;
}

/** Keys without Ctrl and the like are letters while somebody types. */
function useKeys(chats, actions) {
  const now = useRef();
  now.current = actions;
  useEffect(() => {
    const onKeyDown = (event) => {
      if (document.querySelector("dialog[open]") || event.defaultPrevented) return;
      if (event.key === "Escape") {
        if (chats.working().length) chats.stop();
        else now.current.close();
        return;
      }
      const isTyping = event.target.matches?.("input, textarea, select");
      if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
      const action = {
        "/": () => document.getElementById("composer").focus(),
        n: () => chats.begin(),
        s: now.current.settings,
        l: now.current.panel,
        "?": now.current.keys,
      }[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, [chats]);
}

const chats = new Chats();
render(html`<${App} chats=${chats} />`, document.getElementById("app"));
chats.start();
