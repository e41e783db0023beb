"""Training on text files of one's own: the file of each task gives PyTorch's results, and bad data are refused."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer

from tformer_export import export
from tformer_export.common.checkpoint import load_checkpoint
from tformer_export.sources import load_source
from tformer_models.cli import main
from tformer_models.objectives import Objective
from tformer_models.text_files import Example, dataset, read_examples, split_examples
from tformer_runtime import InputError, Model

NUMBERS = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
ENGLISH = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PAIRS = [(f"{NUMBERS[i]} {NUMBERS[j]}", f"{ENGLISH[i]} {ENGLISH[j]}") for i in range(10) for j in range(10)]
LABELS = ["de", "en"]
LINES = {
    "text2text-generation": [f"{source}\t{target}" for source, target in PAIRS],
    "text-generation": [json.dumps({"text": f"{source} = {target}"}, ensure_ascii=False) for source, target in PAIRS],
    "text-classification": [f"{text}\t{label}" for pair in PAIRS for text, label in zip(pair, LABELS, strict=True)],
}
MODEL = {
    "text2text-generation": "encoder_layers = 1, decoder_layers = 1, ",
    "text-generation": "layers = 1, ",
    "text-classification": "layers = 1, ",
}
TEXT = "drei sechs, ☃"  # with characters that no line has


def write(folder, task, data="", steps=24):
    name = "train.jsonl" if task == "text-generation" else "train.tsv"
    (folder / name).write_text("\n".join(LINES[task]) + "\n\n", encoding="utf-8")
    path = folder / "own.toml"
    path.write_text(
        f"""
        [data]
        train = "{name}"
        task = "{task}"
        vocabulary = 300
        max_tokens = 40
        {data}
        [model]
        arguments = {{ {MODEL[task]} width = 32, heads = 2, feedforward = 64 }}
        [training]
        steps = {steps}
        validate_every = 8
        warmup = 4
        learning_rate = 1e-2
        average = 0.0
        """
    )
    return path


def run(*arguments):
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)  # Lightning ignores further signals
    try:
        return CliRunner().invoke(main, [*map(str, arguments), "--threads", "1", "--quiet"])
    finally:
        torch.set_num_threads(threads)
        signal.signal(signal.SIGINT, handler)


def exported(path):
    """Export a checkpoint; return the module, its tokenizers and the model of the file."""
    loaded = load_checkpoint(path)
    export(load_source(path), path.with_suffix(".onnx"), force=True)
    return loaded.build().eval(), loaded, Model.load(path.with_suffix(".onnx"), "cpu", threads=1)


@torch.no_grad()
def greedy(next_logits, ids, count):
    """Return up to `count` ids, without the end token."""
    start = len(ids)
    while len(ids) < start + count:
        following = int(next_logits(torch.tensor([ids]))[0, -1].argmax())
        if following == 2:
            break
        ids = [*ids, following]
    return ids[start:]


def test_pairs_give_a_file_that_translates_as_the_model(tmp_path):
    result = run(write(tmp_path, "text2text-generation"), "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    module, loaded, model = exported(tmp_path / "run" / "model.pt")
    tokenizer = Tokenizer.from_str(loaded.tokenizers["src"])
    for text in (PAIRS[12][0], TEXT):
        src = torch.tensor([tokenizer.encode(text).ids])
        assert src[0, -1] == 2
        expected = greedy(lambda tgt, src=src: module(src, tgt), [1], 10)
        generated = model.generate(text, max_new_tokens=10)
        assert [i for i in generated.token_ids if i != 2] == expected
        assert generated.text == tokenizer.decode(expected)


def test_interrupted_language_model_exports_and_resumes(tmp_path, monkeypatch):
    recipe, output = write(tmp_path, "text-generation"), tmp_path / "run"
    log = Objective.optimizer_step

    def interrupt(self, *arguments, **options):
        if self.global_step == 13:
            raise KeyboardInterrupt
        return log(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "optimizer_step", interrupt)
        result = run(recipe, "--output", output)
    assert result.exit_code == 128 + signal.SIGINT
    assert result.stderr.strip().endswith(
        f"; the same command with --resume continues the run; {output}/model.pt holds the best weights so far"
    )
    module, loaded, model = exported(output / "model.pt")
    best = torch.load(output / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["global_step"] == 8
    assert all(torch.equal(value, best["state_dict"][f"model.{name}"]) for name, value in module.state_dict().items())
    tokenizer = Tokenizer.from_str(loaded.tokenizers["ids"])
    for text in ("zwei", TEXT):
        ids = tokenizer.encode(text).ids
        assert ids[0] == 1
        expected = greedy(module, ids, 10)
        assert [i for i in model.generate(text, max_new_tokens=10).token_ids if i != 2] == expected
    assert run(recipe, "--output", output, "--resume").exit_code == 0
    assert torch.load(output / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 24
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert "of other text files, so this recipe cannot resume it" in run(recipe, "--output", output, "--resume").stderr


def test_labels_give_a_file_that_classifies_as_the_model(tmp_path):
    result = run(write(tmp_path, "text-classification", steps=60), "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    module, loaded, model = exported(tmp_path / "run" / "model.pt")
    tokenizer = Tokenizer.from_str(loaded.tokenizers["ids"])
    for text in (PAIRS[34][0], PAIRS[34][1], TEXT):
        with torch.no_grad():
            expected = module(torch.tensor([tokenizer.encode(text).ids]))[0].double().softmax(-1).tolist()
        (actual,) = model.classify([text])
        assert actual.scores == pytest.approx(dict(zip(LABELS, expected, strict=True)), abs=1e-5)
    assert [each.label for each in model.classify([PAIRS[34][0], PAIRS[34][1]])] == LABELS


def test_split_is_seeded_and_keeps_equal_sources_together(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{i % 40}\t{i}\n" for i in range(200)))
    examples = read_examples(path, "text2text-generation")
    train, held_out = split_examples(examples, 0.1, 1)
    assert len({example.fields[0] for example in held_out}) == 4
    assert {e.fields[0] for e in train}.isdisjoint(e.fields[0] for e in held_out)
    assert sorted(train + held_out) == sorted(examples)
    assert split_examples(examples, 0.1, 1) == (train, held_out) != split_examples(examples, 0.1, 2)
    for seed in range(8):  # a label is never held out as a whole
        labelled = [Example((str(i), str(i % 7 if i < 9 else 6)), "") for i in range(16)]
        train, held_out = split_examples(labelled, 0.5, seed, has_labels=True)
        assert {example.fields[1] for example in train} == set("0123456")
        assert len(train) + len(held_out) == 16
        assert len(held_out) == 8


def test_long_texts_are_split_for_a_language_model_and_cut_for_a_classifier(tmp_path):
    (tmp_path / "lines.txt").write_bytes(b"\xef\xbb\xbf" + b"abcdefgh" * 4 + b"\r\nxyz\r\n")
    data = dataset(str(tmp_path / "lines.txt"), str(tmp_path / "lines.txt"), "text-generation", 259, max_tokens=10)
    (first, targets), *_ = data.train
    tokenizer = Tokenizer.from_str(data.tokenizers["ids"])
    ids = tokenizer.encode("abcdefgh" * 4).ids
    assert [i for row, _ in data.train[:-1] for i in row] == ids
    assert [i for _, row in data.train[:-1] for i in row] == [*ids[1:], 2]
    assert (first, targets) == (ids[:10], ids[1:11])
    assert tokenizer.decode(data.train[-1][1]) == "xyz"
    (tmp_path / "labels.tsv").write_text("abcdefghijkl\tx\nab\ty\nc\ty\n")
    data = dataset(str(tmp_path / "labels.tsv"), task="text-classification", vocabulary=259, max_tokens=10)
    assert sorted(len(ids) for ids, _ in [*data.train, *data.validation]) == [2, 3, 10]


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        (
            "text2text-generation",
            "a.tsv",
            b"a\tb\nno tab\n",
            "line 2 has 0 tabs: an example is source and target, with a",
        ),
        ("text2text-generation", "a.tsv", b"a\tb\tc\n", "line 1 has 2 tabs"),
        ("text2text-generation", "a.tsv", b"a\tb\n\n\t c\n", "line 3: the source is empty"),
        (
            "text2text-generation",
            "a.tsv",
            b"a\tb\nc\td" + b"e" * 99,
            "line 2: the target has 102 tokens, and max_tokens is",
        ),
        ("text2text-generation", "a.tsv", b"a\tb\na\tc\n", "has too few distinct examples to hold any out"),
        ("text2text-generation", "a.tsv", b"a\tb\n\xff\tc\n", r"line 2 is not UTF-8 \(byte 1 of the line\)"),
        ("text2text-generation", "a.tsv", b"\n \n", "holds no examples"),
        (
            "text-generation",
            "a.jsonl",
            b'{"text": "a"}\n{"text": 3}\n',
            "line 2 must be a JSON object with texts for text",
        ),
        ("text-generation", "a.jsonl", b"{\n", "line 1 is not JSON"),
        ("text-classification", "a.tsv", b"a\tx\nb\tx\n", "has one label, 'x': a classifier needs examples of two"),
    ],
)
def test_bad_data_are_refused_with_their_line(task, name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        dataset(str(path), task=task, vocabulary=259, max_tokens=40)


def test_label_that_is_only_validated_on_is_refused(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tx\nb\ty\n")
    (tmp_path / "b.tsv").write_text("a\tx\nb\tz\n")
    with pytest.raises(InputError, match=r"b.tsv, line 2: no example to train with has the label 'z'"):
        dataset(str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv"), "text-classification", 259)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("vocabluary = 3", "[data] has no vocabluary"),
        ("seed = 'x'", "seed must be of type int, not 'x'"),
        ("validation_share = 1.5", "validation_share must be between 0 and 1"),
        ("validation = 'none.tsv'", "none.tsv cannot be read: No such file"),
        ("max_tokens = 2\n[checkpoint]\ntask = 'x'", "max_tokens must be at least 4"),
        ("[checkpoint]\ntask = 'x'", "task and max_length of [checkpoint] follow from [data]"),
        ("[modle]", "there is no section [modle]"),
    ],
)
def test_bad_recipes_are_refused_before_a_run_begins(data, message, tmp_path):
    (tmp_path / "train.tsv").write_text("a\tb\nc\td\n")
    (tmp_path / "own.toml").write_text(f"[training]\nsteps = 1\n[data]\ntrain = 'train.tsv'\n{data}\n")
    result = run(tmp_path / "own.toml", "--output", tmp_path / "run")
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_bad_line_leaves_no_run(tmp_path):
    recipe = write(tmp_path, "text2text-generation", steps=1)
    (tmp_path / "train.tsv").write_text("a\tb\nno tab\n")
    result = run(recipe, "--output", tmp_path / "run")
    assert result.stderr.startswith(f"tformer-train: {tmp_path}/train.tsv, line 2 has 0 tabs")
    assert not (tmp_path / "run").exists()
