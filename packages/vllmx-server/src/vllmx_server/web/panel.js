// The live panel: what the server does now, out of /metrics, with a small plot for each number.
import { call } from "./api.js";
import { IconButton, html, useEffect, useRef, useState } from "./ui.js";

const EVERY_MS = 2000;
const SAMPLES = 60;

/** Title, unit, and the number out of two scrapes that lie `seconds` apart; null: nothing to tell. */
const PLOTS = [
  ["Running", "", (now) => now.num_requests_running],
  ["Waiting", "", (now) => now.num_requests_waiting],
  ["Tokens per second", "", (now, old, seconds) => (now.generation_tokens_total - old.generation_tokens_total) / seconds],
  ["Time to first token", "s", (now, old) => mean(now, old, "time_to_first_token_seconds")],
  ["Draft tokens accepted", "%", (now, old) => share(now, old, "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total")],
  ["KV cache in use", "%", (now) => 100 * now.kv_cache_usage_perc],
  ["Prefix cache hits", "%", (now, old) => share(now, old, "prefix_cache_hits_total", "prefix_cache_queries_total")],
];

function mean(now, old, name) {
  const count = now[`${name}_count`] - old[`${name}_count`];
  return count > 0 ? (now[`${name}_sum`] - old[`${name}_sum`]) / count : null;
}

function share(now, old, part, whole) {
  const all = now[whole] - old[whole];
  return all > 0 ? (100 * (now[part] - old[part])) / all : null;
}

/** The sums over all labels of a scrape, by name; of histograms without the buckets, of shares the greatest. */
export function readMetrics(text) {
  const found = {};
  for (const [, name, value] of text.matchAll(/^vllmx:(\w+)(?:\{.*\})? (\S+)$/gm)) {
    if (name.endsWith("_perc")) found[name] = Math.max(found[name] ?? 0, Number(value));
    else if (!name.endsWith("_bucket")) found[name] = (found[name] ?? 0) + Number(value);
  }
  return found;
}

/** Values by name of each replica, in the order of their numbers; empty: there is one core. */
export function readReplicas(text) {
  const found = new Map();
  for (const [, name, labels, value] of text.matchAll(/^vllmx:(\w+)\{(.*)\} (\S+)$/gm)) {
    const number = /(?:^|,)replica="(\d+)"/.exec(labels)?.[1];
    if (number === undefined) continue;
    const model = /(?:^|,)model_name="([^"]*)"/.exec(labels)?.[1] ?? "";
    const key = `${model} ${number}`;
    if (!found.has(key)) found.set(key, { model, number: Number(number) });
    found.get(key)[name] = Number(value);
  }
  return [...found.values()].sort((a, b) => a.model.localeCompare(b.model) || a.number - b.number);
}

export function Panel({ chats, close }) {
  const [rows, setRows] = useState(PLOTS.map(() => []));
  const [replicas, setReplicas] = useState([]);
  const [trouble, setTrouble] = useState("");
  const last = useRef(null);
  useEffect(() => {
    const look = async () => {
      if (document.hidden) return;
      try {
        const text = await (await call("metrics")).text();
        const metrics = readMetrics(text);
        setReplicas(readReplicas(text));
        const at = performance.now();
        const old = last.current;
        last.current = { metrics, at };
        setTrouble("");
        if (!old || old.metrics.generation_tokens_total > metrics.generation_tokens_total) return;
        const values = PLOTS.map(([, , value]) => value(metrics, old.metrics, (at - old.at) / 1000));
        setRows((rows) => rows.map((row, n) => [...row, values[n]].slice(-SAMPLES)));
      } catch (error) {
        last.current = null;
        chats.note(error);
        setTrouble("No figures at the moment.");
      }
    };
    look();
    const timer = setInterval(look, EVERY_MS);
    return () => clearInterval(timer);
  }, []);
  return html`<aside class="drawer" aria-label="Server status">
    <div class="head"><h2>Server status</h2><${IconButton} icon="close" label="Close the panel" onClick=${close} /></div>
    ${trouble && html`<p class="hint">${trouble}</p>`}
    <dl class="plots">${PLOTS.map(([title, unit], n) => html`<${Plot} key=${title} title=${title} unit=${unit} values=${rows[n]} />`)}</dl>
    ${replicas.length > 0 && html`<${Replicas} replicas=${replicas} />`}
    <p class="hint">Every two seconds, the last two minutes.</p>
  </aside>`;
}

function Replicas({ replicas }) {
  const models = new Set(replicas.map((one) => one.model));
  return html`<table class="replicas">
    <caption>Replicas</caption>
    <thead><tr><th>Replica</th><th>Running</th><th>Waiting</th><th>KV cache</th></tr></thead>
    <tbody>${replicas.map((one) => html`<tr key=${`${one.model} ${one.number}`}>
      <th>${models.size > 1 ? `${one.model} ` : ""}${one.number}</th>
      <td>${one.num_requests_running}</td><td>${one.num_requests_waiting}</td>
      <td>${Math.round(100 * one.kv_cache_usage_perc)} %</td>
    </tr>`)}</tbody>
  </table>`;
}

function Plot({ title, unit, values }) {
  const known = values.filter((value) => value !== null);
  const now = known.at(-1);
  return html`<div class="plot">
    <dt>${title}</dt>
    <dd>${now === undefined ? "–" : html`${short(now, unit)}${unit && html`<small> ${unit}</small>`}`}</dd>
    <${Line} values=${values} top=${unit === "%" ? 100 : Math.max(...known, unit === "s" ? 0.01 : 1)} />
  </div>`;
}

/** Nulls are gaps. */
function Line({ values, top }) {
  let pen = "M";
  const first = SAMPLES - values.length;
  const path = values.map((value, n) => {
    if (value === null) {
      pen = "M";
      return "";
    }
    const point = `${pen}${((first + n) * 100) / (SAMPLES - 1)} ${30 - (28 * Math.min(value, top)) / top - 1}`;
    const isAlone = pen === "M" && (values[n + 1] ?? null) === null;
    pen = "L";
    return isAlone ? `${point}h0.1` : point;
  });
  return html`<svg viewBox="0 0 100 30" preserveAspectRatio="none" aria-hidden="true"><path d=${path.join("") || "M0 29"} /></svg>`;
}

function short(value, unit) {
  if (unit === "s") return value < 1 ? value.toFixed(3) : value.toFixed(2);
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}
