/** The messages of a conversation. `chatTemplate` turns them into a prompt, and is loaded for files that have one. */

import { InputError } from "../base/errors.js";
import type { ImageInput } from "./images.js";

/** A part of a message, for a model that reads images. */
export type MessagePart =
  { readonly type: "text"; readonly text: string } | { readonly type: "image"; readonly image: ImageInput };

/** "role", and "content": a text, or parts with images. */
export interface Message {
  readonly role: string;
  readonly content: string | readonly MessagePart[];
  readonly [field: string]: unknown;
}

/** Descriptions of functions, in the form of OpenAI's API and of transformers. */
export type Tools = readonly Readonly<Record<string, unknown>>[];

/** A function from messages to the text of a prompt. */
export type PromptTemplate = (messages: readonly Message[], tools?: Tools) => string;

/** Return the messages of a conversation. messages: a text or messages. system: a system message before them. */
export function conversation(messages: unknown, system?: string): Message[] {
  const all = typeof messages === "string" ? [{ role: "user", content: messages }] : messages;
  if (!Array.isArray(all) || !all.length || !all.every(isMessage)) {
    throw new InputError(
      'a conversation is a text, or a list of messages such as {role: "user", content: "a text"}; the last ' +
        "message is answered",
    );
  }
  return [...(system === undefined ? [] : [{ role: "system", content: system }]), ...all];
}

/** Return the images of a conversation in their order. */
export function imagesOf(messages: readonly Message[]): ImageInput[] {
  const parts = messages.flatMap(({ content }) => (typeof content === "string" ? [] : content));
  return parts.flatMap((part) => (part.type === "image" ? [part.image] : []));
}

/** Return a conversation for the chat template, which places images and does not read them. */
export function withoutImages(messages: readonly Message[]): readonly Message[] {
  return messages.map((message) => {
    if (typeof message.content === "string") return message;
    const content = message.content.map((part) => (part.type === "image" ? { ...part, image: "" } : part));
    return { ...message, content } as unknown as Message;
  });
}

function isMessage(value: unknown): value is Message {
  const message = value as Partial<Message> | null;
  if (typeof message?.role !== "string") return false;
  const { content } = message;
  return typeof content === "string" || (Array.isArray(content) && content.every(isPart));
}

/** Return whether a value is a text or an image of a message. Throw InputError for an image that is not decoded. */
function isPart(value: unknown): value is MessagePart {
  const part = value as { type?: unknown; text?: unknown; image?: unknown } | null;
  if (part?.type === "text") return typeof part.text === "string";
  if (part?.type !== "image") return false;
  if (typeof part.image !== "object" || part.image === null) {
    throw new InputError(
      'an image of a message is decoded before: give {type: "image", image} with an ImageData, not its address',
    );
  }
  return true;
}
