// Blocks of markdown as elements. Text stays text all the way: nothing is ever parsed as HTML.
import { Formula } from "./formula.js";
import { inline } from "./inline.js";
import { CopyButton, Still, html } from "./ui.js";

/** Groups of a document; those that did not change are not drawn again. */
export function Groups({ groups }) {
  return groups.map((group, at) => html`<${Still} key=${at} value=${group} view=${groupView} />`);
}

function groupView(group) {
  switch (group.kind) {
    case "heading": return html`<${`h${Math.min(6, group.level + 1)}`} dir="auto">${spans(group.text)}<//>`;
    case "rule": return html`<hr />`;
    case "quote": return html`<blockquote>${stills(group.pieces, pieceView)}</blockquote>`;
    case "list": return listView(group);
    case "table": return tableView(group);
    case "code": return codeView(group);
    case "math": return html`<${Formula} text=${group.text} isBlock />`;
    default: return html`<p dir="auto">${spans(group.text)}</p>`;
  }
}

function stills(pieces, view) {
  return pieces.map((piece, at) => html`<${Still} key=${at} value=${piece} view=${view} />`);
}

function pieceView(piece) {
  return html`<${Groups} groups=${piece.groups} />`;
}

function listView(group) {
  const items = stills(group.pieces, itemView);
  return group.ordered ? html`<ol start=${group.start}>${items}</ol>` : html`<ul>${items}</ul>`;
}

function itemView(piece) {
  const isTask = piece.done !== undefined;
  return html`<li dir="auto" class=${piece.isMore ? "more" : isTask ? "task" : undefined}>
    ${isTask && html`<input type="checkbox" checked=${piece.done} disabled aria-label=${piece.done ? "Done" : "Not done"} />`}
    <${Groups} groups=${piece.groups} />
  </li>`;
}

function tableView(group) {
  const { head, align } = group;
  const row = (piece) => html`<tr>${piece.cells.map((cell, at) => html`<td class=${align[at]}>${spans(cell)}</td>`)}</tr>`;
  return html`<div class="wide" tabindex="0" role="group" aria-label="Table">
    <table>
      ${head && html`<thead><tr>${head.map((cell, at) => html`<th class=${align[at]}>${spans(cell)}</th>`)}</tr></thead>`}
      <tbody>${stills(group.pieces, row)}</tbody>
    </table>
  </div>`;
}

function codeView(group) {
  const text = () => group.pieces.map((piece) => piece.text).join("").replace(/\n$/, "");
  return html`<figure class="code">
    <figcaption><span>${group.language || "text"}</span><${CopyButton} text=${text} label="Copy code" /></figcaption>
    <pre tabindex="0"><code>${stills(group.pieces, codePiece)}</code></pre>
  </figure>`;
}

/** A block of its own, so that the browser lays out no more than what is new. */
function codePiece(piece) {
  const inner = piece.spans.map(([kind, text]) => (kind ? html`<span class=${`c-${kind}`}>${text}</span>` : text));
  return html`<span class="piece">${inner}</span>`;
}

function spans(text) {
  return inline(text).map(nodeView);
}

function nodeView(node) {
  if (typeof node === "string") return node;
  switch (node.kind) {
    case "code": return html`<code>${node.text}</code>`;
    case "math": return html`<${Formula} text=${node.text} isBlock=${node.isBlock} />`;
    case "br": return html`<br />`;
    case "link":
      return html`<a href=${node.href} title=${node.href} target="_blank" rel="noopener noreferrer nofollow">${node.children.map(nodeView)}</a>`;
    default: return html`<${node.kind}>${node.children.map(nodeView)}<//>`;
  }
}
