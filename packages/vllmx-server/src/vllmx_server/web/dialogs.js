// Dialogs: the browser's own, which keep the focus and close on Escape.
import { html, useEffect, useRef } from "./ui.js";
import { key } from "./api.js";

export function Dialog({ title, close, children, ...rest }) {
  const box = useRef();
  useEffect(() => {
    const dialog = box.current;
    dialog.showModal();
    return () => dialog.close();
  }, []);
  return html`<dialog ref=${box} aria-label=${title} onClose=${close} ...${rest}>
    <h2>${title}</h2>
    ${children}
  </dialog>`;
}

/** Asks for the API key; it is there until the server takes one. */
export function KeyDialog({ chats, state }) {
  const field = useRef();
  const kept = useRef();
  const send = (event) => {
    event.preventDefault();
    const value = field.current.value.trim();
    if (value) chats.setKey(value, kept.current.checked);
  };
  return html`<${Dialog} title="API key" close=${() => chats.store.set({ needsKey: false })}>
    <form onSubmit=${send}>
      <p class="hint">This server answers those alone who have a key.</p>
      <label>Key<input ref=${field} type="password" autocomplete="off" spellcheck=${false} required autofocus /></label>
      ${state.keyTrouble && html`<p class="trouble" role="alert">${state.keyTrouble}</p>`}
      <label class="check"><input ref=${kept} type="checkbox" defaultChecked=${key.isKept} /> Keep it in this browser, not for this tab alone</label>
      <div class="row end"><button class="primary">Use the key</button></div>
    </form>
  <//>`;
}

const KEYS = [
  ["Enter", "send"],
  ["Shift Enter", "a new line"],
  ["Esc", "stop the answer, close a drawer"],
  ["/", "to the message"],
  ["n", "new chat"],
  ["s", "settings"],
  ["l", "server status"],
  ["?", "this list"],
];

/** What the keyboard can do. */
export function KeysDialog({ close }) {
  return html`<${Dialog} title="Keys" close=${close}>
    <dl class="keys">${KEYS.map(([name, what]) => html`<div key=${name}>
      <dt>${name.split(" ").map((part) => html`<kbd>${part}</kbd> `)}</dt><dd>${what}</dd>
    </div>`)}</dl>
    <form method="dialog" class="row end"><button class="primary">Close</button></form>
  <//>`;
}
