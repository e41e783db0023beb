"""Hugging Face folders as sources, against transformers: weights in every form, chat templates, refused folders."""

from __future__ import annotations

import json
import shutil

import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.command_lines import failed, run
from tokenizers import Tokenizer, models, pre_tokenizers

from tformer_export import export
from tformer_export.sources import load_source
from tformer_export.sources.chat_template import with_template
from tformer_runtime import Model, SourceError
from tformer_runtime.format.model_file import read_manifest

WORDS = {
    "source": ("the model reads a file", "a file is read by the model", "some models write files"),
    "target": ("le modèle lit un fichier", "un fichier est lu", "des modèles écrivent des fichiers"),
}


def make_translator(vocabulary, **options):
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=vocabulary, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=48, init_std=0.5,
        pad_token_id=vocabulary - 1, eos_token_id=0, decoder_start_token_id=vocabulary - 1, forced_eos_token_id=None,
        bos_token_id=None, **options,
    )  # fmt: skip
    return transformers.MarianMTModel(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A translation model with tied weights and two SentencePiece models."""
    path = tmp_path_factory.mktemp("folder")
    vocabulary = ["</s>", "<unk>"]
    for side, words in WORDS.items():
        (path / "words").write_text("\n".join(words * 20), encoding="utf-8")
        sentencepiece.SentencePieceTrainer.train(
            input=str(path / "words"),
            model_prefix=str(path / side),
            vocab_size=44,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (path / f"{side}.model").rename(path / f"{side}.spm")
        model = sentencepiece.SentencePieceProcessor(str(path / f"{side}.spm"))
        vocabulary += [model.id_to_piece(i) for i in range(3, model.get_piece_size())]
    vocabulary = list(dict.fromkeys([*vocabulary, "<pad>"]))
    (path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(vocabulary)}))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    module = make_translator(len(vocabulary))
    module.generation_config.num_beams = 2
    module.save_pretrained(path)
    return path


@pytest.fixture
def folder_copy(folder, tmp_path):
    """A copy of the folder, for changes."""
    return shutil.copytree(folder, tmp_path / "copy")


def assert_same_weights(source, folder):
    expected = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()
    actual = source.module.module.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:Recommended")
def test_file_of_a_folder_generates_from_text(folder, tmp_path):
    export(load_source(folder), tmp_path / "model.onnx", max_length=32)
    model = Model.load(tmp_path / "model.onnx", "cpu")
    assert model.manifest.generation_defaults["num_beams"] == 2
    assert model.manifest.tokenizer_of == {"input_ids": 0, "decoder_input_ids": 1}
    module = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("some files", "the model  reads a file", "the è file"):  # è is a piece of the target language only
        with torch.no_grad():
            model_inputs = tokenizer(text, return_tensors="pt")
            (ids,) = module.generate(**model_inputs, num_beams=1, do_sample=False, max_new_tokens=8).tolist()
        result = model.generate(text, num_beams=1, max_new_tokens=8)
        assert list(result.token_ids) == ids[1:]
        assert result.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_sharded_weights_are_loaded(folder, folder_copy):
    (folder_copy / "model.safetensors").unlink()
    make_translator(json.loads((folder / "config.json").read_text())["vocab_size"]).save_pretrained(
        folder_copy, max_shard_size="8KB"
    )
    assert len(list(folder_copy.glob("model-*.safetensors"))) > 2
    assert_same_weights(load_source(folder_copy, tokenizer=False), folder)
    sorted(folder_copy.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(SourceError, match=r"model-00002-of-\d+.safetensors"):
        load_source(folder_copy, tokenizer=False)


def test_weights_in_bin_are_loaded(folder, folder_copy):
    module = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    (folder_copy / "model.safetensors").unlink()
    torch.save(module.state_dict(), folder_copy / "pytorch_model.bin")
    assert_same_weights(load_source(folder_copy, tokenizer=False), folder)


def test_mismatched_weights_are_listed_together(folder_copy):
    weights = load_file(folder_copy / "model.safetensors")
    missing = sorted(name for name in weights if "fc1" in name)
    misshapen = next(name for name in weights if name.endswith("decoder.layers.0.fc2.weight"))
    for name in missing:
        del weights[name]
    weights |= {misshapen: torch.zeros(5, 5), "extra.weight": torch.zeros(3), "extra.bias": torch.zeros(3)}
    save_file(weights, folder_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError) as caught:
        load_source(folder_copy)
    assert (
        f"missing: {', '.join(missing)}; unexpected: extra.bias, extra.weight; misshapen: {misshapen} is (5, 5), "
        in (str(caught.value))
    )
    assert "MarianMTModel" in str(caught.value)


def test_tied_weight_is_not_missing(folder):
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    module = load_source(folder, tokenizer=False).module.module
    assert module.lm_head.weight is module.model.shared.weight


def change_config(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


def require_remote_code(folder):
    change_config(
        folder, model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModelForSeq2SeqLM": "mine.Model"}
    )
    (folder / "mine.py").write_text("raise AssertionError('this ran')")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
        (lambda f: (f / "config.json").unlink(), "is not a Hugging Face folder: it holds no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "transformers can load: "),
        (lambda f: change_config(f, model_type="mine"), "model type `mine`"),
        (require_remote_code, r"needs Python code that it brings along, which is not run: .* pass it to export\(\)"),
        (lambda f: (f / "vocab.json").unlink(), "tokenizer cannot be loaded"),
    ],
)
@pytest.mark.filterwarnings("ignore:Recommended")
def test_incomplete_folder_is_refused(damage, message, folder_copy):
    damage(folder_copy)
    with pytest.raises(SourceError, match=message) as caught:
        load_source(folder_copy)
    assert "\n" not in str(caught.value)


def test_missing_step_input_is_refused(folder):
    with pytest.raises(SourceError, match="stepped over 'decoder_input_ids', not 'tgt'"):
        load_source(folder, step_input="tgt", tokenizer=False)


CHAT_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def save_chat_model(folder):
    """Write a folder with a random language model, a tokenizer of words and a chat template. Return both objects."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.5,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).eval()
    module.save_pretrained(folder)
    names = [*CHAT_TOKENS.values(), *(f"w{i}" for i in range(3, 40))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **CHAT_TOKENS)
    tokenizer.chat_template = (
        "{{ bos_token }} {% for m in messages %}{{ m['content'] }} "
        "{{ eos_token if m['role'] == 'assistant' else 'w9' }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return module, tokenizer


def test_chat_matches_chat_template_of_transformers(tmp_path):
    module, tokenizer = save_chat_model(tmp_path / "chat")
    export(load_source(tmp_path / "chat"), tmp_path / "model.onnx", max_length=48)
    manifest = read_manifest(tmp_path / "model.onnx")
    assert manifest.chat_template == tokenizer.chat_template
    assert manifest.chat_tokens == CHAT_TOKENS
    (shutil.copytree(tmp_path / "chat", tmp_path / "mute") / "chat_template.jinja").unlink()
    without_template = load_source(tmp_path / "mute")
    assert (without_template.chat_template, without_template.chat_tokens) == (None, CHAT_TOKENS)
    assert with_template(without_template, tokenizer.chat_template).chat_template == tokenizer.chat_template
    model = Model.load(tmp_path / "model.onnx", "cpu")
    assert model.info()["chat_template"] == "yes"
    assert len(model.generate("w3 w4", max_new_tokens=3).token_ids) == 3
    chat, messages = model.chat("w7 w7"), [{"role": "system", "content": "w7 w7"}]
    for text in ("w3 w4 w5", "w30", "w11 w12"):
        messages.append({"role": "user", "content": text})
        model_inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        with torch.no_grad():
            ids = module.generate(**model_inputs, max_new_tokens=5, do_sample=False)[
                0, model_inputs["input_ids"].shape[1] :
            ].tolist()
        assert list(model.generate(model.prompt(messages), max_new_tokens=5).token_ids) == ids
        expected_text = tokenizer.decode(ids, skip_special_tokens=True)
        completed = run(tmp_path / "model.onnx", json.dumps(messages), "--chat", "--max-new-tokens", 5)
        assert completed.stdout == f"{expected_text}\n", completed.stderr
        if text == "w30":  # one turn is streamed
            assert "".join(chat.stream(text, max_new_tokens=5)) == expected_text
            result = chat.turns[-1].result
        else:
            result = chat.send(text, max_new_tokens=5)
        assert list(result.token_ids) == ids
        messages.append({"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)})
    single_turn = run(tmp_path / "model.onnx", "w3 w4 w5", "--chat", "--system", "w7 w7", "--max-new-tokens", 5)
    assert single_turn.stdout == f"{messages[2]['content']}\n"
    streamed = run(
        tmp_path / "model.onnx", "w3 w4 w5", "--chat", "--system", "w7 w7", "--max-new-tokens", 5, "--stream"
    )
    assert streamed.stdout == single_turn.stdout
    for invalid_messages in ('[{"role": "user"}]', "[]", "[3]"):
        error = failed(run(tmp_path / "model.onnx", invalid_messages, "--chat"))
        assert error.startswith('input 1: a conversation is a text, or a list of messages such as {"role": "user", ')
    for flags, message in ((["--system", "w7"], "--system needs --chat"), (["--chat", "--ids"], "not with --ids")):
        refused = run(tmp_path / "model.onnx", "3", *flags)
        assert (refused.exit_code, message in refused.stderr) == (2, True)
