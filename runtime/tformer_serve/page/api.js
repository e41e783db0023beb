// Requests to the server that sent this page.

let key = "";

/**
 * Send a key with later requests.
 * @param {string} text
 */
export function useKey(text) {
  key = text;
}

/** @param {Record<string, string>} more */
function headers(more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/**
 * Return the response. Throw the sentence of an error.
 * @param {Response} response
 */
async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // the body is not an error of the server
  }
  throw Object.assign(new Error(message), { status: response.status });
}

/** @param {string} path */
export async function get(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

/** @param {string} path @param {object} body @param {AbortSignal} signal */
async function send(path, body, signal) {
  const json = headers({ "Content-Type": "application/json" });
  return checked(await fetch(path, { method: "POST", headers: json, body: JSON.stringify(body), signal }));
}

/** @param {string} path @param {object} body @param {AbortSignal} signal */
export async function post(path, body, signal) {
  return (await send(path, body, signal)).json();
}

/** @param {string} path @param {Record<string, string | Blob>} fields @param {AbortSignal} signal */
export async function postForm(path, fields, signal) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  return (await checked(await fetch(path, { method: "POST", headers: headers(), body: form, signal }))).json();
}

/**
 * Yield the events of a stream. Throw the sentence of an error in it.
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} signal
 */
export async function* events(path, body, signal) {
  const { body: stream } = await send(path, { ...body, stream: true }, signal);
  if (!stream) throw new Error("the answer of the server is empty");
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream ended before its end: the server or the connection failed");
    const blocks = (rest + value).split("\n\n");
    rest = blocks[blocks.length - 1];
    for (const block of blocks.slice(0, -1)) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/**
 * Return the content of a file in base64.
 * @param {File} file
 * @returns {Promise<string>}
 */
export function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => {
      const url = String(reader.result);
      resolve(url.slice(url.indexOf(",") + 1));
    };
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}
