// Requests to the server that sent this page.

let key = "";

export function useKey(text) {
  key = text;
}

function headers(more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** Return the response. Throw the sentence of an error. */
async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* the body is no error of the server */ }
  throw Object.assign(new Error(message), { status: response.status });
}

export async function get(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

function send(path, body, signal) {
  const json = { "Content-Type": "application/json" };
  return fetch(path, { method: "POST", headers: headers(json), body: JSON.stringify(body), signal }).then(checked);
}

export async function post(path, body, signal) {
  return (await send(path, body, signal)).json();
}

export async function postForm(path, fields, signal) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  return (await checked(await fetch(path, { method: "POST", headers: headers(), body: form, signal }))).json();
}

/** Yield the events of a stream. Throw the sentence of an error in it. */
export async function* events(path, body, signal) {
  const reader = (await send(path, { ...body, stream: true }, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream ended before its end: the server or the connection failed");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** Return the content of a file in base64. */
export function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}
