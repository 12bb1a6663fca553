// The text of PDF files: objects, content streams and the encodings of fonts. Fetched with the first such file.
import { glyphText, parsed, reader } from "./pdf_syntax.js";

const MOST_INFLATED = 200 << 20;
const LAST_CODE = 0xffff; // strings have one or two bytes for a letter
const MOST_STEPS = 20_000_000; // values and operators of content streams, and codes of fonts
const DEEPEST = 8; // forms within forms
const IDENTITY = [1, 0, 0, 1, 0, 0];

/** The text of a PDF, pages apart by an empty line, up to about `most` characters. Raises Error with the end of a
 * sentence for a file that cannot be read. */
export async function pdfText(buffer, most) {
  try {
    return await textOf(buffer, most);
  } catch (error) {
    throw error.constructor === Error ? error : new Error("is damaged");
  }
}

async function textOf(buffer, most) {
  const file = new PdfFile(latin1(new Uint8Array(buffer)));
  await file.open();
  let text = "";
  for (const page of file.pages()) {
    const sheet = new Sheet(file);
    await sheet.run(await file.content(page.Contents), file.get(page.Resources) ?? {}, IDENTITY, 0);
    text += `${sheet.text.trim()}\n\n`;
    if (text.length > most) break;
  }
  return text.trim();
}

/** A character for each byte. */
function latin1(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return text;
}

function bytesOf(text) {
  return Uint8Array.from(text, (letter) => letter.charCodeAt(0));
}

class PdfFile {
  constructor(text) {
    this.text = text;
    this.objects = new Map(); // number -> {value, place}
    this.inflated = 0;
    this.steps = 0;
    this.fonts = new Map();
    this.root = null;
  }

  /** Finds all objects by reading the file from its beginning: tables of places may be wrong. */
  async open() {
    const packed = [];
    const heads = /(\d{1,10})\s{1,9}\d{1,5}\s{1,9}obj\b|\btrailer\b/g;
    for (let found; (found = heads.exec(this.text)); ) {
      const source = reader(this.text, heads.lastIndex);
      const value = parsed(source);
      const stream = /^\s*stream\r?\n?/.exec(this.text.slice(source.at, source.at + 40));
      if (stream && value && typeof value === "object") {
        value.begin = source.at + stream[0].length;
        const after = typeof value.Length === "number" ? value.begin + value.Length : value.begin;
        value.end = this.text.indexOf("endstream", after);
        if (value.end < 0) value.end = this.text.length;
        source.at = value.end;
        if (value.Type === "/ObjStm") packed.push(value);
      }
      if (value?.Encrypt) throw new Error("is encrypted: save a copy without a password first");
      if (value?.Root) this.root = value.Root;
      if (found[1]) this.put(Number(found[1]), value, found.index);
      heads.lastIndex = Math.max(source.at, heads.lastIndex);
    }
    for (const stream of packed) await this.unpack(stream);
    if (!this.get(this.get(this.root)?.Pages)) throw new Error("is no PDF that can be read");
  }

  /** Counts towards the bound on the work for a file. */
  step() {
    if ((this.steps += 1) > MOST_STEPS) throw new Error("is too large to be read here");
  }

  /** A later definition replaces an earlier one: files are updated by adding to them. */
  put(number, value, place) {
    const old = this.objects.get(number);
    if (old === undefined || old.place <= place) this.objects.set(number, { value, place });
  }

  /** Takes objects out of a stream of objects. */
  async unpack(stream) {
    const text = await this.data(stream);
    const source = reader(text, 0);
    for (let left = this.get(stream.N); left > 0; left -= 1) {
      const number = parsed(source);
      if (number === undefined) return;
      const value = parsed(reader(text, this.get(stream.First) + parsed(source)));
      this.put(number, value, stream.begin);
    }
  }

  get(value) {
    for (let hops = 0; value?.ref !== undefined && hops < 20; hops += 1) value = this.objects.get(value.ref)?.value;
    return value;
  }

  /** The pages in order, with the resources that they inherit. */
  pages() {
    const found = [];
    const seen = new Set();
    const walk = (node, resources) => {
      if (!node || seen.has(node)) return;
      seen.add(node);
      const own = node.Resources ?? resources;
      const kids = this.get(node.Kids);
      if (Array.isArray(kids)) kids.forEach((kid) => walk(this.get(kid), own));
      else found.push({ Contents: node.Contents, Resources: own });
    };
    walk(this.get(this.get(this.root).Pages), null);
    return found;
  }

  async content(value) {
    const parts = [this.get(value)].flat().map((part) => this.get(part));
    let text = "";
    for (const part of parts) if (part?.begin) text += `${await this.data(part)}\n`;
    return text;
  }

  /** The bytes of a stream behind its filters; empty where one is not known. */
  async data(stream) {
    const length = this.get(stream.Length);
    const end = Number.isInteger(length) && stream.begin + length <= stream.end ? stream.begin + length : stream.end;
    let text = this.text.slice(stream.begin, end);
    for (const filter of [this.get(stream.Filter) ?? []].flat().map((one) => this.get(one))) {
      if (filter === "/FlateDecode" || filter === "/Fl") text = await this.inflate(text);
      else if (filter === "/ASCII85Decode" || filter === "/A85") text = ascii85(text);
      else if (filter === "/ASCIIHexDecode" || filter === "/AHx") text = parsed(reader(`<${text}`, 0)).bytes;
      else return "";
    }
    return text;
  }

  async inflate(text) {
    const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
    const source = stream.getReader();
    let found = "";
    try {
      for (let piece; !(piece = await source.read()).done; ) {
        found += latin1(piece.value);
        this.inflated += piece.value.length;
        if (this.inflated > MOST_INFLATED) break;
      }
    } catch {
      // A line's end behind the data, or a damaged stream: what came before it is kept.
    }
    if (this.inflated > MOST_INFLATED) throw new Error(`holds more than ${MOST_INFLATED >> 20} MB of data`);
    return found;
  }
}

function ascii85(text) {
  let found = "";
  let group = [];
  const put = (count) => {
    const value = group.reduce((sum, digit) => sum * 85 + digit, 0);
    for (let at = 0; at < count; at += 1) found += String.fromCharCode(Math.floor(value / 256 ** (3 - at)) & 255);
    group = [];
  };
  for (const letter of text) {
    if (letter === "~") break;
    if (letter === "z" && !group.length) found += "\0\0\0\0";
    else if (letter >= "!" && letter <= "u") group.push(letter.charCodeAt(0) - 33);
    if (group.length === 5) put(4);
  }
  const rest = group.length - 1;
  while (group.length && group.length < 5) group.push(84);
  if (rest > 0) put(rest);
  return found;
}

/** The text of one page, in the order in which it is drawn. Positions say where lines and words end. */
class Sheet {
  constructor(file) {
    this.file = file;
    this.text = "";
    this.end = null; // {x, y} behind the last letter
  }

  async run(content, resources, matrix, depth) {
    const source = reader(content, 0);
    const saved = [];
    let state = { matrix, font: null, size: 1, between: 0, words: 0, wide: 1, lead: 0 };
    let [line, place] = [IDENTITY, IDENTITY];
    let stack = [];
    const move = (x, y) => (line = place = product([1, 0, 0, 1, x, y], line));
    const show = (string) => {
      if (string?.bytes === undefined || !state.font) return;
      let [text, x] = ["", 0];
      for (const [letter, width, isSpace] of state.font.letters(string.bytes)) {
        text += letter;
        x += (width * state.size + state.between + (isSpace ? state.words : 0)) * state.wide;
      }
      this.put(text, product(place, state.matrix), state.size, x);
      place = product([1, 0, 0, 1, x, 0], place);
    };
    const actions = {
      q: () => saved.push({ ...state }),
      Q: () => (state = saved.pop() ?? state),
      cm: (...m) => (state.matrix = product(m, state.matrix)),
      BT: () => (line = place = IDENTITY),
      Tf: async (name, size) => Object.assign(state, { font: await this.font(name, resources), size }),
      Tc: (value) => (state.between = value),
      Tw: (value) => (state.words = value),
      Tz: (value) => (state.wide = value / 100),
      TL: (value) => (state.lead = value),
      Td: move,
      TD: (x, y) => ((state.lead = -y), move(x, y)),
      Tm: (...m) => (line = place = m),
      "T*": () => move(0, -state.lead),
      Tj: show,
      "'": (string) => (move(0, -state.lead), show(string)),
      '"': (words, between, string) => (Object.assign(state, { words, between }), move(0, -state.lead), show(string)),
      TJ: (parts) => {
        for (const part of Array.isArray(parts) ? parts : []) {
          if (typeof part !== "number") show(part);
          else place = product([1, 0, 0, 1, (-part / 1000) * state.size * state.wide, 0], place);
        }
      },
      Do: async (name) => {
        const form = this.file.get(this.file.get(resources.XObject)?.[String(name).slice(1)]);
        if (form?.Subtype !== "/Form" || depth >= DEEPEST) return;
        const own = product(this.file.get(form.Matrix) ?? IDENTITY, state.matrix);
        await this.run(await this.file.data(form), this.file.get(form.Resources) ?? resources, own, depth + 1);
      },
      ID: () => {
        const end = /\sEI(?=\s|$)/g; // the bytes of an image end here
        end.lastIndex = source.at;
        source.at = end.exec(content) ? end.lastIndex : content.length;
      },
    };
    for (let token; (token = parsed(source)) !== undefined; ) {
      this.file.step();
      if (token?.op === undefined) {
        if (stack.length < 1000) stack.push(token);
        continue;
      }
      if (Object.hasOwn(actions, token.op)) {
        const done = actions[token.op](...stack);
        if (done instanceof Promise) await done;
      }
      stack = [];
    }
  }

  /** Appends text that begins at the origin of `m` and is `width` long, in the units of `m`. */
  put(text, m, size, width) {
    const across = Math.hypot(m[0], m[1]) || 1;
    const [x, y] = [m[4], m[5]];
    const tall = Math.abs(size) * (Math.hypot(m[2], m[3]) || 1);
    if (this.end) {
      const [dx, dy] = [x - this.end.x, y - this.end.y];
      const along = (dx * m[0] + dy * m[1]) / across;
      const below = Math.abs(dy * m[0] - dx * m[1]) / across;
      if (below > 2.2 * tall) this.text += "\n\n";
      else if (below > 0.5 * tall || along < -2 * tall) this.text += "\n";
      else if (along > 0.17 * tall && !/\s$/.test(this.text) && !/^\s/.test(text)) this.text += " ";
    }
    this.text += text;
    this.end = { x: x + width * m[0], y: y + width * m[1] };
  }

  async font(name, resources) {
    const found = this.file.get(this.file.get(resources.Font)?.[String(name).slice(1)]);
    if (!found) return null;
    const { fonts } = this.file;
    if (!fonts.has(found)) fonts.set(found, await fontOf(this.file, found));
    return fonts.get(found);
  }
}

/** Applies `a`, then `b`. */
function product(a, b) {
  return [
    a[0] * b[0] + a[1] * b[2],
    a[0] * b[1] + a[1] * b[3],
    a[2] * b[0] + a[3] * b[2],
    a[2] * b[1] + a[3] * b[3],
    a[4] * b[0] + a[5] * b[2] + b[4],
    a[4] * b[1] + a[5] * b[3] + b[5],
  ];
}

/** A font as `letters`: of a string the text and the width in ems of each code, and whether it is a space's. */
async function fontOf(file, font) {
  const isComposite = font.Subtype === "/Type0";
  const stream = file.get(font.ToUnicode);
  const map = stream?.begin ? unicodeMap(file, await file.data(stream)) : null;
  const widths = isComposite ? compositeWidths(file, font) : simpleWidths(file, font);
  const encoding = file.get(font.Encoding);
  const isUtf16 = isComposite && /UTF16|UCS2/.test(String(encoding));
  const table = isComposite ? null : simpleEncoding(file, encoding);
  const size = isComposite ? 2 : 1;
  const textOf = (code) => map?.get(code) ?? (table ? table[code] : isUtf16 ? String.fromCharCode(code) : "");
  return {
    *letters(bytes) {
      for (let at = 0; at < bytes.length; at += size) {
        const code = size === 1 ? bytes.charCodeAt(at) : (bytes.charCodeAt(at) << 8) | bytes.charCodeAt(at + 1);
        yield [textOf(code), widths(code) / 1000, size === 1 && code === 32];
      }
    },
  };
}

/** From codes to texts. */
function unicodeMap(file, text) {
  const map = new Map();
  const number = ({ bytes }) => [...bytes].reduce((sum, byte) => sum * 256 + byte.charCodeAt(0), 0);
  const utf16 = ({ bytes }) => new TextDecoder("utf-16be").decode(bytesOf(bytes));
  const source = reader(text, 0);
  let stack = [];
  for (let token; (token = parsed(source)) !== undefined; ) {
    file.step();
    if (token?.op === undefined) {
      stack.push(token);
      continue;
    }
    const given = stack;
    stack = [];
    if (token.op === "endbfchar") {
      for (let at = 0; at + 1 < given.length; at += 2) map.set(number(given[at]), utf16(given[at + 1]));
    } else if (token.op === "endbfrange") {
      for (let at = 0; at + 2 < given.length; at += 3) {
        const [first, last, to] = [number(given[at]), number(given[at + 1]), given[at + 2]];
        const start = Array.isArray(to) ? "" : utf16(to);
        for (let code = first; code <= Math.min(last, LAST_CODE); code += 1) {
          file.step();
          if (Array.isArray(to)) map.set(code, to[code - first] ? utf16(to[code - first]) : "");
          else map.set(code, start.slice(0, -1) + String.fromCharCode(start.charCodeAt(start.length - 1) + code - first));
        }
      }
    }
  }
  return map;
}

function simpleWidths(file, font) {
  const widths = file.get(font.Widths);
  const first = file.get(font.FirstChar) ?? 0;
  const scale = font.Subtype === "/Type3" ? 1000 * Math.abs((file.get(font.FontMatrix) ?? [0.001])[0]) : 1;
  const other = file.get(file.get(font.FontDescriptor)?.MissingWidth) ?? 500;
  return (code) => (file.get(widths?.[code - first]) ?? other) * scale;
}

function compositeWidths(file, font) {
  const inner = file.get(file.get(font.DescendantFonts)?.[0]) ?? {};
  const found = new Map();
  const given = file.get(inner.W) ?? [];
  for (let at = 0; at < given.length; ) {
    file.step();
    const [first, next, width] = [0, 1, 2].map((index) => file.get(given[at + index]));
    const isList = Array.isArray(next);
    const last = Math.min(isList ? first + next.length - 1 : next, LAST_CODE);
    for (let code = Math.max(first, 0); code <= last; code += 1) {
      file.step();
      found.set(code, isList ? file.get(next[code - first]) : width);
    }
    at += isList ? 2 : 3;
  }
  const other = file.get(inner.DW) ?? 1000;
  return (code) => found.get(code) ?? other;
}

/** The texts of 256 codes. */
function simpleEncoding(file, encoding) {
  const base = encoding?.BaseEncoding ? file.get(encoding.BaseEncoding) : encoding;
  const all = Uint8Array.from({ length: 256 }, (_, code) => code);
  const table = [...new TextDecoder(base === "/MacRomanEncoding" ? "macintosh" : "windows-1252").decode(all)];
  let code = 0;
  for (const one of file.get(encoding?.Differences) ?? []) {
    const value = file.get(one);
    if (typeof value === "number") code = value;
    else table[code++] = glyphText(String(value).slice(1));
  }
  return table;
}
