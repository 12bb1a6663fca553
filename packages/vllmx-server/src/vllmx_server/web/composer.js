// Where a message is written: text, images, texts of files, send and stop.
import { Icon, IconButton, html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";
import { MOST_SECONDS, audioOf, record } from "./audio.js";
import { jsonTrouble } from "./settings.js";

const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_BYTES = 5 << 20;
const MOST_TEXT = 1 << 20;
const MOST_PDF = 30 << 20;
const TALLEST = 260;

export function Composer({ chats, state }) {
  const field = useRef();
  const picker = useRef();
  const [text, setText] = useState("");
  const [images, setImages] = useState([]);
  const [files, setFiles] = useState([]); // {name, text}
  const [audio, setAudio] = useState([]); // {name, url, seconds}
  const [recording, setRecording] = useState(null);
  const [trouble, setTrouble] = useState("");
  const isBusy = chats.working().length > 0;
  const { settings } = state.chat;
  const isWrong = jsonTrouble(settings.schema, false) || jsonTrouble(settings.tools, true);

  useEffect(() => {
    field.current.focus({ preventScroll: true });
    setTrouble("");
  }, [state.chat.id]);
  useLayoutEffect(() => {
    const { style } = field.current;
    style.height = "auto";
    style.height = `${Math.min(field.current.scrollHeight, TALLEST)}px`;
  }, [text]);

  const isEmpty = !text.trim() && !images.length && !files.length && !audio.length;
  const send = () => {
    if (isBusy || isEmpty) return;
    if (isWrong) {
      setTrouble("The schema or the tools in the settings are not valid JSON yet.");
      return;
    }
    chats.send(text.trim(), { images, files, audio });
    setText("");
    setImages([]);
    setFiles([]);
    setAudio([]);
    setTrouble("");
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  const add = async (given) => {
    const found = await read(given, state);
    setImages((old) => [...old, ...found.images]);
    setFiles((old) => [...old, ...found.files]);
    setAudio((old) => [...old, ...found.audio]);
    setTrouble(found.trouble);
  };
  const turnRecording = async () => {
    if (recording) {
      setRecording(null);
      add([await recording.stop()]);
      return;
    }
    try {
      setRecording(await record());
      setTrouble("");
    } catch {
      setTrouble("The browser gave no access to a microphone.");
    }
  };
  const onPaste = (event) => {
    const pasted = [...event.clipboardData.files];
    if (!pasted.length) return;
    event.preventDefault();
    add(pasted);
  };
  const onDrop = (event) => {
    event.preventDefault();
    add([...event.dataTransfer.files]);
  };
  return html`<form class="composer" onSubmit=${(event) => (event.preventDefault(), send())}
      onDragOver=${(event) => event.preventDefault()} onDrop=${onDrop}>
    ${trouble && html`<p class="trouble" role="alert">${trouble}</p>`}
    ${images.length > 0 && html`<ul class="thumbs">${images.map((url, at) => html`<li key=${url.slice(-40) + at}>
      <img src=${url} alt=${`Image ${at + 1}`} />
      <${IconButton} icon="close" label=${`Remove image ${at + 1}`} onClick=${() => setImages(images.filter((_, one) => one !== at))} />
    </li>`)}</ul>`}
    ${files.length > 0 && html`<ul class="files">${files.map((file, at) => html`<li key=${file.name + at}>
      <${Icon} name="file" /><span>${file.name}</span>
      <${IconButton} icon="close" label=${`Remove ${file.name}`} onClick=${() => setFiles(files.filter((_, one) => one !== at))} />
    </li>`)}</ul>`}
    ${audio.length > 0 && html`<ul class="files">${audio.map((one, at) => html`<li key=${one.url.slice(-40) + at}>
      <audio controls src=${one.url} aria-label=${one.name} />
      <${IconButton} icon="close" label=${`Remove ${one.name}`} onClick=${() => setAudio(audio.filter((_, other) => other !== at))} />
    </li>`)}</ul>`}
    <div class="box">
      ${takes(state, "audio") && navigator.mediaDevices && html`<${IconButton} icon=${recording ? "stop" : "microphone"}
        label=${recording ? "End the recording" : "Record"} aria-pressed=${Boolean(recording)} onClick=${turnRecording} />`}
      <${IconButton} icon="clip" label="Add files" onClick=${() => picker.current.click()} />
      <input ref=${picker} type="file" class="hidden" tabindex="-1" aria-hidden="true" multiple
        onChange=${(event) => (add([...event.target.files]), (event.target.value = ""))} />
      <textarea ref=${field} id="composer" rows="1" dir="auto" aria-label="Message" placeholder=${`Ask ${state.model || "the model"}`}
        value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown} onPaste=${onPaste} />
      ${isBusy
        ? html`<button type="button" class="send" aria-label="Stop" title="Stop (Esc)" onClick=${() => chats.stop()}><${Icon} name="stop" /></button>`
        : html`<button class="send" aria-label="Send" title="Send (Enter)" disabled=${isEmpty}><${Icon} name="send" /></button>`}
    </div>
  </form>`;
}

/** Whether the model's card says that it takes such parts; null: it says nothing. */
function takes({ models, model }, modality) {
  return models.find((one) => one.id === model)?.input_modalities?.includes(modality) ?? null;
}

/** Images as data URLs, audio, texts of other files, and a sentence on what could not be taken. */
async function read(given, state) {
  const { model } = state;
  const [images, files, audio] = [[], [], []];
  let trouble = "";
  for (const file of given) {
    if (file.type.startsWith("audio/") || file.type === "video/webm") {
      const found = takes(state, "audio") === false ? undefined : await audioOf(file);
      if (found === undefined) trouble = `${model} takes no audio.`;
      else if (found === null) trouble = `${file.name} is no audio that the browser decodes.`;
      else if (found.seconds > MOST_SECONDS) trouble = `${file.name} is longer than ${MOST_SECONDS} seconds.`;
      else audio.push(found);
    } else if (IMAGES.includes(file.type)) {
      if (takes(state, "image") === false) trouble = `${model} reads text only: it takes no images.`;
      else if (file.size > MOST_BYTES) trouble = `${file.name} is larger than 5 MB.`;
      else images.push(await dataUrl(file));
    } else if (file.type === "application/pdf" || /\.pdf$/i.test(file.name)) {
      const { text, why } = await textOfPdf(file);
      if (why) trouble = `${file.name} ${why}.`;
      else files.push({ name: file.name, text });
    } else if (file.size > MOST_TEXT) {
      trouble = `${file.name} is larger than 1 MB.`;
    } else {
      const text = await textOf(file);
      if (text === null) trouble = `${file.name} is neither text nor a PDF, PNG, JPEG, WebP or GIF.`;
      else files.push({ name: file.name, text });
    }
  }
  return { images, files, audio, trouble };
}

/** The text, or why there is none. */
async function textOfPdf(file) {
  if (file.size > MOST_PDF) return { why: "is larger than 30 MB" };
  try {
    const { pdfText } = await import("./pdf.js");
    const text = await pdfText(await file.arrayBuffer(), MOST_TEXT);
    if (!text) return { why: "has no text, only images" };
    return text.length > MOST_TEXT ? { why: "has more than 1 MB of text" } : { text };
  } catch (error) {
    return { why: error.message };
  }
}

/** Null for what is not text. */
async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
