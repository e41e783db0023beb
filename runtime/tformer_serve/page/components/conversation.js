// A conversation whose answers are streamed.

import { element, field } from "./elements.js";
import { runForm } from "./runForm.js";

/**
 * @typedef {object} ConversationParts
 * @property {string} name of the one that answers
 * @property {HTMLInputElement | HTMLTextAreaElement} input
 * @property {string} label of the input
 * @property {string} hint
 * @property {readonly Node[]} [options] more controls
 * @property {(text: string, signal: AbortSignal) => AsyncIterable<string>} answer
 *     gives the answer in pieces; the message and its answer belong to the conversation only after the last piece
 * @property {() => void} clear begins another conversation
 * @property {AbortSignal} signal ends the form
 */

/**
 * Return a conversation and the form of its next message.
 * @param {ConversationParts} parts
 */
export function conversation({ name, input, label, hint, options = [], answer, clear, signal }) {
  const log = element("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: 0 });

  /** @param {"user" | "assistant"} role @param {string} content */
  const show = (role, content) => {
    const body = element("span", {}, content);
    const message = element("div", { class: `message ${role}` });
    message.append(element("b", {}, role === "user" ? "You" : name), body);
    log.append(message);
    log.scrollTop = log.scrollHeight;
    return { message, body };
  };

  /** @param {HTMLElement} _ @param {AbortSignal} ended */
  const run = async (_, ended) => {
    const text = input.value;
    const messages = [show("user", text), show("assistant", "")];
    const { body } = messages[1];
    input.value = "";
    input.focus();
    try {
      for await (const piece of answer(text, ended)) {
        body.append(piece);
        log.scrollTop = log.scrollHeight;
      }
    } catch (error) {
      // The model does not know of a message without a whole answer.
      if (body.isConnected) input.value ||= text;
      for (const { message } of messages) {
        if (!body.textContent) message.remove();
        message.classList.add("dropped");
      }
      messages[1].message.append(element("small", {}, "incomplete: not part of the conversation"));
      throw error;
    }
  };

  const restart = () => {
    parts.end();
    clear();
    log.replaceChildren();
    parts.alert.replaceChildren();
    input.focus();
  };
  const another = element("button", { type: "button", class: "plain", click: restart }, "New conversation");
  const controls = [field(label, input, hint), ...options];
  const parts = runForm({ controls, run, button: "Send", buttons: [another], waits: true, result: log, signal });
  return element("div", {}, log, parts.form, parts.alert);
}
