/** Chat templates: from a conversation to the text of a prompt, as transformers' apply_chat_template does. */

import { Template } from "@huggingface/jinja";
import { errorSummary, InputError, UnsupportedCallError } from "../base/errors.js";
import type { Manifest } from "../format/manifest.js";

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

/** Return the chat template of a file. Throw UnsupportedCallError if it has none. */
export function templateOf(manifest: Manifest): PromptTemplate {
  if (manifest.chatTemplate === undefined) {
    throw new UnsupportedCallError(
      "the file has no chat template: export the model from a folder whose tokenizer has one, or with --chat-template",
    );
  }
  return compileTemplate(manifest.chatTemplate, manifest.chatTokens);
}

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

/**
 * Return a function from messages to the text of the prompt. The template has the variables of apply_chat_template.
 *
 * tokens: the texts of special tokens, by names such as bos_token.
 * Throw InputError for an invalid template. The function throws InputError if the template refuses the messages or fails.
 */
export function compileTemplate(text: string, tokens: ReadonlyMap<string, string>): PromptTemplate {
  let template: Template;
  try {
    template = new Template(text);
  } catch (error) {
    throw new InputError(`the chat template cannot be read: ${errorSummary(error)}`, undefined, error);
  }
  return (messages, tools) => {
    if (tools?.length && !/\btools\b/.test(text)) {
      throw new InputError("the chat template has no place for tools: leave them out, or describe them in a message");
    }
    let refused: string | undefined;
    const refuse = (reason: unknown) => {
      refused = String(reason);
      throw new Error(refused);
    };
    try {
      return template.render({
        ...Object.fromEntries(tokens),
        documents: null,
        add_generation_prompt: true,
        messages,
        tools: tools?.length ? tools : null,
        raise_exception: refuse,
      });
    } catch (error) {
      if (refused !== undefined) throw new InputError(`the chat template refuses: ${refused}`, undefined, error);
      throw new InputError(`the chat template cannot be filled in: ${errorSummary(error)}`, undefined, error);
    }
  };
}
