// What all views share: templates, icons, a store, and components that stand still.
import { Component, h, render } from "./vendor/preact.js";
import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { Component, render, useCallback, useEffect, useLayoutEffect, useRef, useState };

/** State that views follow: `set` tells everybody who subscribed, once a microtask. */
export class Store {
  constructor(state) {
    this.state = state;
    this.listeners = new Set();
    this.isTold = true;
  }

  set(patch) {
    Object.assign(this.state, patch);
    if (!this.isTold) return;
    this.isTold = false;
    queueMicrotask(() => {
      this.isTold = true;
      for (const listener of [...this.listeners]) listener();
    });
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

/** The state of a store; the component is drawn again when it changes. */
export function useStore(store) {
  const [, redraw] = useState(0);
  useEffect(() => store.subscribe(() => redraw((count) => count + 1)), [store]);
  return store.state;
}

/** Draws `view(value)` again only for another value. */
export class Still extends Component {
  shouldComponentUpdate(next) {
    return next.value !== this.props.value;
  }

  render({ value, view }) {
    return view(value);
  }
}

const PATHS = {
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M5.5 11.5 12 5l6.5 6.5",
  stop: "M7 7h10v10H7z",
  menu: "M4 7h16M4 12h16M4 17h16",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M13 4.5v5M7 14.5v5",
  pulse: "M3 12h4l3-7 4 14 3-7h4",
  sun: "M12 4V2M12 22v-2M4 12H2M22 12h-2M6 6 4.5 4.5M19.5 19.5 18 18M6 18l-1.5 1.5M19.5 4.5 18 6M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8z",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  auto: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM12 3v18M12 8h8M12 13h8.9M12 18h6",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M4 20h4L19 9l-4-4L4 16v4zM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2.3 6.7M20 4v7h-7",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  down: "M12 5v14M5.5 12.5 12 19l6.5-6.5",
  clip: "M20 11.5 11.8 19.7a5 5 0 0 1-7-7L13 4.5a3.4 3.4 0 0 1 4.8 4.8l-8.2 8.1a1.7 1.7 0 0 1-2.4-2.4L14.7 7.5",
  microphone: "M12 3a3 3 0 0 0-3 3v6a3 3 0 0 0 6 0V6a3 3 0 0 0-3-3zM6 11v1a6 6 0 0 0 12 0v-1M12 18v3",
  file: "M6 3h8l4 4v14H6zM14 3v4h4M9 12h6M9 16h6",
  save: "M12 4v11M7 10.5 12 15.5l5-5M5 20h14",
  trash: "M5 7h14M10 4h4M7 7l1 13h8l1-13M10 11v5M14 11v5",
  close: "M6 6l12 12M18 6 6 18",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  key: "M14 10a4 4 0 1 0-4 4c.7 0 1.4-.2 2-.5L14 15h2v2h2v2h3v-3l-7.3-5c.2-.3.3-.6.3-1z",
  goOn: "M5 5v14l11-7zM19 5v14",
};

/** A line drawing that says nothing to screen readers: the button around it does. */
export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
}

/** A button that shows an icon alone. */
export function IconButton({ icon, label, ...rest }) {
  return html`<button type="button" class="icon-button" title=${label} aria-label=${label} ...${rest}>
    <${Icon} name=${icon} />
  </button>`;
}

/** Copies, and shows for a moment that it did. */
export function CopyButton({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await copyText(text());
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<${IconButton}
    icon=${done ? "check" : "copy"} label=${done ? "Copied" : label} onClick=${copy} />`;
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea"); // a page without TLS has no clipboard
  area.value = text;
  area.className = "hidden";
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A name that nobody else has; pages without TLS lack `randomUUID`. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Lets the page draw and answer between two pieces of work. */
export function pause() {
  return new Promise((resolve) => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => {
      channel.port1.close();
      resolve();
    };
    channel.port2.postMessage(null);
  });
}
