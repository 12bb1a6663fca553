// One message: what a user asked, an answer with its thoughts and calls, or a tool's result.
import { MarkdownDocument } from "./markdown.js";
import { Groups } from "./markdown_view.js";
import { Tokens } from "./tokens.js";
import { branches } from "./tree.js";
import { CopyButton, Icon, IconButton, html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const AT_ONCE = 8000; // characters that a frame may add

export function Message({ node, chats, isLast }) {
  const [isEdited, setEdited] = useState(false);
  if (node.role === "tool") return html`<${Result} node=${node} />`;
  const isUser = node.role === "user";
  const done = () => setEdited(false);
  return html`<article class=${isUser ? "message asked" : "message answer"} aria-label=${isUser ? "You" : "Answer"}>
    ${isUser && isEdited && html`<${Edit} node=${node} chats=${chats} done=${done} />`}
    ${isUser && !isEdited && html`<${Asked} node=${node} />`}
    ${!isUser && html`<${Answer} node=${node} chats=${chats} isLast=${isLast} />`}
    ${!isEdited && html`<${Actions} node=${node} chats=${chats} isLast=${isLast} edit=${() => setEdited(true)} />`}
  </article>`;
}

function Asked({ node }) {
  return html`<div class="bubble">
    ${node.images?.map((url, at) => html`<img src=${url} alt=${`Image ${at + 1}`} />`)}
    ${node.audio?.map(({ name, url }) => html`<audio controls src=${url} aria-label=${name} />`)}
    ${node.files?.map((file) => html`<details class="attached"><summary><${Icon} name="file" /> ${file.name}</summary><pre tabindex="0">${file.text}</pre></details>`)}
    ${node.content && html`<p class="verbatim" dir="auto">${node.content}</p>`}
  </div>`;
}

function Edit({ node, chats, done }) {
  const field = useRef();
  useEffect(() => {
    field.current.focus();
    field.current.setSelectionRange(node.content.length, node.content.length);
  }, []);
  const send = () => {
    const text = field.current.value.trim();
    if (!text && !node.images?.length && !node.files?.length && !node.audio?.length) return;
    done();
    chats.edit(node, text);
  };
  const onKeyDown = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      done();
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  return html`<form class="edit" onSubmit=${(event) => (event.preventDefault(), send())}>
    <textarea ref=${field} aria-label="Edit the message" defaultValue=${node.content} onKeyDown=${onKeyDown}
      rows=${Math.min(12, node.content.split("\n").length + 1)} />
    <div class="row end">
      <button type="button" class="quiet" onClick=${done}>Cancel</button>
      <button class="primary">Send as a new branch</button>
    </div>
  </form>`;
}

function Answer({ node, chats, isLast }) {
  const live = chats.lives.get(node.id);
  const [, redraw] = useState(0);
  useEffect(() => live?.subscribe(() => redraw((count) => count + 1)), [live]);
  const isStreaming = node.state === "streaming";
  const isThinking = isStreaming && node.reasoning && !node.content && !node.calls?.length;
  const isEmpty = isStreaming && !node.content && !node.reasoning && !node.calls?.length;
  return html`<div class="body" aria-busy=${isStreaming}>
    ${node.reasoning && html`<details class="thoughts">
      <summary>${isThinking ? html`<span class="working">Thinking</span>` : "Thoughts"}</summary>
      <${Prose} text=${node.reasoning} isDone=${!isThinking} />
    </details>`}
    ${isEmpty && html`<span class="working" role="img" aria-label="Waiting for the answer"></span>`}
    ${node.content && html`<${Prose} text=${node.content} isDone=${!isStreaming} />`}
    ${node.calls?.length > 0 && html`<${Calls} node=${node} chats=${chats} isOpen=${isLast && !isStreaming} />`}
    ${!isStreaming && node.tokens?.length > 0 && html`<${Tokens} tokens=${node.tokens} />`}
    ${!isStreaming && html`<${Ending} node=${node} chats=${chats} isLast=${isLast} />`}
  </div>`;
}

/** Markdown that may grow. What comes all at once is drawn over several frames. */
function Prose({ text, isDone }) {
  const own = useRef(null);
  const [, redraw] = useState(0);
  if (!own.current || !text.startsWith(own.current.text)) {
    own.current = { text: "", document: new MarkdownDocument(), groups: [] };
  }
  const state = own.current;
  const more = text.slice(state.text.length, state.text.length + AT_ONCE);
  if (more) {
    state.document.append(more);
    state.text += more;
    state.groups = state.document.view();
  }
  const isBehind = state.text.length < text.length;
  useLayoutEffect(() => {
    if (!isBehind) return undefined;
    const next = requestAnimationFrame(() => redraw((count) => count + 1));
    return () => cancelAnimationFrame(next);
  });
  return html`<div class=${isDone && !isBehind ? "prose" : "prose grows"}><${Groups} groups=${state.groups} /></div>`;
}

/** Calls of tools: those of MCP servers run here once the user agrees, the others' results are typed. */
function Calls({ node, chats, isOpen }) {
  const form = useRef();
  const run = chats.runs.get(node.id);
  const isRunnable = isOpen && node.calls.some((one) => chats.toolOf(one.name));
  const results = () => Object.fromEntries(new FormData(form.current));
  const send = (event) => {
    event.preventDefault();
    chats.sendResults(node, results());
  };
  return html`<form class="calls" ref=${form} onSubmit=${send}>
    ${node.calls.map((one) => html`<details class="call" key=${one.id} open=${isOpen}>
      <summary><span class="tag">call</span> <code>${one.name}</code></summary>
      <pre tabindex="0"><code>${indented(one.arguments)}</code></pre>
      ${isOpen && html`<label>Result of ${one.name}
        <textarea name=${one.id} rows="2" placeholder=${chats.toolOf(one.name) ? "Filled in by Run" : "What the tool would answer"}></textarea>
      </label>`}
    </details>`)}
    ${isOpen && html`<div class="row end">
      ${run && html`<span class="working">Calling</span><button type="button" class="quiet" onClick=${run.stop}>Cancel</button>`}
      ${!run && isRunnable && html`<button type="button" class="quiet" onClick=${() => (chats.allow(node), chats.runCalls(node, results()))}>Always run in this chat</button>
        <button type="button" class="primary" onClick=${() => chats.runCalls(node, results())}>Run</button>`}
      ${!run && html`<button class=${isRunnable ? "quiet" : "primary"}>Send the results</button>`}
    </div>`}
  </form>`;
}

function Result({ node }) {
  return html`<article class="message result" aria-label=${`Result of ${node.name}`}>
    <details class="call">
      <summary><span class="tag">result</span> <code>${node.name}</code></summary>
      <pre tabindex="0"><code>${node.content}</code></pre>
    </details>
  </article>`;
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

/** Why an answer ended, where it did not end by itself. */
function Ending({ node, chats, isLast }) {
  const words = endingOf(node);
  if (!words) return null;
  const mayGoOn = isLast && node.content && !node.reasoning && !node.calls?.length;
  return html`<div class=${node.error ? "ending failed" : "ending"}>
    <span>${words}</span>
    ${isLast && html`<span class="row">
      ${mayGoOn && html`<button type="button" class="quiet" onClick=${() => chats.goOn(node)}><${Icon} name="goOn" />Continue</button>`}
      ${node.state !== "stopped" && html`<button type="button" class="quiet" onClick=${() => chats.regenerate(node)}><${Icon} name="again" />Try again</button>`}
    </span>`}
  </div>`;
}

function endingOf(node) {
  if (node.error?.kind === "key") return "The server wants an API key.";
  if (node.error) return node.error.message;
  if (node.state === "stopped") return "Stopped.";
  if (node.state === "interrupted") return "The page was left before the answer was complete.";
  if (node.finish === "length") return "The answer reached Max tokens or the end of the context.";
  return "";
}

function Actions({ node, chats, isLast, edit }) {
  const { at, ids } = branches(chats.state.chat.nodes, node);
  const isUser = node.role === "user";
  if (node.state === "streaming") return html`<div class="actions"></div>`;
  return html`<div class=${isLast ? "actions shown" : "actions"}>
    ${ids.length > 1 && html`<span class="branches">
      <${IconButton} icon="left" label="Earlier version" disabled=${at === 0} onClick=${() => chats.turnTo(node, -1)} />
      <span aria-label=${`Version ${at + 1} of ${ids.length}`}>${at + 1}/${ids.length}</span>
      <${IconButton} icon="right" label="Later version" disabled=${at === ids.length - 1} onClick=${() => chats.turnTo(node, 1)} />
    </span>`}
    <${CopyButton} text=${() => node.content} label="Copy the message" />
    ${isUser && html`<${IconButton} icon="edit" label="Edit" onClick=${edit} />`}
    ${!isUser && html`<${IconButton} icon="again" label="Regenerate" onClick=${() => chats.regenerate(node)} />`}
    ${!isUser && html`<span class="figures">${figures(node)}</span>`}
  </div>`;
}

/** What an answer took, in a few words. */
function figures({ stats, model, preset }) {
  const words = [];
  if (stats?.tokens) {
    words.push(`${stats.tokens.toLocaleString("en")} tokens`);
    const decode = stats.seconds - (stats.first ?? 0);
    if (stats.tokens > 1 && decode > 0) words.push(`${Math.round((stats.tokens - 1) / decode).toLocaleString("en")} tokens/s`);
    if (stats.first !== undefined) words.push(`first after ${seconds(stats.first)}`);
    if (stats.cached) words.push(`${Math.round((100 * stats.cached) / stats.prompt)} % of the prompt cached`);
  }
  words.push(...[model, preset].filter(Boolean));
  return words.join(" · ");
}

function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
}
