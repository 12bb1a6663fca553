// Where a message is written: text, images, send and stop.
import { Icon, IconButton, html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";
import { jsonTrouble } from "./settings.js";

const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_BYTES = 5 << 20;
const TALLEST = 260;

export function Composer({ chats, state }) {
  const field = useRef();
  const picker = useRef();
  const [text, setText] = useState("");
  const [images, setImages] = useState([]);
  const [trouble, setTrouble] = useState("");
  const live = chats.live;
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

  const send = () => {
    if (live || (!text.trim() && !images.length)) return;
    if (isWrong) {
      setTrouble("The schema or the tools in the settings are not valid JSON yet.");
      return;
    }
    chats.send(text.trim(), images);
    setText("");
    setImages([]);
    setTrouble("");
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  const add = async (files) => {
    const found = await read(files, state);
    setImages((old) => [...old, ...found.images]);
    setTrouble(found.trouble);
  };
  const onPaste = (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    add(files);
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
    <div class="box">
      <${IconButton} icon="image" label="Add images" onClick=${() => picker.current.click()} />
      <input ref=${picker} type="file" class="hidden" tabindex="-1" aria-hidden="true" accept=${IMAGES.join(",")} multiple
        onChange=${(event) => (add([...event.target.files]), (event.target.value = ""))} />
      <textarea ref=${field} id="composer" rows="1" aria-label="Message" placeholder=${`Ask ${state.model || "the model"}`}
        value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown} onPaste=${onPaste} />
      ${live
        ? html`<button type="button" class="send" aria-label="Stop" title="Stop (Esc)" onClick=${() => chats.stop()}><${Icon} name="stop" /></button>`
        : html`<button class="send" aria-label="Send" title="Send (Enter)" disabled=${!text.trim() && !images.length}><${Icon} name="send" /></button>`}
    </div>
  </form>`;
}

/** Images as data URLs, and a sentence on what could not be taken. */
async function read(files, { models, model }) {
  const card = models.find((one) => one.id === model);
  if (card?.input_modalities && !card.input_modalities.includes("image")) {
    return { images: [], trouble: `${model} reads text alone: it takes no images.` };
  }
  const images = [];
  let trouble = "";
  for (const file of files) {
    if (!IMAGES.includes(file.type)) trouble = `${file.name} is no PNG, JPEG, WebP or GIF.`;
    else if (file.size > MOST_BYTES) trouble = `${file.name} is larger than 5 MB.`;
    else images.push(await dataUrl(file));
  }
  return { images, trouble };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
