// Audio of messages: files and recordings, which the browser decodes and models hear as WAV.

const RATE = 16000;
export const MOST_SECONDS = 150; // 6.4 MB in base64, below the server's limit of a body

/** Any audio that the browser decodes as {name, url, seconds}: WAV, 16 kHz, one channel. Null for other files. */
export async function audioOf(file) {
  const context = new OfflineAudioContext(1, 1, RATE);
  try {
    const buffer = await context.decodeAudioData(await file.arrayBuffer());
    return { name: file.name, url: wavUrl(mixed(buffer)), seconds: buffer.duration };
  } catch {
    return null;
  }
}

/** The mean of all channels. */
function mixed(buffer) {
  const sum = new Float32Array(buffer.length);
  for (let channel = 0; channel < buffer.numberOfChannels; channel += 1) {
    buffer.getChannelData(channel).forEach((value, at) => (sum[at] += value / buffer.numberOfChannels));
  }
  return sum;
}

function wavUrl(samples) {
  const bytes = new Uint8Array(44 + 2 * samples.length);
  const view = new DataView(bytes.buffer);
  const tag = (at, text) => [...text].forEach((letter, index) => view.setUint8(at + index, letter.charCodeAt(0)));
  tag(0, "RIFF");
  view.setUint32(4, bytes.length - 8, true);
  tag(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format: PCM, one channel
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  tag(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, at) => view.setInt16(44 + 2 * at, Math.round(32767 * Math.max(-1, Math.min(1, value))), true));
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return `data:audio/wav;base64,${btoa(text)}`;
}

/** Records the microphone until `stop`, which gives a file. Raises what the browser raises without permission. */
export async function record() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(stream);
  const pieces = [];
  recorder.ondataavailable = ({ data }) => pieces.push(data);
  recorder.start();
  return {
    async stop() {
      const ended = new Promise((resolve) => (recorder.onstop = resolve));
      recorder.stop();
      await ended;
      for (const track of stream.getTracks()) track.stop();
      return new File(pieces, "Recording", { type: recorder.mimeType });
    },
  };
}
