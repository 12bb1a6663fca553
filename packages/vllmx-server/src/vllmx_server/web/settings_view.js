// The drawer of settings: system prompt, sampling, form of the answer, tools, key, and all chats in a file.
import { key } from "./api.js";
import { NUMBERS, jsonTrouble } from "./settings.js";
import { IconButton, html, useRef, useState } from "./ui.js";

export function SettingsDrawer({ chats, state, close }) {
  const { settings, id } = state.chat;
  const set = (name) => (event) => chats.setSettings({ [name]: event.target.value });
  return html`<aside class="drawer" aria-label="Settings" key=${id}>
    <div class="head"><h2>Settings</h2><${IconButton} icon="close" label="Close the settings" onClick=${close} /></div>
    <label>System prompt<textarea rows="4" value=${settings.system ?? ""} onInput=${set("system")} placeholder="What the model is told before everything else" /></label>
    <label>Thinking<select value=${settings.thinking ?? ""} onChange=${set("thinking")}>
      <option value="">as the model does</option><option value="on">on</option><option value="off">off</option>
    </select></label>
    <div class="numbers">${NUMBERS.map((field) => html`<${NumberField} key=${field[0]} field=${field} chats=${chats} settings=${settings} />`)}</div>
    <label>Stop at<textarea rows="2" value=${settings.stop ?? ""} onInput=${set("stop")} placeholder="One text a line" /></label>
    <${JsonField} name="schema" title="JSON schema of the answer" chats=${chats} settings=${settings}
      placeholder=${'{"type": "object", …}'} isArray=${false} />
    <${JsonField} name="tools" title="Tools" chats=${chats} settings=${settings}
      placeholder=${'[{"name": "weather", "parameters": {…}}]'} isArray=${true} />
    <p class="hint">An empty field is the model's own choice. Schema and tools are of this chat alone.</p>
    <h3>Key</h3>
    <div class="row">
      <button type="button" class="quiet" onClick=${() => chats.store.set({ needsKey: true, keyTrouble: "" })}>${key.value ? "Change the key" : "Enter a key"}</button>
      ${key.value && html`<button type="button" class="quiet" onClick=${() => (key.forget(), chats.connect())}>Forget it</button>`}
    </div>
    <h3>Chats</h3>
    <${Transfer} chats=${chats} state=${state} />
  </aside>`;
}

function NumberField({ field, chats, settings }) {
  const [name, label, low, high, step, hint] = field;
  const onInput = (event) => {
    const { value, valueAsNumber: number, validity } = event.target;
    if (value === "" && !validity.badInput) chats.setSettings({ [name]: undefined });
    else if (number >= low && number <= high) chats.setSettings({ [name]: number });
  };
  return html`<label title=${hint}>${label}
    <input type="number" min=${low} max=${high} step=${step === 1 ? 1 : "any"} defaultValue=${settings[name]} onInput=${onInput} placeholder="auto" inputmode="decimal" />
  </label>`;
}

function JsonField({ name, title, chats, settings, placeholder, isArray }) {
  const text = settings[name] ?? "";
  const trouble = jsonTrouble(text, isArray);
  return html`<label>${title}<textarea class="mono" rows="4" spellcheck=${false} value=${text} placeholder=${placeholder}
      aria-invalid=${Boolean(trouble)} onInput=${(event) => chats.setSettings({ [name]: event.target.value })} /></label>
    ${trouble && html`<p class="trouble" role="alert">${trouble}</p>`}`;
}

function Transfer({ chats, state }) {
  const picker = useRef();
  const [news, setNews] = useState("");
  const take = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    try {
      const count = await chats.importAll(await file.text());
      setNews(`${count} ${count === 1 ? "chat was" : "chats were"} added.`);
    } catch (error) {
      setNews(`${file.name} was not taken: ${error.message}`);
    }
  };
  return html`<div class="row">
      <button type="button" class="quiet" disabled=${!state.list.length} onClick=${async () => save(await chats.exportAll())}>Export all</button>
      <button type="button" class="quiet" onClick=${() => picker.current.click()}>Import</button>
      <input ref=${picker} type="file" class="hidden" tabindex="-1" aria-label="File of chats" accept="application/json,.json" onChange=${take} />
    </div>
    ${news && html`<p class="hint" role="status">${news}</p>`}`;
}

function save(text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `vllmx-chats-${new Date().toISOString().slice(0, 10)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
