// The syntax of PDF: values and operators of a text, and names of letters in fonts.

const DEEPEST = 60;
const SPACE = /(?:[\0\t\n\f\r ]|%[^\r\n]*)*/y;
const REGULAR = /[^\0\t\n\f\r ()<>[\]{}/%]+/y;
const REFERENCE = /[\0\t\n\f\r ]+(\d+)[\0\t\n\f\r ]+R(?![^\0\t\n\f\r ()<>[\]{}/%])/y;
const ESCAPES = { n: "\n", r: "\r", t: "\t", b: "\b", f: "\f", "\r": "", "\n": "", "\r\n": "" };

export function reader(text, at) {
  return { text, at };
}

function match(source, pattern) {
  pattern.lastIndex = source.at;
  const found = pattern.exec(source.text);
  if (found) source.at = pattern.lastIndex;
  return found;
}

/** The next value: a number, "/Name", {bytes}, {ref}, an array, an object of keys, a constant, or {op} for any other
 * word; undefined at the end. */
export function parsed(source, depth = 0) {
  match(source, SPACE);
  const { text } = source;
  const letter = text[source.at];
  if (letter === undefined) return undefined;
  if (letter === "/") {
    source.at += 1;
    const name = match(source, REGULAR)?.[0] ?? "";
    return `/${name.replace(/#([0-9a-f]{2})/gi, (_, code) => String.fromCharCode(parseInt(code, 16)))}`;
  }
  if (letter === "(") return { bytes: literal(source) };
  if (text.startsWith("<<", source.at)) return dictionary(source, depth);
  if (letter === "<") return { bytes: hexadecimal(source) };
  if (letter === "[") {
    source.at += 1;
    return depth < DEEPEST ? listed(source, "]", depth) : { op: "[" };
  }
  const word = match(source, REGULAR)?.[0];
  if (word === undefined) {
    source.at += text.startsWith(">>", source.at) ? 2 : 1;
    return { op: letter };
  }
  if (/^[+-]?(\d+\.?\d*|\.\d+)$/.test(word)) {
    const reference = /^\d+$/.test(word) && match(source, REFERENCE);
    return reference ? { ref: Number(word) } : Number(word);
  }
  return word === "true" ? true : word === "false" ? false : word === "null" ? null : { op: word };
}

function listed(source, end, depth) {
  const found = [];
  for (let value; (value = parsed(source, depth + 1)) !== undefined && value?.op !== end; ) found.push(value);
  return found;
}

function dictionary(source, depth) {
  source.at += 2;
  const found = Object.create(null);
  if (depth >= DEEPEST) return found;
  const parts = listed(source, ">", depth);
  for (let at = 0; at + 1 < parts.length; at += 2) found[String(parts[at]).slice(1)] = parts[at + 1];
  return found;
}

function literal(source) {
  const { text } = source;
  let [found, depth, at] = ["", 1, source.at + 1];
  for (; at < text.length; at += 1) {
    const letter = text[at];
    if (letter === "\\") {
      const [escaped] = /^(?:[0-7]{1,3}|\r\n|[^])?/.exec(text.slice(at + 1, at + 4));
      at += escaped.length;
      found += /^[0-7]/.test(escaped) ? String.fromCharCode(parseInt(escaped, 8) & 255) : (ESCAPES[escaped] ?? escaped);
      continue;
    }
    if (letter === "(") depth += 1;
    if (letter === ")" && --depth === 0) break;
    found += letter;
  }
  source.at = at + 1;
  return found;
}

function hexadecimal(source) {
  const end = source.text.indexOf(">", source.at);
  const digits = source.text.slice(source.at + 1, end < 0 ? undefined : end).replace(/[^0-9a-f]/gi, "");
  source.at = end < 0 ? source.text.length : end + 1;
  let found = "";
  for (let at = 0; at < digits.length; at += 2) found += String.fromCharCode(parseInt(digits.slice(at, at + 2).padEnd(2, "0"), 16));
  return found;
}

const GLYPHS = new Map(
  (
    "space ,exclam !,quotedbl \",numbersign #,dollar $,percent %,ampersand &,quotesingle ',quoteright ’,quoteleft ‘,parenleft (," +
    "parenright ),asterisk *,plus +,hyphen -,period .,slash /,zero 0,one 1,two 2,three 3,four 4,five 5,six 6,seven 7,eight 8," +
    "nine 9,colon :,semicolon ;,less <,equal =,greater >,question ?,at @,bracketleft [,backslash \\,bracketright ],asciicircum ^," +
    "underscore _,grave `,braceleft {,bar |,braceright },asciitilde ~,quotedblleft “,quotedblright ”,quotesinglbase ‚," +
    "quotedblbase „,endash –,emdash —,bullet •,ellipsis …,fi fi,fl fl,ff ff,ffi ffi,ffl ffl,germandbls ß,ae æ,AE Æ,oe œ,OE Œ," +
    "oslash ø,Oslash Ø,dotlessi ı,eth ð,thorn þ,degree °,section §,paragraph ¶,copyright ©,registered ®,trademark ™,Euro €," +
    "sterling £,yen ¥,cent ¢,multiply ×,divide ÷,plusminus ±,minus −,periodcentered ·,mu µ,guillemotleft «,guillemotright »"
  )
    .split(",")
    .map((pair) => [pair.slice(0, pair.indexOf(" ")), pair.slice(pair.indexOf(" ") + 1)])
    .concat([["comma", ","]]),
);
const MARKS = { grave: "\u0300", acute: "\u0301", circumflex: "\u0302", tilde: "\u0303", dieresis: "\u0308", ring: "\u030a", cedilla: "\u0327", caron: "\u030c" };

/** The text of a letter by its name in a font; empty for an unknown one. */
export function glyphText(name) {
  const plain = name.split(".")[0];
  if (GLYPHS.has(plain)) return GLYPHS.get(plain);
  if (/^[A-Za-z]$/.test(plain)) return plain;
  const code = /^u(?:ni)?([0-9A-F]{4,5})$/.exec(plain);
  if (code) return String.fromCodePoint(parseInt(code[1], 16));
  const marked = /^([A-Za-z])([a-z]+)$/.exec(plain);
  return marked && MARKS[marked[2]] ? (marked[1] + MARKS[marked[2]]).normalize("NFC") : "";
}
