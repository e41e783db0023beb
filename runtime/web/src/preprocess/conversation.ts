/** The messages of a conversation. `chatTemplate` turns them into a prompt, and is loaded for files that have one. */

import { InputError } from "../base/errors.js";

/** "role", and "content": a text. */
export interface Message {
  readonly role: string;
  readonly content: string;
  readonly [field: string]: unknown;
}

/** Descriptions of functions, as of OpenAI's API and of transformers. */
export type Tools = readonly Readonly<Record<string, unknown>>[];

/** A function from messages to the text of a prompt. */
export type PromptTemplate = (messages: readonly Message[], tools?: Tools) => string;

/** Return the messages of a conversation. messages: a text or messages. system: a system message before them. */
export function conversation(messages: unknown, system?: string): Message[] {
  const all = typeof messages === "string" ? [{ role: "user", content: messages }] : messages;
  if (!Array.isArray(all) || !all.length || !all.every(isMessage)) {
    throw new InputError(
      'a conversation is a text, or a list of messages such as {role: "user", content: "a text"}, the last of which ' +
        "is answered",
    );
  }
  return [...(system === undefined ? [] : [{ role: "system", content: system }]), ...all];
}

function isMessage(value: unknown): value is Message {
  const message = value as Partial<Message> | null;
  return typeof message?.role === "string" && typeof message.content === "string";
}
