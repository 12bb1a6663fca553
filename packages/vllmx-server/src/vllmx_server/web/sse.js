// Server-sent events out of the bytes of an answer.

const LONGEST = 64 << 20;

/** Takes bytes as they come and gives the data of each event that is complete. */
export class EventReader {
  constructor() {
    this.decoder = new TextDecoder();
    this.text = "";
    this.searched = 0;
    this.data = [];
  }

  /** The data of the events that end in these bytes. */
  feed(bytes) {
    const found = [];
    this.text += this.decoder.decode(bytes, { stream: true });
    let start = 0;
    for (;;) {
      const end = this.text.indexOf("\n", Math.max(start, this.searched));
      if (end < 0) break;
      this.line(this.text.slice(start, this.text[end - 1] === "\r" ? end - 1 : end), found);
      start = end + 1;
      this.searched = start;
    }
    if (start) this.text = this.text.slice(start);
    this.searched = this.text.length;
    if (this.searched > LONGEST) throw new Error("a line of the answer is too long");
    return found;
  }

  line(line, found) {
    if (line === "") {
      if (this.data.length) found.push(this.data.join("\n"));
      this.data = [];
    } else if (line.startsWith("data:")) {
      this.data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}
