// Shows openapi.json. All that comes from it becomes text of nodes, never HTML.

const api = document.getElementById("api");
const METHODS = ["get", "post", "put", "patch", "delete"];

function node(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const refName = (schema) => schema.$ref.split("/").pop();
const link = (name) => node("a", { href: "#schema-" + name }, name);

function limits(schema) {
  const found = [];
  if ("minimum" in schema) found.push("≥ " + schema.minimum);
  if ("exclusiveMinimum" in schema) found.push("> " + schema.exclusiveMinimum);
  if ("maximum" in schema) found.push("≤ " + schema.maximum);
  if ("exclusiveMaximum" in schema) found.push("< " + schema.exclusiveMaximum);
  for (const [least, most, what] of [
    ["minLength", "maxLength", "characters"],
    ["minItems", "maxItems", "entries"],
    ["minProperties", "maxProperties", "members"],
  ]) {
    if (least in schema) found.push("at least " + schema[least] + " " + what);
    if (most in schema) found.push("at most " + schema[most] + " " + what);
  }
  return found.length ? " (" + found.join(", ") + ")" : "";
}

// The type of a schema in words, with links to structs.
function words(schema) {
  if (schema.$ref) return [link(refName(schema))];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((each) => JSON.stringify(each)).join(" | ")];
  const several = schema.anyOf || schema.oneOf;
  if (several) return several.flatMap((each, index) => [...(index ? [" | "] : []), ...words(each)]);
  if (schema.type === "array") return ["list of ", ...words(schema.items || {}), limits(schema)];
  if (schema.type === "object" && typeof schema.additionalProperties === "object")
    return ["object of ", ...words(schema.additionalProperties), limits(schema)];
  return [(schema.type || "anything") + limits(schema)];
}

function fields(schema) {
  const required = new Set(schema.required || []);
  const rows = Object.entries(schema.properties || {}).map(([name, each]) =>
    row(name, required.has(name), each, each.description));
  return rows.length ? node("table", {}, ...rows) : node("p", {}, ...words(schema));
}

function row(name, isRequired, schema, text) {
  const mark = isRequired ? node("b", { title: "required" }, " *") : null;
  return node("tr", {}, node("th", { scope: "row" }, name, mark),
    node("td", { class: "type" }, ...words(schema)), node("td", {}, text || ""));
}

function content(parts) {
  return Object.entries(parts || {}).flatMap(([type, each]) => [
    node("p", {}, type + ": ", ...(each.schema ? words(each.schema) : [])),
    each["x-events"] ? events(each["x-events"]) : null,
  ]);
}

function events(all) {
  return node("table", {}, ...all.map((each) => row(each.event || "data", false, each.data)));
}

function curl(method, path, body) {
  const type = Object.keys(body.content)[0], example = body.content[type].example;
  if (!example) return null;
  const url = location.origin + new URL("." + path, location.href).pathname;
  return node("pre", {}, `curl ${url} -H 'Content-Type: ${type}' \\\n  -d '${JSON.stringify(example)}'`);
}

function operation(method, path, asked) {
  const body = asked.requestBody;
  const form = body && body.content["multipart/form-data"];
  const parts = [node("p", {}, asked.description || "")];
  if (asked.parameters)
    parts.push(node("h3", {}, "Parameters"), node("table", {}, ...asked.parameters.map((each) =>
      row(`${each.name} (${each.in})`, each.required, each.schema, each.description))));
  if (body) parts.push(node("h3", {}, "Body"), ...content(body.content), form && fields(form.schema),
    curl(method, path, body));
  for (const [status, answer] of Object.entries(asked.responses)) {
    parts.push(node("h3", {}, status + ": " + answer.description));
    if (status < 300) parts.push(...content(answer.content));
  }
  return node("details", { "data-text": `${method} ${path} ${asked.summary}`.toLowerCase() },
    node("summary", {}, node("span", { class: "method " + method }, method.toUpperCase()), path,
      node("small", {}, asked.summary)),
    ...parts.filter(Boolean));
}

function show(found) {
  const sections = found.tags.map((tag) => {
    const all = Object.entries(found.paths).flatMap(([path, item]) =>
      METHODS.filter((method) => item[method] && item[method].tags.includes(tag.name))
        .map((method) => operation(method, path, item[method])));
    return node("section", {}, node("h2", {}, tag.name), ...all);
  });
  const schemas = Object.entries(found.components.schemas).map(([name, schema]) =>
    node("details", { id: "schema-" + name, "data-text": name.toLowerCase() },
      node("summary", {}, name), node("p", {}, schema.description || ""), fields(schema)));
  api.replaceChildren(node("p", {}, found.info.description), ...sections,
    node("section", {}, node("h2", {}, "Structs"), ...schemas));
  api.removeAttribute("aria-busy");
  openTarget();
}

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) target.open = true;
  if (target) target.scrollIntoView();
}

function filter(event) {
  const wanted = event.target.value.trim().toLowerCase();
  for (const each of api.querySelectorAll("[data-text]"))
    each.hidden = !each.dataset.text.includes(wanted);
  for (const each of api.querySelectorAll("section"))
    each.hidden = ![...each.querySelectorAll("[data-text]")].some((one) => !one.hidden);
}

async function load(key) {
  const trouble = document.getElementById("trouble"), form = document.getElementById("key");
  try {
    const headers = key ? { authorization: "Bearer " + key } : {};
    const answer = await fetch("openapi.json", { headers });
    form.hidden = answer.status !== 401;
    trouble.hidden = answer.ok || !key;
    if (answer.ok) show(await answer.json());
    else trouble.textContent = (await answer.json()).error.message;
    if (!answer.ok && answer.status !== 401) trouble.hidden = false;
  } catch (error) {
    trouble.hidden = false;
    trouble.textContent = "The server does not answer: " + error.message;
  }
}

document.getElementById("find").addEventListener("input", filter);
document.getElementById("key").addEventListener("submit", (event) => {
  event.preventDefault();
  load(event.target.elements[0].value);
});
addEventListener("hashchange", openTarget);
load("");
