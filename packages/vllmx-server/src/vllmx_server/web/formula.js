// Formulas in LaTeX, drawn as MathML by KaTeX, which is fetched with the first of them.
import { html, useLayoutEffect, useRef, useState } from "./ui.js";

const LONGEST = 4000;
const OPTIONS = { output: "mathml", throwOnError: true, strict: "ignore", trust: false, maxSize: 50, maxExpand: 500 };

let katex = null;
let coming = null;

function fetched() {
  coming ??= import("./vendor/katex.js").then(() => (katex = globalThis.katex));
  return coming;
}

const waiting = [];
const FRAME_MS = 8;

/** Draws when a frame has time for it. */
function later(draw) {
  waiting.push(draw);
  if (waiting.length === 1) requestAnimationFrame(drawSome);
}

function drawSome() {
  const until = performance.now() + FRAME_MS;
  let count = 0;
  while (count < waiting.length && performance.now() < until) waiting[count++]();
  waiting.splice(0, count);
  if (waiting.length) requestAnimationFrame(drawSome);
}

/** A formula; its source where KaTeX cannot read it, and until KaTeX is there. */
export function Formula({ text, isBlock }) {
  const box = useRef();
  const [isHere, setHere] = useState(katex !== null);
  useLayoutEffect(() => {
    if (!isHere) {
      fetched().then(() => setHere(true), () => {});
      return;
    }
    if (text.length <= LONGEST) later(() => box.current?.isConnected && draw(box.current, text, isBlock));
  }, [text, isHere]);
  return html`<${Source} key=${text} inner=${box} text=${text} isBlock=${isBlock} />`;
}

function draw(box, text, isBlock) {
  const drawn = document.createElement("span");
  try {
    katex.render(text, drawn, { ...OPTIONS, displayMode: Boolean(isBlock) });
  } catch {
    return; // the source stays
  }
  box.replaceChildren(...drawn.childNodes);
}

/** What `Formula` fills in: drawn once, so that nothing takes the formula away again. */
function Source({ inner, text, isBlock }) {
  const first = useRef(text);
  return html`<span ref=${inner} class=${isBlock ? "math block" : "math"} dir="ltr">${first.current}</span>`;
}
