// A light colouring of code: comments, strings, numbers and the words that most languages share.
// It goes on from a state, so that long code is coloured piece by piece.

const WORDS = new Set(
  ("abstract and as assert async await begin bool boolean break case catch char class const continue" +
    " def default defer del delete do done double elif else elsif end enum esac except export extends" +
    " false fi final finally float fn for foreach from func function global go goto if impl implements" +
    " import in include instanceof int interface is lambda let local long loop match mod module mut" +
    " namespace new nil none not null of or override package pass private protected pub public raise" +
    " readonly require return self short signed static str string struct super switch then this throw" +
    " trait true try type typeof undefined union unless unsafe unsigned until use using val var virtual" +
    " void volatile when where while with yield None True False" +
    " select insert update create table join left right inner outer on group order by limit values into")
    .split(" "),
);
const HASH = /^(?:py|python|sh|bash|zsh|shell|console|yaml|yml|toml|ruby|rb|perl|r|make|makefile|dockerfile|ini|elixir|nix|jl|julia|ps1|powershell)$/;
const DASHES = /^(?:sql|lua|haskell|hs|ada|elm)$/;
const PLAIN = /^(?:text|txt|plain|plaintext|diff|markdown|md|log|output)?$/;
const C = String.raw`\/\/.*|\/\*`;
const REST = String.raw`|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|\x60(?:[^\x60\\\n]|\\.)*\x60?|\b\d[\w.]*|[A-Za-z_]\w*`;
const CLOSERS = { "/*": "*/", '"""': '"""', "'''": "'''" };

/** Spans `[class or "", text]` of a piece of code and the state behind it. `state` is what is still
 * open: "" or the beginning of a comment or text. */
export function highlight(text, language, state = "") {
  const name = language.toLowerCase();
  if (PLAIN.test(name)) return { spans: [["", text]], state: "" };
  const isHash = HASH.test(name);
  const comment = isHash ? String.raw`#.*|"""|'''` : DASHES.test(name) ? String.raw`--.*|\/\*` : C;
  const token = new RegExp(comment + REST, "g");
  const spans = [];
  let at = 0;
  let open = state;
  const put = (kind, end) => {
    if (end > at) spans.push([kind, text.slice(at, end)]);
    at = end;
  };
  while (at < text.length) {
    if (open) {
      const closer = CLOSERS[open];
      const end = text.indexOf(closer, at);
      put(open === "/*" ? "comment" : "text", end < 0 ? text.length : end + closer.length);
      if (end < 0) break;
      open = "";
    }
    token.lastIndex = at;
    const found = token.exec(text);
    if (!found) break;
    put("", found.index);
    const [word] = found;
    if (word in CLOSERS) {
      open = word;
      put(word === "/*" ? "comment" : "text", found.index + word.length);
    } else put(kindOf(word, isHash), found.index + word.length);
  }
  put("", text.length);
  return { spans, state: open };
}

function kindOf(word, isHash) {
  const first = word[0];
  if (first === "/" || first === "-" || (isHash && first === "#")) return "comment";
  if (first === '"' || first === "'" || first === "`") return "text";
  if (first >= "0" && first <= "9") return "number";
  return WORDS.has(word) || WORDS.has(word.toLowerCase()) ? "word" : "";
}
