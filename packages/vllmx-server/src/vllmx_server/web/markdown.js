// Markdown as it arrives: text in, blocks out, each line read once.
//
// A document is a list of groups: {kind: "para" | "heading" | "rule" | "list" | "quote" | "table" |
// "code" | "math", pieces: [...]}. Groups and pieces that are closed never change, so views draw them once;
// what may still change is the open piece, which is short whatever is sent: long paragraphs, items
// and code are cut into several pieces of one group. Deep nesting is shown as text.
import { highlight } from "./highlight.js";

const LONGEST = 4000; // characters of a line or of a paragraph's piece
const LARGEST = 8000; // of an item's or a quote's
const CODE_LINES = 40;
const DENSE = 2000;
const MOST_PIECES = 400; // of a group
const MOST_COLUMNS = 100;
const DEEPEST = 8;
const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:\*[ \t]*){3,}$|^ {0,3}(?:-[ \t]*){3,}$|^ {0,3}(?:_[ \t]*){3,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,8})([-*+]|\d{1,9}[.)])(?:( {1,4})(.*))?$/;
const MATH = /^ {0,3}(\$\$|\\\[)(.*)$/;
const MATH_LINES = 60; // after which what was opened is text
const UNDERLINE = /^ {0,3}(?:(=+)|(-+))[ \t]*$/;
const DELIMITERS = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** The groups of a whole text. */
export function parse(text, depth = 0) {
  const document = new MarkdownDocument(depth);
  document.append(text);
  return document.end();
}

export class MarkdownDocument {
  constructor(depth = 0) {
    this.depth = depth;
    this.groups = [];
    this.open = null;
    this.rest = "";
    this.numRead = 0; // characters that were looked at, which tests bound
  }

  /** More text; lines that are complete become blocks. */
  append(text) {
    const lines = text.split("\n");
    lines[0] = this.rest + lines[0];
    this.rest = lines.pop();
    for (const line of lines) this.takeLong(line, true);
    if (this.rest.length > LONGEST) this.rest = this.takeLong(this.rest, false);
  }

  /** The groups with what is open, as it would be if the text ended here. */
  view() {
    const { groups, open } = this;
    const last = groups.at(-1);
    const [numGroups, numPieces] = [groups.length, last?.pieces?.length];
    const saved = open && { ...open, lines: [...open.lines] };
    if (this.rest) this.take(this.rest, true);
    this.close();
    const shown = [...groups];
    // The last group is another object each time, since its pieces become more.
    const end = shown.at(-1);
    if (end?.pieces) shown[shown.length - 1] = { ...end, pieces: [...end.pieces] };
    groups.length = numGroups;
    if (numPieces !== undefined) last.pieces.length = numPieces;
    this.open = saved;
    return shown;
  }

  /** The groups of a text that goes no further. */
  end() {
    if (this.rest) this.take(this.rest, true);
    this.rest = "";
    this.close();
    return this.groups;
  }

  /** A line in parts of bearable length; gives what is left of one that goes on. */
  takeLong(line, isWhole) {
    let rest = line;
    while (rest.length > LONGEST) {
      const space = rest.lastIndexOf(" ", LONGEST);
      const at = space > LONGEST / 2 ? space + 1 : LONGEST;
      this.take(rest.slice(0, at), false);
      if (this.open?.kind === "para") this.close();
      rest = rest.slice(at);
    }
    if (!isWhole) return rest;
    this.take(rest, true);
    return "";
  }

  // --- lines ------------------------------------------------------------------------------------

  /** One line. `isEnded`: it is not the first part of a longer one. */
  take(given, isEnded) {
    this.numRead += given.length;
    const line = given.endsWith("\r") ? given.slice(0, -1) : given;
    const { open } = this;
    if (open) {
      if (this[open.kind](open, line, isEnded)) return;
      this.close();
    }
    this.begin(line, isEnded);
  }

  /** A line that goes on with nothing. */
  begin(line, isEnded) {
    if (isBlank(line)) return;
    const fence = FENCE.exec(line);
    if (fence) {
      const language = fence[3].trim().split(/\s/)[0].slice(0, 40);
      this.open = { kind: "code", lines: [], size: 0, indent: fence[1].length, fence: fence[2], language, state: "", isFirst: true };
      return;
    }
    const math = MATH.exec(line);
    if (math && this.beginMath(math)) return;
    const heading = HEADING.exec(line);
    if (heading) {
      const text = (heading[2] ?? "").replace(/(?:^|[ \t])#+[ \t]*$/, "").trim();
      this.groups.push({ kind: "heading", level: heading[1].length, text });
      return;
    }
    if (RULE.test(line)) {
      this.groups.push({ kind: "rule" });
      return;
    }
    if (this.depth < DEEPEST) {
      if (QUOTE.test(line)) {
        this.open = { kind: "quote", lines: [], size: 0, isFirst: true };
        this.quote(this.open, line);
        return;
      }
      const item = ITEM.exec(line);
      if (item) {
        this.beginItem(item, false);
        return;
      }
    }
    this.open = { kind: "para", lines: [line], size: line.length };
  }

  /** Whether a formula of its own begins with a line. One that ends in it may have text behind it. */
  beginMath([, mark, rest]) {
    const close = mark === "$$" ? "$$" : "\\]";
    const end = rest.indexOf(close);
    if (end >= 0 && rest.slice(end + 2).trim()) return false;
    if (end >= 0) this.groups.push({ kind: "math", text: rest.slice(0, end) });
    else this.open = { kind: "math", lines: [rest], size: rest.length, mark, end: close };
    return true;
  }

  math(open, line) {
    const end = line.indexOf(open.end);
    if (end < 0 && (isBlank(line) || open.lines.length >= MATH_LINES || open.size > LONGEST)) return false;
    this.push(open, end < 0 ? line : line.slice(0, end));
    if (end < 0) return true;
    this.open = null;
    this.groups.push({ kind: "math", text: open.lines.join("\n") });
    const rest = line.slice(end + 2);
    if (!isBlank(rest)) this.open = { kind: "para", lines: [rest], size: rest.length };
    return true;
  }

  para(open, line) {
    if (isBlank(line)) return false;
    const underline = UNDERLINE.exec(line);
    if (underline && open.lines.length === 1) {
      this.open = null;
      this.groups.push({ kind: "heading", level: underline[1] ? 1 : 2, text: open.lines[0].trim() });
      return true;
    }
    const head = open.lines.at(-1);
    if (head.includes("|") && DELIMITERS.test(line)) {
      const [names, marks] = [cells(head), cells(line)];
      if (names.length === marks.length && names.length <= MOST_COLUMNS) {
        open.lines.pop();
        this.close();
        const align = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : ""));
        this.groups.push({ kind: "table", align, head: names, pieces: [] });
        this.open = { kind: "table", lines: [], width: names.length };
        return true;
      }
    }
    if (this.interrupts(line)) return false;
    this.push(open, line);
    if (open.size > LONGEST) this.close();
    return true;
  }

  code(open, line, isEnded) {
    const fence = FENCE.exec(line);
    const isSame = fence && fence[2][0] === open.fence[0] && fence[2].length >= open.fence.length;
    if (isSame && !fence[3].trim()) {
      this.close();
      return true;
    }
    let text = line;
    for (let n = 0; n < open.indent && text.startsWith(" "); n += 1) text = text.slice(1);
    this.push(open, isEnded ? text + "\n" : text);
    if (open.lines.length >= CODE_LINES || open.size > LONGEST) this.cut();
    return true;
  }

  quote(open, line) {
    const mark = QUOTE.exec(line);
    if (!mark && (isBlank(line) || this.interrupts(line) || isBlank(open.lines.at(-1) ?? ""))) return false;
    this.push(open, mark ? line.slice(mark[0].length) : line);
    if (open.size > LARGEST) this.cut();
    return true;
  }

  table(open, line) {
    if (isBlank(line) || !line.includes("|")) return false;
    const row = cells(line).slice(0, open.width);
    while (row.length < open.width) row.push("");
    this.extend({ cells: row });
    return true;
  }

  // --- items ------------------------------------------------------------------------------------

  beginItem(match, isSameList) {
    const [, indent, marker, spaces = " ", first = ""] = match;
    const ordered = marker.length > 1;
    const sort = ordered ? marker.at(-1) : marker;
    if (!isSameList) {
      this.groups.push({ kind: "list", ordered, start: ordered ? parseInt(marker, 10) : 1, pieces: [] });
    }
    const offset = indent.length + marker.length + spaces.length;
    this.open = { kind: "list", lines: [], size: 0, indent: indent.length, offset, sort, fence: "", isFirst: true };
    this.pushItem(this.open, first);
  }

  list(open, line) {
    if (isBlank(line)) {
      this.push(open, "");
      return true;
    }
    const indent = line.search(/[^ ]/);
    // Models often indent what belongs to an item by less than its text.
    if (indent >= Math.min(open.offset, open.indent + 2)) {
      this.pushItem(open, line.slice(Math.min(indent, open.offset)));
      return true;
    }
    const item = ITEM.exec(line);
    if (item && !RULE.test(line)) {
      const sort = item[2].length > 1 ? item[2].at(-1) : item[2];
      this.close();
      this.beginItem(item, sort === open.sort);
      return true;
    }
    if (open.fence || open.lines.at(-1) === "" || this.interrupts(line)) return false;
    this.pushItem(open, line);
    return true;
  }

  /** A line of an item; code that is open in it stays open in its next piece. */
  pushItem(open, line) {
    const fence = FENCE.exec(line);
    if (fence && !open.fence) open.fence = fence[2];
    else if (fence && fence[2].startsWith(open.fence) && !fence[3].trim()) open.fence = "";
    this.push(open, line);
    if (open.size > LARGEST) this.cut();
  }

  // --- pieces -----------------------------------------------------------------------------------

  push(open, line) {
    open.lines.push(line);
    open.size += line.length + 1;
  }

  /** Ends the open piece; its group goes on. */
  cut() {
    const { open } = this;
    this.finish(open);
    Object.assign(open, { lines: [], size: 0, isFirst: false });
    if (open.kind === "list" && open.fence) this.push(open, open.fence);
  }

  close() {
    const { open } = this;
    this.open = null;
    if (!open || open.kind === "table") return;
    if (open.kind === "para" && !open.lines.length) return;
    this.finish(open);
  }

  finish(open) {
    const { kind, lines } = open;
    if (kind === "math") {
      this.groups.push({ kind: "para", text: open.mark + lines.join("\n") });
    } else if (kind === "para") {
      this.groups.push({ kind, text: lines.map((line) => line.trim()).join("\n") });
    } else if (kind === "code") {
      if (open.isFirst) this.groups.push({ kind, language: open.language, pieces: [] });
      const text = lines.join("");
      // Nobody reads the colours of a line that fills pages.
      const language = text.length > DENSE && !text.includes("\n") ? "" : open.language;
      const { spans, state } = highlight(text, language, open.state);
      open.state = state;
      if (text) this.extend({ text, spans });
    } else {
      if (kind === "quote" && open.isFirst) this.groups.push({ kind, pieces: [] });
      const task = kind === "list" && open.isFirst && /^\[([ xX])\] /.exec(lines[0]);
      if (task) lines[0] = lines[0].slice(4);
      const piece = { groups: parse(lines.join("\n"), this.depth + 1), isMore: !open.isFirst };
      if (task) piece.done = task[1] !== " ";
      this.extend(piece);
    }
  }

  /** One more piece of the last group; a group that is full is followed by another one. */
  extend(piece) {
    let group = this.groups.at(-1);
    if (group.pieces.length >= MOST_PIECES) {
      group = { ...group, start: group.start + group.pieces.length, head: null, pieces: [] };
      this.groups.push(group);
    }
    group.pieces.push(piece);
  }

  /** Whether a line begins something else within a paragraph. */
  interrupts(line) {
    if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || MATH.test(line)) return true;
    if (this.depth >= DEEPEST) return false;
    const item = ITEM.exec(line);
    return QUOTE.test(line) || Boolean(item?.[4] && (item[2].length === 1 || parseInt(item[2], 10) === 1));
  }
}

function isBlank(line) {
  return line.trim() === "";
}

/** The cells of a row of a table. */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}
