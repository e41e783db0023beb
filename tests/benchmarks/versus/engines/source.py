"""The weights of the models and their results in fp32. All engines' files are made from and compared with them.

`source/` then holds `model.pt` (an encoder-decoder of tformer_models), `hf/` (a transformers model with the same
weights, and a tokenizer whose tokens are the ids in decimal), and `reference.json`: the inputs of the quality case and
the source's results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from versus.client import ROOT
from versus.engines import HUGGING_FACE, SOURCE, build_once
from versus.shapes import END, PAD, ROWS, START, Case, Shape, inputs_of


def prepare(folder: Path, shape: Shape, precision: str) -> int:
    def make(path: Path) -> None:
        torch.manual_seed(0)
        with torch.inference_mode():
            MAKERS[shape.kind](path, shape)

    return build_once(folder / SOURCE, make)


def encoder_decoder(folder: Path, shape: Shape) -> Any:
    """Return the module that `prepare` has written."""
    from tformer_models.seq2seq import Seq2SeqTransformer

    saved = torch.load(folder / "model.pt", weights_only=True)
    module = Seq2SeqTransformer(**saved["arguments"]).eval()
    module.load_state_dict(saved["weights"])
    if shape.trained is None:
        _share(module)
    for side, positions in saved["positions"].items():
        getattr(module, side).positions = positions  # no part of the state
    return module


def _encoder_decoder(folder: Path, shape: Shape) -> None:
    if shape.trained:
        from tformer_export.common.checkpoint import load_checkpoint

        checkpoint = load_checkpoint(ROOT / shape.trained)
        module, arguments = checkpoint.build(), dict(checkpoint.arguments)
    else:
        module, arguments = _random_encoder_decoder(shape)
        _marian(module, shape).save_pretrained(folder / HUGGING_FACE)
        _tokenizer(folder / HUGGING_FACE, shape.vocabulary)
    positions = {side: getattr(module, side).positions for side in ("source", "target")}
    torch.save({"arguments": arguments, "weights": module.state_dict(), "positions": positions}, folder / "model.pt")
    inputs = _reference_inputs(shape)
    source, new = torch.tensor(inputs), _quality(shape).new
    mask = module.source_mask(source)
    memory, tokens = module.encode(source, mask), torch.full((len(inputs), 1), START)
    for _ in range(new):
        logits = module.decode(tokens, memory, mask)[:, -1]
        logits[:, [PAD, END]] = -torch.inf
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    _write(folder, inputs, tokens[:, 1:].tolist())


def _random_encoder_decoder(shape: Shape) -> tuple[Any, dict[str, Any]]:
    """Return a model with one table of tokens, whose greedy output neither repeats itself nor ends, as if trained.

    The last norm has gains of random signs, so that a token is not its own most likely successor through the shared
    table. Attention changes slowly over positions, and so does the next token.
    """
    from tformer_models.seq2seq import Seq2SeqTransformer

    arguments: dict[str, Any] = {
        "source_vocabulary": shape.vocabulary, "target_vocabulary": shape.vocabulary, "width": shape.width,
        "heads": shape.heads, "encoder_layers": shape.layers, "decoder_layers": shape.layers,
        "feedforward": shape.feedforward, "dropout": 0.0, "max_length": shape.max_length,
    }  # fmt: skip
    module = Seq2SeqTransformer(**arguments).eval()
    _share(module)
    for layer in module.decoder:
        for attention in (layer.self_attention, layer.cross_attention):
            attention.output.weight *= 0.2
    last = module.decoder[-1].residuals[-1].norm
    last.weight *= torch.randint(0, 2, last.weight.shape) * 2 - 1
    module.output.bias.zero_()
    module.output.bias[: END + 1] = -100
    return module, arguments


def _share(module: Any) -> None:
    module.source.tokens.weight = module.target.tokens.weight


def _marian(module: Any, shape: Shape) -> Any:
    """Return transformers' Marian with the same weights; the module takes over its order of sines and cosines."""
    import transformers

    config = transformers.MarianConfig(
        vocab_size=shape.vocabulary, d_model=shape.width, encoder_layers=shape.layers, decoder_layers=shape.layers,
        encoder_attention_heads=shape.heads, decoder_attention_heads=shape.heads, encoder_ffn_dim=shape.feedforward,
        decoder_ffn_dim=shape.feedforward, activation_function="relu", scale_embedding=True, pad_token_id=PAD,
        eos_token_id=END, forced_eos_token_id=None, decoder_start_token_id=START, bos_token_id=START,
        max_position_embeddings=shape.max_length, dropout=0.0,
    )  # fmt: skip
    model = transformers.MarianMTModel(config).eval()
    state = {"model.shared.weight": module.target.tokens.weight, "lm_head.weight": module.target.tokens.weight}
    state["final_logits_bias"] = module.output.bias[None]
    for side, layers in (("encoder", module.encoder), ("decoder", module.decoder)):
        state[f"model.{side}.embed_tokens.weight"] = module.target.tokens.weight
        positions = getattr(model.model, side).embed_positions.weight.detach().clone()
        state[f"model.{side}.embed_positions.weight"] = positions
        (module.source if side == "encoder" else module.target).positions = positions
        for i, layer in enumerate(layers):
            at = f"model.{side}.layers.{i}"
            attentions = {"self_attn": layer.self_attention}
            if side == "decoder":
                attentions["encoder_attn"] = layer.cross_attention
            parts = dict(zip((f"{name}_layer_norm" for name in attentions), layer.residuals, strict=False))
            linears = {f"{n}.{p}_proj": getattr(a, q) for n, a in attentions.items() for p, q in PROJECTIONS.items()}
            linears |= {name: residual.norm for name, residual in parts.items()}
            linears |= {"fc1": layer.feedforward.expand, "fc2": layer.feedforward.contract}
            linears["final_layer_norm"] = layer.residuals[-1].norm
            for name, linear in linears.items():
                state[f"{at}.{name}.weight"], state[f"{at}.{name}.bias"] = linear.weight, linear.bias
    model.load_state_dict(state)
    return _greedy(model)


PROJECTIONS = {"q": "query", "k": "key", "v": "value", "out": "output"}


def _decoder(folder: Path, shape: Shape) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.feedforward,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.shared or shape.heads, max_position_embeddings=shape.max_length,
        pad_token_id=PAD, bos_token_id=START, eos_token_id=END, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.model.embed_tokens.weight.normal_(0, 0.3)  # the next token depends on this token and on earlier ones
    model.lm_head.weight *= 5  # a perplexity of tens, not of thousands; the most likely token stays the same
    _greedy(model).save_pretrained(folder / HUGGING_FACE)
    _tokenizer(folder / HUGGING_FACE, shape.vocabulary)
    inputs, new = _reference_inputs(shape), _quality(shape).new
    generated = model.generate(
        torch.tensor(inputs), attention_mask=torch.ones(len(inputs), len(inputs[0]), dtype=torch.long),
        do_sample=False, min_new_tokens=new, max_new_tokens=new,
    )  # fmt: skip
    scores = model(generated).logits.float().log_softmax(-1)
    scores = scores[:, :-1].gather(-1, generated[:, 1:, None])[..., 0][:, -new:]
    _write(folder, inputs, generated[:, len(inputs[0]) :].tolist(), scores.flatten().tolist())


def _encoder(folder: Path, shape: Shape) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, intermediate_size=shape.feedforward, hidden_act="gelu",
        max_position_embeddings=shape.max_length, pad_token_id=PAD,
        position_embedding_type="absolute",  # the only one that still exists; CTranslate2's converter reads it
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    for layer in model.encoder.layer:
        for linear in (layer.attention.output.dense, layer.output.dense):
            linear.weight *= 3  # as in a trained model, layers contribute as much as embeddings
    model.save_pretrained(folder / HUGGING_FACE)
    _tokenizer(folder / HUGGING_FACE, shape.vocabulary)
    inputs = _reference_inputs(shape)
    ids = torch.tensor(inputs)
    vectors = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1)
    _write(folder, inputs, vectors.tolist())


MAKERS = {"translate": _encoder_decoder, "continue": _decoder, "embed": _encoder}


def _greedy(model: Any) -> Any:
    """Set greedy decoding: one beam and no banned words, which generate() would take from the defaults of the class."""
    import transformers

    model.generation_config = transformers.GenerationConfig(
        pad_token_id=PAD, bos_token_id=START, eos_token_id=END, decoder_start_token_id=START
    )
    return model


def _tokenizer(folder: Path, vocabulary: int) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<s>", "</s>", *map(str, range(3, vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    ).save_pretrained(folder)


def _quality(shape: Shape) -> Case:
    return next(row.quality for row in ROWS if row.shape == shape)


def _reference_inputs(shape: Shape) -> list[list[int]]:
    return inputs_of(shape, _quality(shape), seed=1)


def _write(folder: Path, inputs: list[list[int]], result: list[Any], scores: list[float] | None = None) -> None:
    reference = {"inputs": inputs, "result": result, "scores": scores}
    (folder / "reference.json").write_text(json.dumps(reference))
