// The tokens of an answer, coloured by their probability; one of them with its alternatives.
import { html, useState } from "./ui.js";

const BOUNDS = [0.9, 0.5, 0.2, 0.05]; // a token's colour is the number of those that it stays below

/** The tokens of a chunk: [text, probability, [[text, probability], …]]. */
export function tokensOf(logprobs) {
  const probability = ({ logprob }) => Math.round(1e4 * Math.exp(logprob)) / 1e4;
  return (logprobs?.content ?? []).map((one) => [
    one.token,
    probability(one),
    one.top_logprobs.map((other) => [other.token, probability(other)]),
  ]);
}

export function Tokens({ tokens }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details class="tokens" onToggle=${(event) => setOpen(event.target.open)}>
    <summary>Token probabilities</summary>
    ${isOpen && html`<${Opened} tokens=${tokens} />`}
  </details>`;
}

function Opened({ tokens }) {
  const [at, setAt] = useState(0);
  const point = (event) => event.target.dataset.at && setAt(Number(event.target.dataset.at));
  const onKeyDown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(tokens.length - 1, at + step)));
  };
  const [text, probability, others] = tokens[at];
  return html`<div class="line" role="group" tabindex="0" aria-label="Tokens: the arrow keys move between them"
      onMouseOver=${point} onClick=${point} onKeyDown=${onKeyDown}>
      ${tokens.map(([one, p], index) => html`<span data-at=${index} class=${index === at ? `token p${rank(p)} chosen` : `token p${rank(p)}`}>${one}</span>`)}
    </div>
    <table aria-live="polite"><caption><code>${JSON.stringify(text)}</code> ${percent(probability)}</caption><tbody>
      ${others.map(([one, p]) => html`<tr><th scope="row"><code>${JSON.stringify(one)}</code></th><td>${percent(p)}</td></tr>`)}
    </tbody></table>`;
}

function rank(probability) {
  return BOUNDS.filter((bound) => probability < bound).length;
}

function percent(probability) {
  return `${(100 * probability).toFixed(1)} %`;
}

