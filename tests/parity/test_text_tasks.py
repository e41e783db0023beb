"""Spans, answers, filled masks and attention weights of exported files match transformers on the same weights.

transformers 5 has no pipeline for question answering. The reference here repeats that of version 4 on the source
model's scores, with the functions of it that version 5 still has.
"""

from __future__ import annotations

import functools
import random
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from support.text_models import MAX_TOKENS, SHAPE, TEXT, byte_pairs, unigram_pieces, wordpiece_vocabulary
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import BertTokenizer, DebertaV2Tokenizer, RobertaTokenizer
from transformers.pipelines.document_question_answering import select_starts_ends

from tformer_export import ExtraOutputs, Quantization, Task, export, padding
from tformer_export.cli import main
from tformer_export.sources import load_source
from tformer_runtime import InputError, Model, OptionError, SourceError, UnsupportedCallError
from tformer_runtime.format import manifest as m
from tformer_runtime.tasks.token_classification import AGGREGATIONS

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
TEXTS = [
    "the film was good",
    "bads day not Bad news!",
    "a very old model reads the new file and it is not bad",
    "we é 你",
]
LONG = "the old film was bads and the new model reads it of a day and we is not good very night " * 4


FAMILIES = {
    "bert": lambda: (
        "Bert",
        transformers.BertConfig(**SHAPE, vocab_size=len(wordpiece_vocabulary())),
        BertTokenizer(vocab=wordpiece_vocabulary()),
    ),
    "roberta": lambda: (
        "Roberta",
        transformers.RobertaConfig(**SHAPE, vocab_size=270, pad_token_id=1, type_vocab_size=1),
        RobertaTokenizer(**byte_pairs("<s>", "<pad>", "</s>", "<unk>", "<mask>")),
    ),
    "distilbert": lambda: (
        "DistilBert",
        transformers.DistilBertConfig(
            dim=32, n_layers=1, n_heads=2, hidden_dim=48, vocab_size=len(wordpiece_vocabulary()),
            max_position_embeddings=MAX_TOKENS,
        ),
        BertTokenizer(vocab=wordpiece_vocabulary()),
    ),
    "deberta-v2": lambda: (
        "DebertaV2",
        transformers.DebertaV2Config(
            **SHAPE, vocab_size=len(unigram_pieces()) + 1, relative_attention=True, pos_att_type="c2p|p2c",
            position_buckets=8,
            share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False, type_vocab_size=0,
        ),
        DebertaV2Tokenizer(vocab=unigram_pieces(), unk_id=3),
    ),
}  # fmt: skip

TAGGERS = [  # tokenizers that mark continuations of words, and others
    "bert",
    "deberta-v2",
    *(pytest.param(name, marks=pytest.mark.thorough) for name in ("roberta", "distilbert")),
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function: family, head → module, tokenizer, model of the exported file, report."""

    @functools.cache
    def get(name, head):
        prefix, config, tokenizer = FAMILIES[name]()
        if head == "TokenClassification":
            config.id2label, config.label2id = dict(enumerate(TAGS)), {tag: i for i, tag in enumerate(TAGS)}
            config.num_hidden_layers = 2
        torch.manual_seed(7)  # this seed gives all labels, and spans of several words
        module, folder = getattr(transformers, f"{prefix}For{head}")(config).eval(), tmp_path_factory.mktemp(name)
        tokenizer.model_max_length = MAX_TOKENS
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        attention = head == "TokenClassification"
        report = export(load_source(folder), folder / "model.onnx", extra_outputs=ExtraOutputs(attentions=attention))
        return module, tokenizer, Model.load(folder / "model.onnx", "cpu", threads=1), report

    return get


# -- spans ------------------------------------------------------------------------------------------------------------


def assert_same_spans(actual, expected):
    """Check labels, offsets and scores."""
    assert [(s.label, s.start, s.end) for s in actual] == [
        (e.get("entity_group", e.get("entity")), e["start"], e["end"]) for e in expected
    ]
    assert [s.score for s in actual] == pytest.approx([float(e["score"]) for e in expected], abs=2e-5)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("name", TAGGERS)
def test_spans_match_the_pipeline(exported, name):
    module, tokenizer, model, report = exported(name, "TokenClassification")
    pipeline = transformers.TokenClassificationPipeline(model=module, tokenizer=tokenizer)
    has_long_spans = False
    for aggregation in AGGREGATIONS:
        for batch_size, ignore in ((1, ["O"]), (4, [])):
            actual = model.entities([*TEXTS, LONG], aggregation, ignore, batch_size=batch_size, truncate=True)
            for text, spans in zip([*TEXTS, LONG], actual, strict=True):
                assert_same_spans(spans, pipeline(text, aggregation_strategy=aggregation, ignore_labels=ignore))
                assert all(span.text == text[span.start : span.end] for span in spans)
                has_long_spans |= aggregation != "none" and any(" " in span.text.strip() for span in spans)
    assert has_long_spans  # some spans have more than one word
    assert (report.parity.raw.texts, report.parity.raw.pairs) == (11, 0)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("name", TAGGERS)
def test_spans_of_long_texts_match_the_pipeline(exported, name):
    module, tokenizer, model, _ = exported(name, "TokenClassification")
    pipeline = functools.partial(transformers.TokenClassificationPipeline, model=module, tokenizer=tokenizer)
    for stride in (0, 9):
        for aggregation in AGGREGATIONS[1:]:
            (actual,) = model.entities([LONG], aggregation, doc_stride=stride)
            assert_same_spans(actual, pipeline(aggregation_strategy=aggregation, stride=stride)(LONG))
    assert max(span.end for span in actual) > len(LONG) - 10
    (cut,) = model.entities([LONG], "none", ignore_labels=(), truncate=True)
    assert_same_spans(cut, pipeline(aggregation_strategy="none", ignore_labels=[])(LONG))
    with pytest.raises(InputError, match=r"^input 2: the input is \d+ tokens long and the model takes at most 38"):
        model.entities(["a", LONG])


def test_invalid_calls_of_entities_raise_errors(exported):
    _, _, model, _ = exported("bert", "TokenClassification")
    with pytest.raises(InputError, match="input 1: spans are parts of a text: give a text, not a pair"):
        model.entities([("a", "the")])
    with pytest.raises(OptionError, match="aggregation must be one of none, simple, first, average, max, not 'last'"):
        model.entities(["a"], "last")
    with pytest.raises(OptionError, match="stride merges spans of several windows"):
        model.entities(["a"], "none", doc_stride=3)
    with pytest.raises(UnsupportedCallError, match=r"labels spans of its inputs: it cannot fill; call entities\(\)"):
        model.fill(["a"])


# -- answers ----------------------------------------------------------------------------------------------------------

CONTEXTS = [
    ("is it good?", "the old film was bads and the new model reads it"),
    ("we", LONG),
    ("not a day", LONG),
    ("very", "the film"),
    ("was", "é the 你 bad films! and"),
]


def transformers_answers(
    module,
    tokenizer,
    question,
    context,
    top_k=1,
    allow_no_answer=False,
    max_answer_tokens=15,
    max_seq_len=MAX_TOKENS,
    doc_stride=MAX_TOKENS // 2,
):
    """Return the answers of QuestionAnsweringPipeline of transformers 4, with a fast tokenizer and align_to_words."""
    encodings = tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=max_seq_len,
        stride=doc_stride,
        return_overflowing_tokens=True,
    )
    no_answer_score, answers = 1000000, []
    for index, encoding in enumerate(encodings.encodings):
        ids = torch.tensor([encoding.ids])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "token_type_ids" in tokenizer.model_input_names:
            inputs["token_type_ids"] = torch.tensor([encoding.type_ids])
        with torch.no_grad():
            output = module(**inputs)
        p_mask = np.array([[number != 1 for number in encodings.sequence_ids(index)]]).astype(int)
        p_mask[ids.numpy() == tokenizer.cls_token_id] = 0
        starts, ends, scores, no_answer_score = select_starts_ends(
            output.start_logits.double().numpy(), output.end_logits.double().numpy(), p_mask,
            np.ones_like(p_mask), no_answer_score, top_k * 2 + 10, allow_no_answer, max_answer_tokens,
        )  # fmt: skip
        for s, e, score in zip(starts, ends, scores, strict=True):
            try:
                begin = encoding.word_to_chars(encoding.token_to_word(int(s)), 1)[0]
                finish = encoding.word_to_chars(encoding.token_to_word(int(e)), 1)[1]
            except Exception:
                begin, finish = encoding.offsets[s][0], encoding.offsets[e][1]
            text = context[begin:finish]
            equal_answer = next((answer for answer in answers if answer["answer"].lower() == text.lower()), None)
            if equal_answer:
                equal_answer["score"] += score
            else:
                answers.append({"score": score, "start": begin, "end": finish, "answer": text})
    if allow_no_answer:
        answers.append({"score": no_answer_score, "start": 0, "end": 0, "answer": ""})
    return sorted(answers, key=lambda answer: answer["score"], reverse=True)[:top_k]


def assert_same_answers(actual, module, tokenizer, **options):
    """Check texts, offsets and scores of the answers to CONTEXTS."""
    for (question, context), result in zip(CONTEXTS, actual, strict=True):
        expected = [
            answer
            for answer in transformers_answers(module, tokenizer, question, context, **options)
            if answer["score"] > 0
        ]
        ranked = [result, *result.alternatives]
        assert [(a.text, a.start, a.end) for a in ranked] == [(e["answer"], e["start"], e["end"]) for e in expected]
        assert [a.score for a in ranked] == pytest.approx([e["score"] for e in expected], rel=1e-4)


@pytest.mark.parametrize("name", ["bert", pytest.param("roberta", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 3},
        {"top_k": 2, "max_answer_tokens": 3},
        {"allow_no_answer": True, "top_k": 40},
        {"max_seq_len": 30, "doc_stride": 5},
    ],
)
def test_answers_match_the_pipeline(exported, name, options):
    module, tokenizer, model, _ = exported(name, "QuestionAnswering")
    for batch_size in (1, 8):
        assert_same_answers(model.answer(CONTEXTS, batch_size=batch_size, **options), module, tokenizer, **options)


def test_start_and_end_logits_match_the_module(exported):
    module, _, model, report = exported("bert", "QuestionAnswering")
    assert [spec.name for spec in model.manifest.encode.outputs] == ["start_logits", "end_logits"]
    assert (report.parity.raw.texts, report.parity.raw.pairs) == (0, 4)
    outputs = model.engine.encode(
        {n: [np.array(v)] for n, v in (("input_ids", [2, 5, 3]), ("token_type_ids", [0] * 3))}, 1
    )
    with torch.no_grad():
        expected = module(torch.tensor([[2, 5, 3]]))
    for name, value in outputs.items():
        np.testing.assert_allclose(value.numpy(), expected[name].numpy(), atol=1e-5)
    pair = CONTEXTS[0]
    assert model.answer([{"question": pair[0], "context": pair[1]}]) == model.answer([pair])


def test_invalid_calls_of_answer_raise_errors(exported):
    _, _, model, _ = exported("bert", "QuestionAnswering")
    with pytest.raises(InputError, match="input 1: give a question and the context to answer it from"):
        model.answer(["a"])
    with pytest.raises(InputError, match="input 2: the question is empty"):
        model.answer([("a", "b"), (" ", "a")])
    with pytest.raises(InputError, match="the first text and the tokens around both leave no room in a window of 38"):
        model.answer([(LONG, "a")])
    with pytest.raises(OptionError, match="max_seq_len must be at most 38, for the model takes no more, not 64"):
        model.answer([("a", "b")], max_seq_len=64)
    with pytest.raises(OptionError, match="stride must be less than a window, 20, not 20"):
        model.answer([("a", "b")], max_seq_len=20, doc_stride=20)
    with pytest.raises(InputError, match="input 1: the context is empty"):
        model.answer([("a", "")])


def test_int8_answers_match_the_pipeline_on_the_scores_of_the_file(exported, tmp_path, monkeypatch, capsys):
    """The report counts the changed positions on every fourth line. Answers match the pipeline on the file's scores."""
    module, tokenizer, model, _ = exported("bert", "QuestionAnswering")
    folder, out, lines = model.engine.session.path.parent, tmp_path / "x.onnx", tmp_path / "lines.txt"
    rng = random.Random(0)
    pairs_of_text = [
        [" ".join(rng.choices(TEXT.split(), k=rng.randint(*k))) for k in ((1, 4), (5, 25))] for _ in range(160)
    ]
    lines.write_text("".join(f"{question}\t{context}\n" for question, context in pairs_of_text))
    options = ["--quantize", "int8", "--calibration", str(lines), "--attentions"]
    monkeypatch.setattr(sys, "argv", ["tformer-export", str(folder), "-o", str(out), *options])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    rows = dict(line.strip().split(None, 1) for line in capsys.readouterr().err.splitlines() if " " in line.strip())
    int8_model = Model.load(out, "cpu", threads=1)

    def quantized(input_ids, token_type_ids, attention_mask):
        sources = {"input_ids": [input_ids[0].numpy()], "token_type_ids": [token_type_ids[0].numpy()]}
        outputs = int8_model.engine.encode(sources, 1)
        return SimpleNamespace(**{name: torch.from_numpy(value.numpy()) for name, value in outputs.items()})

    unchanged = []
    for pair in pairs_of_text[3::4]:
        inputs = tokenizer(*pair, return_tensors="pt")
        with torch.no_grad():
            before, after = module(**inputs), quantized(**inputs)
        unchanged += [getattr(before, n).argmax() == getattr(after, n).argmax() for n in ("start_logits", "end_logits")]
    assert len(unchanged) == 80
    assert rows["quantised"] == f"{np.mean(unchanged):.2%} of 80 rows keep their class"
    assert_same_answers(int8_model.answer(CONTEXTS, top_k=3, batch_size=1), quantized, tokenizer, top_k=3)
    assert rows["attentions"].startswith("max |Δ| ")
    with torch.no_grad():
        module.set_attn_implementation("eager")
        expected = module(**tokenizer(*pairs_of_text[0], return_tensors="pt"), output_attentions=True).attentions[0]
    weights, _ = int8_model.attentions(tuple(pairs_of_text[0]))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert 0 < np.abs(weights - expected.numpy()).max() < 0.1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("head", "labels_of"),
    [
        ("TokenClassification", lambda model, text: [span.label for span in model.entities([text], "none", ())[0]]),
        ("SequenceClassification", lambda model, text: [model.classify([text])[0].label]),
        ("MaskedLM", lambda model, text: [model.fill([f"{text} [MASK]"], top_k=1)[0][0][0].token]),
    ],
)
def test_most_int8_results_are_unchanged(exported, tmp_path, head, labels_of):
    """The report counts rows that keep their class, and most results do not change."""
    _, _, plain, _ = exported("bert", head)
    rng = random.Random(1)
    texts = [" ".join(rng.choices(TEXT.split(), k=rng.randint(3, 20))) for _ in range(80)]
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    folder = plain.engine.session.path.parent
    report = export(
        load_source(folder), tmp_path / "x.onnx", quantization=Quantization("int8", calibration=tmp_path / "lines.txt")
    )
    assert re.search(r"keep their class|tokens agree", dict(report.rows())["quantised"])
    int8_model = Model.load(tmp_path / "x.onnx", "cpu", threads=1)
    pairs = [pair for text in texts for pair in zip(labels_of(plain, text), labels_of(int8_model, text), strict=True)]
    assert len(pairs) >= 80
    assert np.mean([a == b for a, b in pairs]) > 0.85
    assert report.degradation.quality.agreement > 0.85


# -- masks ------------------------------------------------------------------------------------------------------------


NAMES_OF_PIPELINE = {"candidate_tokens": "targets"}


@pytest.mark.parametrize("name", ["bert", pytest.param("roberta", marks=pytest.mark.thorough)])
def test_filled_masks_match_the_pipeline(exported, name):
    module, tokenizer, model, report = exported(name, "MaskedLM")
    pipeline = transformers.FillMaskPipeline(model=module, tokenizer=tokenizer)
    mask = tokenizer.mask_token
    texts = [f"the {mask} was good", f"{mask} Film", f"{mask} is {mask} and {mask}", f"a very old {mask}!"]
    targets = ["Ġthe", "a", "oo"] if name == "roberta" else ["bad", "day", "##s"]
    for options in ({}, {"top_k": 3}, {"candidate_tokens": targets}, {"candidate_tokens": targets, "top_k": 2}):
        for text, result in zip(texts, model.fill(texts, **options), strict=True):
            expected = pipeline(text, **{NAMES_OF_PIPELINE.get(name, name): value for name, value in options.items()})
            expected = expected if isinstance(expected[0], list) else [expected]
            assert len(result) == len(expected) == text.count(mask)
            for candidates, entries in zip(result, expected, strict=True):
                assert [(c.id, c.token, c.text) for c in candidates] == [
                    (e["token"], e["token_str"], e["sequence"]) for e in entries
                ]
                assert [c.score for c in candidates] == pytest.approx([e["score"] for e in entries], abs=1e-5)
    assert (report.parity.raw.texts, report.parity.raw.pairs) == (11, 0)


def test_invalid_calls_of_fill_raise_errors(exported):
    _, _, model, _ = exported("bert", "MaskedLM")
    with pytest.raises(InputError, match=r"^input 2: the input has no mask: write \[MASK\] where it belongs$"):
        model.fill(["[MASK]", "a"])
    with pytest.raises(InputError, match=r"the input has no mask \(or truncation removed it\): write"):
        model.fill([f"{LONG} [MASK]"], truncate=True)
    with pytest.raises(
        OptionError, match="the candidate token 'bads' is not one token of the model's vocabulary, but bad ##s"
    ):
        model.fill(["[MASK]"], candidate_tokens=["the", "bads"])
    with pytest.raises(OptionError, match="the candidate token 'xyz' is not one token of the model's vocabulary"):
        model.fill(["[MASK]"], candidate_tokens="xyz")


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TAGGERS)  # DeBERTa adds a bias to scores
def test_attentions_match_transformers(exported, name):
    module, tokenizer, model, report = exported(name, "TokenClassification")
    module.set_attn_implementation("eager")  # other implementations return no weights
    for sample in (TEXTS[0], ("a day", TEXTS[2]), "we", LONG):
        weights, tokens = model.attentions(sample, truncate=sample is LONG)
        inputs = tokenizer(*((sample,) if isinstance(sample, str) else sample), truncation=True, return_tensors="pt")
        with torch.no_grad():
            expected = module(**inputs, output_attentions=True).attentions
        np.testing.assert_allclose(weights, torch.cat(expected).numpy(), atol=1e-5)
        assert tokens == tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    (extra,) = model.manifest.extras
    assert (extra.kind, extra.shape) == (m.ATTENTIONS, ("batch", 2, 4, "input_ids_length", "input_ids_length"))
    assert report.parity.extras.keys() == {"attentions"}  # compared on ragged rows too
    with pytest.raises(InputError, match="the model takes at most 38"):
        model.attentions(LONG)


# -- custom modules ---------------------------------------------------------------------------------------------------


class CustomTokenScorer(nn.Module):
    """Scores of labels, or of the begin and the end of an answer, for each token."""

    def __init__(self, num_outputs, named_outputs=False):
        super().__init__()
        self.embed, self.at = nn.Embedding(len(wordpiece_vocabulary()), 16), nn.Embedding(30, 16)
        self.packed, self.head = nn.Linear(16, 48), nn.Linear(16, num_outputs)
        self.named_outputs = named_outputs

    def forward(self, ids, hidden):
        x = self.embed(ids) + self.at(torch.arange(ids.shape[1]))
        q, k, v = self.packed(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden[:, None, None])
        scores = self.head(x + mixed.transpose(1, 2).flatten(2))
        return (
            {"loss": scores.sum(), "begin": scores[..., 0], "finish": scores[..., 1]} if self.named_outputs else scores
        )


def custom_tokenizer():
    tokenizer = Tokenizer(models.WordLevel(wordpiece_vocabulary(), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer.to_str()


def custom(tmp_path, num_outputs, named_outputs=False, **options):
    """Return a custom module, the path of its file, and a function that exports it."""
    torch.manual_seed(1)
    module, out = CustomTokenScorer(num_outputs, named_outputs).eval(), tmp_path / "own.onnx"
    example, masks = {"ids": torch.tensor([[5, 6, 7], [8, 9, 10]])}, {"hidden": padding("ids", keep=False)}
    return (
        module,
        out,
        lambda: export(module, out, example, masks=masks, tokenizer=custom_tokenizer(), max_length=30, **options),
    )


def test_custom_token_classifier_matches_its_module(tmp_path):
    module, out, export_module = custom(tmp_path, 3, task=Task("token-classification", labels=["O", "NAME", "PLACE"]))
    assert export_module().parity.raw.texts == 11
    (spans,) = Model.load(out, "cpu").entities([TEXT[:20]], "none", ignore_labels=())
    with torch.no_grad():
        scores = module(torch.tensor([[2, 5, 6, 7, 8, 9, 3]]), torch.zeros(1, 7).bool())[0, 1:-1].softmax(-1)
    assert [span.label for span in spans] == [["O", "NAME", "PLACE"][i] for i in scores.argmax(-1)]
    assert [span.score for span in spans] == pytest.approx(scores.max(-1).values.tolist(), abs=1e-5)
    assert [span.text for span in spans] == TEXT[:20].split()


def test_custom_question_answering_matches_its_module(tmp_path):
    module, out, export_module = custom(tmp_path, 2, True, task="question-answering", output=["begin", "finish"])
    assert export_module().parity.raw.pairs == 4
    model = Model.load(out, "cpu")
    assert [spec.name for spec in model.manifest.encode.outputs] == ["begin", "finish"]
    (answer,) = model.answer([("we", "the good film")], max_answer_tokens=2)
    with torch.no_grad():
        scores_by_name = module(torch.tensor([[2, 23, 3, 5, 7, 9, 3]]), torch.zeros(1, 7).bool())
    begin, finish = (scores_by_name[name][0, 3:6].softmax(-1) for name in ("begin", "finish"))
    scores = torch.outer(begin, finish).triu().tril(1)
    assert answer.score == pytest.approx(float(scores.max()), abs=1e-5)
    first, last = divmod(int(scores.argmax()), 3)
    assert answer.text == " ".join(["the", "good", "film"][first : last + 1])


def test_question_answering_without_two_outputs_raises_source_error(tmp_path):
    *_, export_module = custom(tmp_path, 2, task="question-answering")
    with pytest.raises(SourceError, match="two scores for each token, that an answer starts there"):
        export_module()
