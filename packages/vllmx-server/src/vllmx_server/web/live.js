// An answer while it streams: chunks become the text of a node, and views hear of it once a frame.
import { ServerError, streamChat } from "./api.js";
import { tokensOf } from "./tokens.js";

const SAVE_MS = 700;

export class Live {
  /** `save` keeps the node; it is called while the answer grows and at its end. */
  constructor(node, save) {
    this.node = node;
    this.save = save;
    this.controller = new AbortController();
    this.listeners = new Set();
    this.isScheduled = false;
    this.savedAt = performance.now();
  }

  stop() {
    this.controller.abort();
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Until the answer is there, was stopped or failed; then the node's state says which. */
  async run(makeBody) {
    const { node } = this;
    this.began = performance.now();
    try {
      await streamChat(makeBody(), this.controller.signal, (chunk) => this.take(chunk));
      node.state = "done";
    } catch (error) {
      if (error.name === "AbortError") node.state = "stopped";
      else {
        node.state = node.content || node.reasoning ? "interrupted" : "failed";
        const kind = error instanceof ServerError ? error.kind : "failed";
        node.error = { kind, message: error.message };
      }
    }
    node.stats = { ...node.stats, seconds: (performance.now() - this.began) / 1000 };
    this.tell();
    this.save(node);
  }

  take(chunk) {
    const { node } = this;
    if (chunk.usage) {
      const { prompt_tokens, completion_tokens, prompt_tokens_details } = chunk.usage;
      node.stats = { ...node.stats, prompt: prompt_tokens, tokens: completion_tokens };
      node.stats.cached = prompt_tokens_details?.cached_tokens ?? 0;
    }
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { delta } = choice;
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning) node.reasoning = (node.reasoning ?? "") + reasoning;
    if (delta.content) node.content += delta.content;
    for (const call of delta.tool_calls ?? []) this.takeCall(call);
    if (choice.logprobs) (node.tokens ??= []).push(...tokensOf(choice.logprobs));
    if (choice.finish_reason) node.finish = choice.finish_reason;
    if (!node.stats?.first && (reasoning || delta.content || delta.tool_calls)) {
      node.stats = { ...node.stats, first: (performance.now() - this.began) / 1000 };
    }
    this.schedule();
  }

  takeCall({ index, id, function: called }) {
    const calls = (this.node.calls ??= []);
    const call = (calls[index] ??= { id: "", name: "", arguments: "" });
    if (id) call.id = id;
    if (called?.name) call.name += called.name;
    if (called?.arguments) call.arguments += called.arguments;
  }

  /** Once a frame; a page that is not seen has none, and hears of it by the clock. */
  schedule() {
    if (performance.now() - this.savedAt > SAVE_MS) {
      this.savedAt = performance.now();
      this.save(this.node);
    }
    if (this.isScheduled) return;
    this.isScheduled = true;
    if (document.hidden) setTimeout(() => this.tell(), 500);
    else requestAnimationFrame(() => this.tell());
  }

  tell() {
    this.isScheduled = false;
    for (const listener of [...this.listeners]) listener();
  }
}
