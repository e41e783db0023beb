import { expect, test } from "vitest";
import { compileTemplate } from "../../src/preprocess/chatTemplate.js";
import { conversation } from "../../src/preprocess/conversation.js";
import { errorOf } from "../golden/golden.js";

const NONE = new Map<string, string>();
const HELLO = [{ role: "user", content: "hello" }];

test("templates have the variables of apply_chat_template", () => {
  const text =
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}{% if add_generation_prompt %}<model>{% endif %}{{ none }}";
  const template = compileTemplate(text, new Map([["bos_token", "<s>"]]));
  expect(template([...HELLO, { role: "model", content: " a\n" }])).toBe("<s><user>hello<model>a<model>");
  expect(compileTemplate("{{ strftime_now('%Y') }}", NONE)(HELLO)).toBe(String(new Date().getFullYear()));
  expect(compileTemplate("{% for i in range(2, 8, 3) %}{{ i }},{% endfor %}", NONE)(HELLO)).toBe("2,5,");
  expect(compileTemplate("{{ tools | length if tools else 0 }}", NONE)(HELLO, [{ name: "f" }])).toBe("1");
});

test("templates that refuse, fail or do not end", () => {
  const cases: [string, string][] = [
    ["{{ raise_exception('no ' + messages[0].role) }}", "the chat template refuses: no user"],
    ["{{ messages[0].content.nothing() }}", "the chat template cannot be filled in: "],
    ["{% for i in range(1000000000) %}{% endfor %}", "a range of more than 100,000 numbers"],
    [
      "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}{{ c }}{% endfor %}{% endfor %}{% endfor %}",
      "it takes more than 500,000 steps",
    ],
  ];
  for (const [text, sentence] of cases) {
    expect(errorOf(() => compileTemplate(text, NONE)(HELLO)).message).toContain(sentence);
  }
  expect(errorOf(() => compileTemplate("{% for %}", NONE)).message).toContain("the chat template cannot be read: ");
  expect(errorOf(() => compileTemplate("a", NONE)(HELLO, [{}])).message).toContain("has no place for tools");
});

test("conversations", () => {
  expect(conversation("hello")).toEqual(HELLO);
  expect(conversation(HELLO, "brief")).toEqual([{ role: "system", content: "brief" }, ...HELLO]);
  for (const wrong of [[], [{}], [{ role: "user" }], 3, null, [{ role: "user", content: 3 }]]) {
    expect(errorOf(() => conversation(wrong)).message).toContain("a conversation is a text, or a list of messages");
  }
});
