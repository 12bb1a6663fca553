// The drawer of settings: system prompt, sampling, form of the answer, tools, key, and all chats in a file.
import { key } from "./api.js";
import { NUMBERS, jsonTrouble, keepPreset, lines, presets } from "./settings.js";
import { saveFile } from "./transfer.js";
import { IconButton, html, useEffect, useRef, useState } from "./ui.js";

export function SettingsDrawer({ chats, state, close }) {
  const { settings, id } = state.chat;
  const set = (name) => (event) => chats.setSettings({ [name]: event.target.value });
  useEffect(() => void chats.look(), []);
  return html`<aside class="drawer" aria-label="Settings" key=${`${id} ${state.chat.preset ?? 0}`}>
    <div class="head"><h2>Settings</h2><${IconButton} icon="close" label="Close the settings" onClick=${close} /></div>
    <${Presets} chats=${chats} settings=${settings} />
    <label>System prompt<textarea rows="4" value=${settings.system ?? ""} onInput=${set("system")} placeholder="Instructions before the conversation" /></label>
    <label>Thinking<select value=${settings.thinking ?? ""} onChange=${set("thinking")}>
      <option value="">model default</option><option value="on">on</option><option value="off">off</option>
    </select></label>
    <div class="numbers">${NUMBERS.map((field) => html`<${NumberField} key=${field[0]} field=${field} chats=${chats} settings=${settings} />`)}</div>
    <label>Token probabilities<select value=${settings.logprobs ?? ""} onChange=${set("logprobs")}>
      <option value="">off</option><option value="on">on</option>
    </select></label>
    <${Compared} chats=${chats} state=${state} />
    <label>Stop sequences<textarea rows="2" value=${settings.stop ?? ""} onInput=${set("stop")} placeholder="One a line" /></label>
    <${JsonField} name="schema" title="JSON schema of the answer" chats=${chats} settings=${settings}
      placeholder=${'{"type": "object", …}'} isArray=${false} />
    <${JsonField} name="tools" title="Tools" chats=${chats} settings=${settings}
      placeholder=${'[{"name": "weather", "parameters": {…}}]'} isArray=${true} />
    ${state.servers.length > 0 && html`<${ToolServers} chats=${chats} state=${state} />`}
    <p class="hint">Empty fields use the model's defaults. Schema and tools belong to this chat.</p>
    <h3>API key</h3>
    <div class="row">
      <button type="button" class="quiet" onClick=${() => chats.store.set({ needsKey: true, keyTrouble: "" })}>${key.value ? "Change the key" : "Enter a key"}</button>
      ${key.value && html`<button type="button" class="quiet" onClick=${() => (key.forget(), chats.connect())}>Forget it</button>`}
    </div>
    <h3>Chats</h3>
    <${Transfer} chats=${chats} state=${state} />
  </aside>`;
}

/** The MCP servers whose tools the model may call in this chat. */
function ToolServers({ chats, state }) {
  const used = lines(state.chat.settings.servers);
  const turn = (name, isUsed) => {
    const rest = used.filter((one) => one !== name);
    chats.setSettings({ servers: (isUsed ? [...rest, name] : rest).join("\n"), allowed: "" });
  };
  return html`<fieldset><legend>MCP servers</legend>
    ${state.servers.map(({ server_label: name, tools, error }) => html`<label class="check" key=${name} title=${error ?? tools.map((tool) => tool.function.description || tool.function.name).join("\n")}>
      <input type="checkbox" checked=${used.includes(name)} onChange=${(event) => turn(name, event.target.checked)} />
      ${name} <span class="hint">${error ?? `${tools.length} ${tools.length === 1 ? "tool" : "tools"}`}</span>
    </label>`)}
  </fieldset>`;
}

/** System prompts and sampling under names of the user's. */
function Presets({ chats, settings }) {
  const [all, setAll] = useState(presets);
  const [chosen, choose] = useState("");
  const pick = (event) => {
    choose(event.target.value);
    const found = all[event.target.value];
    if (found) chats.replaceSettings(found);
  };
  const save = () => {
    const name = prompt("Name of the preset", chosen)?.trim().slice(0, 60);
    if (!name) return;
    keepPreset(name, settings);
    setAll(presets());
    choose(name);
  };
  const remove = () => {
    keepPreset(chosen, null);
    setAll(presets());
    choose("");
  };
  return html`<label>Preset<select value=${chosen} onChange=${pick}>
      <option value="">none</option>
      ${Object.keys(all).map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
    </select></label>
    <div class="row presets">
      <button type="button" class="quiet" onClick=${save}>Save as preset</button>
      ${chosen && html`<button type="button" class="quiet" onClick=${remove}>Delete preset</button>`}
    </div>`;
}

/** Another model, or the settings of a preset, whose answer is shown beside. */
function Compared({ chats, state }) {
  const option = (kind, name) => html`<option key=${`${kind}:${name}`} value=${`${kind}:${name}`}>${name}</option>`;
  const others = state.models.filter((model) => model.id !== state.model);
  return html`<label>Compare with<select value=${state.compared} onChange=${(event) => chats.store.set({ compared: event.target.value })}>
    <option value="">nothing</option>
    ${others.length > 0 && html`<optgroup label="Models">${others.map((model) => option("model", model.id))}</optgroup>`}
    <optgroup label="Presets">${Object.keys(presets()).map((name) => option("preset", name))}</optgroup>
  </select></label>`;
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
      <button type="button" class="quiet" disabled=${!state.list.length} onClick=${async () => saveFile(await chats.exportAll(), `vllmx-chats-${new Date().toISOString().slice(0, 10)}.json`, "application/json")}>Export all</button>
      <button type="button" class="quiet" onClick=${() => picker.current.click()}>Import</button>
      <input ref=${picker} type="file" class="hidden" tabindex="-1" aria-label="File of chats" accept="application/json,.json" onChange=${take} />
    </div>
    ${news && html`<p class="hint" role="status">${news}</p>`}`;
}
