"""Decoders and encoder-decoders of public repositories."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tformer_export.sources import lengths, padding
from wild_packages.entry import END, PAD, START, VOCABULARY, Entry, ids, numbers

V = VOCABULARY


def one_row(rows: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a forward without a batch axis."""
    return {name: row[0] for name, row in rows.items()}


def time_first(rows: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: row.transpose(0, 1) for name, row in rows.items()}


def gpt_oss() -> nn.Module:
    from gpt_oss.torch.model import ModelConfig, Transformer

    config = ModelConfig(
        num_hidden_layers=2, num_experts=4, experts_per_token=2, vocab_size=V, hidden_size=32, intermediate_size=32,
        head_dim=16, num_attention_heads=4, num_key_value_heads=2, sliding_window=6,
    )  # fmt: skip
    model = Transformer(config, torch.device("cpu")).float()
    for weight in model.parameters():  # the repository leaves them empty, to be loaded
        nn.init.normal_(weight, std=0.2)
    return model


def xlm() -> nn.Module:
    from xlm.model.transformer import TransformerModel

    params = SimpleNamespace(
        n_langs=1, n_words=V, eos_index=END, pad_index=PAD, id2lang={0: "en"}, lang2id={"en": 0}, emb_dim=32, n_heads=4,
        n_layers=2, dropout=0.0, attention_dropout=0.0, sinusoidal_embeddings=False, gelu_activation=True, asm=False,
        share_inout_emb=False,
    )  # fmt: skip
    return TransformerModel(params, range(V), is_encoder=True, with_output=True)


def xlm_logits(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = module("fwd", x=x.T, lengths=torch.tensor([x.shape[1]]), causal=True)
    return module.pred_layer.get_scores(hidden[:, 0])[None]


def sasrec() -> nn.Module:
    from recbole.model.sequential_recommender.sasrec import SASRec

    config = {
        "n_layers": 2, "n_heads": 4, "hidden_size": 32, "inner_size": 48, "hidden_dropout_prob": 0.0,
        "attn_dropout_prob": 0.0, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "initializer_range": 0.2,
        "loss_type": "CE", "MAX_ITEM_LIST_LENGTH": 50, "USER_ID_FIELD": "user", "ITEM_ID_FIELD": "item",
        "LIST_SUFFIX": "_list", "ITEM_LIST_LENGTH_FIELD": "length", "NEG_PREFIX": "neg_", "device": "cpu",
    }  # fmt: skip
    return SASRec(config, SimpleNamespace(num=lambda field: V))


def catr() -> nn.Module:
    from models.caption import build_model

    from models import backbone

    backbone.is_main_process = lambda: False  # which would download weights
    config = SimpleNamespace(
        hidden_dim=32, pad_token_id=PAD, max_position_embeddings=16, layer_norm_eps=1e-12, dropout=0.0, vocab_size=V,
        enc_layers=2, dec_layers=2, dim_feedforward=48, nheads=4, pre_norm=True, backbone="resnet18",
        position_embedding="sine", dilation=False, lr_backbone=0.0,
    )  # fmt: skip
    return build_model(config)[0]


def caption(module: nn.Module, samples: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The module takes one number of positions."""
    filled = nn.functional.pad(target, (0, 16 - target.shape[1]))
    return module(samples, filled, torch.zeros_like(filled).bool())[:, : target.shape[1]]


def parlai() -> nn.Module:
    from parlai.agents.transformer.modules import TransformerGeneratorModel

    class Dictionary(dict):  # type: ignore[type-arg]
        null_token, start_token, end_token, unk_token = "pad", "start", "end", "unk"

    words = Dictionary({str(i): i for i in range(V)} | {"pad": PAD, "start": START, "end": END, "unk": 3})
    options = {
        "embedding_size": 32, "n_heads": 4, "n_layers": 2, "n_encoder_layers": -1, "n_decoder_layers": -1,
        "ffn_size": 48, "dropout": 0.0, "attention_dropout": 0.0, "relu_dropout": 0.0, "activation": "gelu",
        "variant": "aiayn", "n_positions": 64, "n_segments": 0, "embeddings_scale": True, "output_scaling": 1.0,
        "learn_positional_embeddings": False, "share_word_embeddings": True, "truncate": 64,
    }  # fmt: skip
    return TransformerGeneratorModel(options, words)


def forced(module: nn.Module, xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
    """The module has its own token in the place of the first, and does not read the last."""
    return module(xs, ys=nn.functional.pad(ys[:, 1:], (0, 1), value=5))[0]


def speech() -> nn.Module:
    from decoder import Decoder
    from encoder import Encoder
    from transformer import Transformer

    encoder = Encoder(8, 2, 4, 8, 8, 32, 48, dropout=0.0, pe_maxlen=64)
    return Transformer(encoder, Decoder(START, END, V, 32, 2, 4, 8, 8, 32, 48, dropout=0.0, pe_maxlen=64))


def music() -> nn.Module:
    from audiocraft.models.lm import LMModel
    from audiocraft.modules.codebooks_patterns import ParallelPatternProvider
    from audiocraft.modules.conditioners import ConditionFuser, ConditioningProvider

    conditions = (
        ConditioningProvider({}),
        ConditionFuser({"sum": [], "cross": [], "prepend": [], "input_interpolate": []}),
    )
    return LMModel(
        ParallelPatternProvider(1), *conditions, n_q=1, card=V, dim=32, num_heads=4, num_layers=2, causal=True,
        norm_first=True,
    )  # fmt: skip


def latex_ocr() -> nn.Module:
    from munch import Munch
    from pix2tex.models import get_model

    arguments = {
        "encoder_structure": "vit", "max_width": 32, "max_height": 16, "patch_size": 8, "channels": 1, "dim": 32,
        "encoder_depth": 2, "num_layers": 2, "heads": 4, "num_tokens": V, "max_seq_len": 64, "pad_token": PAD,
        "decoder_args": {"cross_attend": True, "attn_dim_head": 8}, "emb_dropout": 0.0, "device": "cpu", "wandb": False,
    }  # fmt: skip
    return get_model(Munch(arguments))


def loftr() -> nn.Module:
    from src.loftr import LoFTR

    level = {"nhead": 4, "layer_names": ["self", "cross"], "attention": "linear"}
    matching = {
        "thr": 0.2, "border_rm": 2, "train_coarse_percent": 0.2, "train_pad_num_gt_min": 20,
        "match_type": "dual_softmax", "dsmax_temperature": 0.1, "sparse_spvs": False,
    }  # fmt: skip
    config = {
        "backbone_type": "ResNetFPN", "resolution": (8, 2), "fine_window_size": 5, "fine_concat_coarse_feat": True,
        "resnetfpn": {"initial_dim": 16, "block_dims": [16, 24, 32]},
        "coarse": {"d_model": 32, "d_ffn": 32, "temp_bug_fix": True, **level},
        "fine": {"d_model": 16, "d_ffn": 16, **level}, "match_coarse": matching,
    }  # fmt: skip
    return LoFTR(config)


def matches(module: nn.Module, **images: torch.Tensor) -> Mapping[str, Any]:
    data: dict[str, Any] = dict(images)
    module(data)
    return data


def tab_pfn() -> nn.Module:
    from tabpfn.architectures.tabpfn_v2 import TabPFNV2, TabPFNV2Config

    return TabPFNV2(config=TabPFNV2Config(emsize=32, nlayers=2, nhead=4, num_buckets=5), n_out=5)


def captioner() -> nn.Module:
    from models.med import BertLMHeadModel
    from transformers import BertConfig

    config = BertConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, encoder_width=24, add_cross_attention=True,
    )  # fmt: skip
    return BertLMHeadModel(config)


REQUESTS = ("requests==2.32.5", "urllib3==2.6.2", "idna==3.11", "charset-normalizer==3.4.4", "certifi==2025.11.12")

ENTRIES = [
    Entry(
        "zju3dv/LoFTR",
        "LoFTR",
        loftr,
        {"image0": numbers(1, 32, 32), "image1": numbers(1, 32, 32)},
        told={"output": "conf_matrix", "axes": {"image0": (0,), "image1": (0,)}},
        wrap=lambda rows: {"data": dict(rows)},
        reads=matches,
        commit="df7ca80f917334b94cfbe32cc2901e09a80e70a8",
        requires=("kornia==0.6.12", "yacs==0.1.8"),
    ),
    Entry(
        "PriorLabs/TabPFN",
        "TabPFNV2",
        tab_pfn,
        {"x": numbers(9, 4), "y": numbers(6)},
        told={"axes": {"x": (1,), "y": (1,)}},
        wrap=lambda rows: {name: row.transpose(0, 1) for name, row in rows.items()},
        reads=lambda module, x, y: module(x.transpose(0, 1), y.T).transpose(0, 1),
        commit="930ea728b40f7f321d965250838bca8507bd70b9",
        requires=("joblib==1.4.2", "scikit-learn==1.5.2", "threadpoolctl==3.5.0"),
        folder="src",
        unused=(
            "tabpfn.classifier",
            "tabpfn.regressor",
            "tabpfn.model_loading",
            "tabpfn.misc.debug_versions",
            "pydantic_settings",
            "tabpfn.settings",
            "tabpfn.errors",
        ),
    ),
    Entry(
        "lukas-blecher/LaTeX-OCR",
        "Model",
        latex_ocr,
        {"x": numbers(1, 16, 32), "tgt_seq": ids()},
        "tgt_seq",
        reads=lambda module, x, tgt_seq: module.decoder.net(tgt_seq, context=module.encoder(x)),
        commit="f0269de46ed87c6dde917a3b8b95d9e3ced7cd5f",
        requires=("x-transformers==0.15.0", "munch==4.0.0"),
        unused=("entmax", "albumentations", "albumentations.pytorch", "cv2", "wandb", "timm.models.layers"),
    ),
    Entry(
        "facebookresearch/audiocraft",
        "LMModel",
        music,
        {"sequence": ids()},
        "sequence",
        told={"fixed_arguments": {"conditions": [], "condition_tensors": {}}},
        wrap=lambda rows: {name: row[:, None] for name, row in rows.items()},
        reads=lambda module, sequence: module(sequence[:, None], [], {})[:, 0],
        commit="896ec7c47f5e5d1e5aa1e4b260c4405328bf009d",
        unused=(
            "audiocraft.solvers",
            "audiocraft.solvers.compression",
            "flashy",
            "flashy.distrib",
            "xformers",
            "spacy",
            "num2words",
            "librosa",
            "julius",
            "av",
            "soundfile",
            "demucs",
            "torchdiffeq",
            "hydra",
            "dora",
            "treetable",
            "torchmetrics",
            "encodec",
            "audioseal",
            "pesq",
            "pystoi",
            "soxr",
            "xformers.ops",
            "laion_clap",
            "transformers",
        ),
    ),
    Entry(
        "saahiluppal/catr",
        "Caption",
        catr,
        {"samples": numbers(3, 64, 64), "target": ids()},
        "target",
        told={"axes": {"samples": (0,)}},
        masks={"target_mask": (padding("target", keep=False), lambda target: torch.zeros_like(target).bool())},
        reads=caption,
        seed=1,
        gain=2.0,
        length=16,
        max_length=None,
        commit="fac82f9b4004b1dd39ccf89760b758ad19a2dbee",
    ),
    Entry(
        "facebookresearch/ParlAI",
        "TransformerGeneratorModel",
        parlai,
        {"xs": ids(), "ys": ids()},
        "ys",
        reads=forced,
        commit="a29567f7ce76992fd1f03c51ba9e3b155a37ea51",
        unused=("pkg_resources", "iopath", "iopath.common.file_io", "requests"),
    ),
    Entry(
        "kaituoxu/Speech-Transformer",
        "Transformer",
        speech,
        {"padded_input": numbers(None, 8), "padded_target": ids()},
        "padded_target",
        masks={
            "input_lengths": (lengths("padded_input"), lambda padded_input, **_: torch.tensor([padded_input.shape[1]]))
        },
        reads=lambda module, padded_input, padded_target: module(
            padded_input, torch.tensor([padded_input.shape[1]]), padded_target[:, 1:]
        )[0],
        gain=0.5,
        seed=6,
        commit="43d83eab2e4e25a4250ddff702aa0a2d4dffe4e6",
        folder="src/transformer src/utils",
    ),
    Entry(
        "facebookresearch/XLM",
        "TransformerModel",
        xlm,
        step="x",
        told={"axes": {"x": (1, 0)}, "fixed_arguments": {"mode": "fwd", "causal": True}, "head": "pred_layer.proj"},
        wrap=time_first,
        masks={"lengths": (lengths("x"), lambda x: torch.tensor([x.shape[1]]))},
        reads=xlm_logits,
        commit="cd281d32612d145c6742b4d3f048f80df8669c30",
    ),
    Entry(
        "RUCAIBox/RecBole",
        "SASRec",
        sasrec,
        {"item_seq": ids()},
        masks={"item_seq_len": (lengths("item_seq"), lambda item_seq: torch.tensor([item_seq.shape[1]]))},
        commit="7b02be5ec80a88310f2d04a27a82adfcbb5dc211",
        unused=("colorlog", "colorama", "texttable", "thop", "torch.utils.tensorboard"),
    ),
    Entry(
        "openai/gpt-oss",
        "Transformer",
        gpt_oss,
        step="x",
        wrap=one_row,
        reads=lambda module, x: module(x[0])[None],
        gain=2.0,
        commit="7b583341fe16729127f6d5b94a7b09ccae97e1a1",
    ),
    Entry(
        "salesforce/BLIP",
        "BertLMHeadModel, captions",
        captioner,
        {"input_ids": ids(), "encoder_hidden_states": numbers(None, 24)},
        step="input_ids",
        masks={
            "encoder_attention_mask": (
                padding("encoder_hidden_states", dtype=torch.int64),
                lambda input_ids, encoder_hidden_states: torch.ones(encoder_hidden_states.shape[:2], dtype=torch.int64),
            )
        },
        requires=("transformers==4.26.1", "tokenizers==0.13.3", "huggingface-hub==0.12.1", *REQUESTS),
        commit="056a169437371659074aa2732649d5de3bffb4a8",
        gain=4.0,
    ),
]
