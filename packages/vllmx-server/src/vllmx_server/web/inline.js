// Markdown within a paragraph: emphasis, code, links. The result is data; nothing here makes HTML.
//
// A node is a string, {kind: "em" | "strong" | "del", children}, {kind: "code" | "math", text, isBlock},
// {kind: "link", href, children} or {kind: "br"}. The time is linear in the length of the text.

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const SPECIAL = /[\\`*_~[\]!<&h$\n]/g;
const DEEPEST = 24;
const LONGEST_URL = 2000;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const BREAK = /^<br *\/?>/i;

/** The nodes of a text. */
export function inline(text, depth = 0) {
  return new Inline(text, depth).parse();
}

/** A URL that a click may open: of the web or of mail. Null for all others, also those that would
 * be of this server. */
export function safeHref(url) {
  let parsed;
  try {
    parsed = new URL(url);
  } catch {
    return null;
  }
  return ["http:", "https:", "mailto:"].includes(parsed.protocol) ? parsed.href : null;
}

class Inline {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.plain = 0; // where text begins that stands for itself
    this.frames = [{ char: "", count: 0, children: [] }];
    this.brackets = depth < 4 ? matchBrackets(text) : new Map();
    this.missing = new Set(); // what would end something and does not come any more
  }

  parse() {
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(text);
      if (!found) break;
      this.at = found.index;
      if (!this.special(text[this.at])) this.at += 1;
    }
    this.at = text.length;
    this.flush(text.length);
    while (this.frames.length > 1) this.flatten();
    return this.frames[0].children;
  }

  /** Whether something was taken at this place. */
  special(char) {
    switch (char) {
      case "\\": return this.escape();
      case "`": return this.code();
      case "*": case "_": case "~": return this.delimiter(char);
      case "[": return this.link(this.at);
      case "!": return this.text[this.at + 1] === "[" && this.link(this.at + 1);
      case "<": return this.angle();
      case "&": return this.entity();
      case "h": return this.bare();
      case "$": return this.dollar();
      default: return false;
    }
  }

  /** Nodes take the place of the text from here to `end`. */
  put(end, ...nodes) {
    this.flush(this.at);
    this.frames.at(-1).children.push(...nodes);
    this.at = this.plain = end;
    return true;
  }

  flush(end) {
    if (end > this.plain) this.frames.at(-1).children.push(this.text.slice(this.plain, end));
    this.plain = end;
  }

  escape() {
    const next = this.text[this.at + 1] ?? "";
    if (next === "\n") return this.put(this.at + 2, { kind: "br" });
    if (next === "(" || next === "[") return this.math(next === "(" ? "\\)" : "\\]");
    if (next === ",") return false; // a thin space of LaTeX that stands outside of a formula
    if (!PUNCTUATION.test(next) || next === ")" || next === "]") return false;
    return this.put(this.at + 2, next);
  }

  math(close) {
    const end = this.missing.has(close) ? -1 : this.text.indexOf(close, this.at + 2);
    if (end < 0) {
      this.missing.add(close);
      this.at += 2;
      return true;
    }
    return this.put(end + 2, { kind: "math", text: this.text.slice(this.at + 2, end), isBlock: close !== "\\)" });
  }

  /** A formula between dollars. One dollar needs text right behind it and right before its end, and
   * no digit after that, so that prices stay what they are. */
  dollar() {
    const { text, at } = this;
    if (text[at + 1] === "$") return this.math("$$");
    if (isSpace(text[at + 1] ?? " ") || this.missing.has("$")) return false;
    for (let end = text.indexOf("$", at + 1); end >= 0; end = text.indexOf("$", end + 1)) {
      if (text[end - 1] === "\\") continue;
      if (isSpace(text[end - 1]) || /[0-9$]/.test(text[end + 1] ?? "")) return false;
      return this.put(end + 1, { kind: "math", text: text.slice(at + 1, end) });
    }
    this.missing.add("$");
    return false;
  }

  code() {
    const { text, at } = this;
    let start = at;
    while (text[start] === "`") start += 1;
    const size = start - at;
    if (!this.missing.has(size)) {
      for (let end = text.indexOf("`", start); end >= 0; end = text.indexOf("`", end)) {
        const first = end;
        while (text[end] === "`") end += 1;
        if (end - first !== size) continue;
        const inner = text.slice(start, first).replaceAll("\n", " ");
        const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
        return this.put(end, { kind: "code", text: isPadded ? inner.slice(1, -1) : inner });
      }
      this.missing.add(size);
    }
    this.at = start;
    return true;
  }

  delimiter(char) {
    const { text, at } = this;
    let end = at;
    while (text[end] === char) end += 1;
    const before = text[at - 1] ?? " ";
    const after = text[end] ?? " ";
    const opens = !isSpace(after) && (!PUNCTUATION.test(after) || isSpace(before) || PUNCTUATION.test(before));
    const closes = !isSpace(before) && (!PUNCTUATION.test(before) || isSpace(after) || PUNCTUATION.test(after));
    const isInWord = char === "_" && opens && closes;
    let count = end - at;
    if (count > 8 || (char === "~" && count !== 2)) {
      this.at = end;
      return true;
    }
    this.flush(at);
    if (closes && !(isInWord && !PUNCTUATION.test(after))) count = this.close(char, count);
    this.at = this.plain = end;
    const mayOpen = opens && !(isInWord && !PUNCTUATION.test(before)) && this.frames.length < DEEPEST;
    if (count && mayOpen) this.frames.push({ char, count, children: [] });
    else if (count) this.frames.at(-1).children.push(char.repeat(count));
    return true;
  }

  /** Ends what such delimiters opened; gives how many of them are left. */
  close(char, count) {
    let left = count;
    while (left) {
      const found = this.frames.findLastIndex((frame) => frame.char === char);
      if (found < 1) break;
      while (this.frames.length - 1 > found) this.flatten();
      const frame = this.frames[found];
      const used = Math.min(left, frame.count, 2);
      const kind = char === "~" ? "del" : used === 2 ? "strong" : "em";
      const node = { kind, children: frame.children };
      left -= used;
      frame.count -= used;
      if (frame.count) frame.children = [node];
      else {
        this.frames.pop();
        this.frames.at(-1).children.push(node);
      }
    }
    return left;
  }

  /** What was opened last and not closed is text. */
  flatten() {
    const { char, count, children } = this.frames.pop();
    const target = this.frames.at(-1).children;
    target.push(char.repeat(count));
    for (const child of children) target.push(child);
  }

  link(open) {
    const { text } = this;
    const close = this.brackets.get(open);
    if (close === undefined || text[close + 1] !== "(" || this.missing.has(")")) return false;
    if (text.indexOf(")", close) < 0) this.missing.add(")");
    const found = destination(text, close + 2);
    if (!found) return false;
    const label = text.slice(open + 1, close);
    const href = safeHref(found.url);
    const children = inline(label || found.url, this.depth + 1).map(withoutLinks);
    return this.put(found.end, ...(href ? [{ kind: "link", href, children }] : children));
  }

  angle() {
    const rest = this.text.slice(this.at, this.at + LONGEST_URL);
    const br = BREAK.exec(rest);
    if (br) return this.put(this.at + br[0].length, { kind: "br" });
    const url = /^<((?:https?:\/\/|mailto:)[^\s<>]*)>/.exec(rest);
    const href = url && safeHref(url[1]);
    return Boolean(href) && this.put(this.at + url[0].length, { kind: "link", href, children: [url[1]] });
  }

  entity() {
    const found = /^&(?:#(\d{1,7})|([a-z]{2,4}));/.exec(this.text.slice(this.at, this.at + 12));
    if (!found) return false;
    const code = Number(found[1] ?? 0);
    const char = found[1] ? code > 31 && code < 0x110000 && String.fromCodePoint(code) : ENTITIES[found[2]];
    return Boolean(char) && this.put(this.at + found[0].length, char);
  }

  /** A URL that stands for itself. */
  bare() {
    const { text, at } = this;
    if (!text.startsWith("https://", at) && !text.startsWith("http://", at)) return false;
    if (/[\w/]/.test(text[at - 1] ?? " ")) return false;
    const [all] = /^[^\s<>`"|\\]*/.exec(text.slice(at, at + LONGEST_URL));
    let url = all.replace(/[.,;:!?'*_~]+$/, "");
    while (url.endsWith(")") && url.split("(").length < url.split(")").length) url = url.slice(0, -1);
    const href = safeHref(url);
    return Boolean(href) && this.put(at + url.length, { kind: "link", href, children: [url] });
  }
}

function isSpace(char) {
  return char === " " || char === "\n" || char === "\t" || char === "\u00a0";
}

/** A link within a link is its text. */
function withoutLinks(node) {
  return node.kind === "link" ? node.children.join("") : node;
}

/** Where each square bracket that is open closes. */
function matchBrackets(text) {
  const found = new Map();
  const open = [];
  for (let at = text.indexOf("["); at >= 0 && at < text.length; at += 1) {
    const char = text[at];
    if (char === "\\") at += 1;
    else if (char === "[") open.push(at);
    else if (char === "]" && open.length) found.set(open.pop(), at);
  }
  return found;
}

/** The URL in the parentheses of a link, and where they end. */
function destination(text, start) {
  const rest = text.slice(start, start + LONGEST_URL);
  const bracketed = /^\s*<([^<>\n]*)>/.exec(rest);
  const open = bracketed ?? /^\s*/.exec(rest);
  let at = open[0].length;
  let url = bracketed?.[1];
  if (url === undefined) {
    const first = at;
    for (let depth = 0; at < rest.length && !isSpace(rest[at]); at += 1) {
      if (rest[at] === "(" && ++depth > 3) return null;
      if (rest[at] === ")" && depth-- === 0) break;
    }
    url = rest.slice(first, at);
  }
  const end = /^\s*(?:"[^"]*"|'[^']*')?\s*\)/.exec(rest.slice(at));
  return end && { url, end: start + at + end[0].length };
}
