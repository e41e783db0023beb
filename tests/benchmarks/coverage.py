"""Coverage of transformers' text architectures: every causal and every encoder-decoder class, with proof.

    python tests/benchmarks/coverage.py [NAME …] [--jobs 2] [--out coverage.json]

For each class a small seeded model with random weights is made from its own configuration, exported in float32 through
the parity gate, and decoded greedily. The tokens must equal those of the source's own `generate()`. Each class runs in
a process with limits on time and memory. A class counts if it runs on random ids, looks only back and keeps state in
attention only. Others are listed with the reason and do not count. One class takes about 15 s of one core.
"""

from __future__ import annotations

import collections
import json
import multiprocessing
import os
import resource
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import click

LIMIT = 300  # seconds for one class
MEMORY = 8 << 30  # bytes of address space beyond the parent's, for one class
VOCABULARY = 60
PROMPTS = ([11, 12, 13], [21, 22, 23, 24, 25, 26, 27])
NEW_TOKENS = 8
EXPORTED, REFUSED, FAILED, NOT_COUNTED = "exported", "refused", "failed", "not counted"

# configuration field → small value, set where a configuration has the field; heads of 16, the least of fused operators
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "dim", "emb_dim", "dim_model"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 48),
    **dict.fromkeys(("dff", "dim_ff", "ffn_hidden_size", "mlp_hidden_size", "d_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "zero_expert_num": 2,
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_encoder_position_embeddings"), 96
    ),
    **dict.fromkeys(("max_decoder_position_embeddings", "max_source_positions", "max_target_positions"), 96),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size"), 4),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(("forced_eos_token_id",), None),
    **dict.fromkeys(("decoder_start_token_id",), 3),
    **dict.fromkeys(("is_decoder",), True),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace",), 1),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), 1),
}

MLA = {"num_key_value_heads": 4}  # where keys are made from one latent vector, there is one head of them for each query
_BERT = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT |= {"intermediate_size": 48, "vocab_size": VOCABULARY, "max_position_embeddings": 96}
PARTICULAR: dict[str, dict[str, Any]] = {  # configuration → fields that must agree with each other, or have other names
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), MLA
    ),
    **dict.fromkeys(("longcat_flash", "minicpm3", "youtu"), MLA),
    "bart": {"forced_eos_token_id": None},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            k: {"rope_type": "default", "rope_theta": 10000.0} for k in ("sliding_attention", "full_attention")
        },
    },
    "cpmant": {"dim_head": 8, "prompt_length": 4, "prompt_types": 4, "segment_types": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    },
    "dots3_note_text": MLA,
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8},
    "encoder-decoder": {
        "encoder": _BERT,
        "decoder": _BERT | {"is_decoder": True, "add_cross_attention": True},
        "pad_token_id": 0,
        "decoder_start_token_id": 3,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 96},
    "openai-gpt": {"afn": "gelu"},
    "reformer": {
        "attention_head_size": 8,
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "is_decoder": True,
    },
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 32},
    "roc_bert": {
        "pronunciation_vocab_size": 20,
        "shape_vocab_size": 20,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "t5": {"decoder_start_token_id": 3},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "xlstm": {"hidden_size": 32, "num_heads": 4, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
# Further rows: name → (the class, fields). Forms of position and attention that no default has.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {}
for _kind, _more in {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 24},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 24},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 96,
    },
}.items():
    _rope = {"rope_type": _kind, "rope_theta": 10000.0, **_more}
    FORMS[f"LlamaForCausalLM, rotary {_kind}"] = "LlamaForCausalLM", {"rope_parameters": _rope}
FORMS["FalconForCausalLM, ALiBi"] = "FalconForCausalLM", {"alibi": True, "new_decoder_architecture": False}
FORMS["LlamaForCausalLM, head size 6"] = "LlamaForCausalLM", {"head_dim": 6}
FORMS["GPTBigCodeForCausalLM, multi-head"] = "GPTBigCodeForCausalLM", {"multi_query": False}
FORMS["BertLMHeadModel, relative keys"] = "BertLMHeadModel", {"position_embedding_type": "relative_key_query"}


NOT_TEXT = {"vision_config", "audio_config", "audio_encoder", "audio_encoder_config", "vq_config"}
NOT_TEXT |= {"audio_tower_config", "encoder_config", "acoustic_tokenizer_encoder_config"}


class NotCounted(Exception):  # noqa: N818 – it is an answer
    """The reason why a class does not count."""


def classes() -> dict[str, str]:
    """Return class → name of its configuration, of all causal and encoder-decoder language models."""
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    both = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return {kind: config for names in (causal, both) for config, kind in names.items()}


def fields_for(config: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a small configuration from a default one: SMALL where it has them, and `more`."""
    known, renamed = config.to_dict(), getattr(config, "attribute_map", {})
    small = {renamed.get(name, name): value for name, value in SMALL.items()}
    return {name: value for name, value in small.items() if name in known} | more


def build(name: str) -> Any:
    """Return a small seeded model of a class in eval mode, with no two equal weights."""
    import torch
    import transformers

    kind, more = FORMS.get(name, (name, {}))
    model_class = getattr(transformers, kind)
    make = model_class.config_class
    more = PARTICULAR.get(make.model_type, {}) | more
    if set(make.sub_configs) & NOT_TEXT:
        raise NotCounted("not a text architecture")
    composed = {part: more[part] for part in ("encoder", "decoder") if part in more}
    default = make(**composed) if transformers.AutoConfig in make.sub_configs.values() else make()
    parts = {
        part: fields_for(form(), {}) | more.pop(part, {})
        for part, form in make.sub_configs.items()
        if hasattr(form, "model_type") and form is not transformers.AutoConfig and part in default.to_dict()
    }
    torch.manual_seed(0)
    model = model_class(make(**fields_for(default, more), **parts)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # most untrained models repeat one token for ever
                weight.copy_(torch.randn_like(weight) * 0.3)
            elif weight.is_floating_point():  # norms and biases away from values that would hide a mistake
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


def judge(name: str) -> dict[str, Any]:
    """Return the outcome of one class with its reason, or the figures of the export."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        model = build(name)
        reason = why_not_counted(model)
    except NotCounted as error:
        reason = str(error)
    except Exception as error:  # transformers raises many types for a configuration that does not fit
        reason = f"cannot run: {_line(error)}"
    if reason:
        return {"outcome": NOT_COUNTED, "reason": reason}
    return prove(model)


def why_not_counted(model: Any) -> str:
    """Return why a model cannot be decoded with a key-value cache alone; empty if it can."""
    import torch
    from transformers import cache_utils

    if getattr(model, "_is_stateful", False) or "linear_attention" in (
        getattr(model.config, "layer_types", None) or ()
    ):
        return "keeps state that is not attention"
    ids = torch.tensor([PROMPTS[1]])
    both = model.config.is_encoder_decoder
    with torch.no_grad():
        given = {"input_ids": ids} | ({"decoder_input_ids": ids} if both else {})
        output = model(**given, use_cache=True)
        shorter = {**given, ("decoder_input_ids" if both else "input_ids"): ids[:, :4]}
        again = model(**shorter, use_cache=False).logits
    past = getattr(output, "past_key_values", None)
    linear = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
    if any(isinstance(layer, linear) for layer in getattr(past, "layers", ())):
        return "keeps state that is not attention"
    if not torch.allclose(output.logits[:, :4], again, rtol=1e-3, atol=1e-3 * float(again.abs().max())):
        return "a token's logits depend on later tokens"
    return ""


def prove(model: Any) -> dict[str, Any]:
    """Export through the gate, then decode in both ways."""
    import torch

    from tformer_export import export
    from tformer_runtime import GenerationOptions, Model
    from tformer_runtime.base.errors import TformerError

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            report = export(model, path)
        except TformerError as error:
            return {"outcome": REFUSED, "reason": str(error)}
        options, exported = GenerationOptions(max_new_tokens=NEW_TOKENS), Model.load(path, "cpu")
        results = [r.token_ids for r in exported.generate_batch([list(p) for p in PROMPTS], options)]
        excluded = list(exported.manifest.generation_defaults.get("suppress_tokens", ()))  # such as padding
    note = ""
    for prompt, tokens in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS
            )[0].tolist()
        expected = expected[1:] if model.config.is_encoder_decoder else expected[len(prompt) :]
        if list(tokens) != expected:
            forward = greedy(model, ids, len(tokens), excluded)
            if forward != list(tokens):
                return {"outcome": FAILED, "reason": f"decodes {list(tokens)}, generate() gives {expected}"}
            note = "tokens are those of forward(), which generate() contradicts"
    figures = {"error": report.parity.relative_error, "counts": report.counts, **({"note": note} if note else {})}
    return {"outcome": EXPORTED, "seconds": round(time.perf_counter() - begin, 1), **figures}


def greedy(model: Any, ids: Any, max_tokens: int, excluded: list[int]) -> list[int]:
    """Generate greedily by forward() on the whole sequence, without a cache and without the excluded ids."""
    import torch

    both = model.config.is_encoder_decoder
    tokens = torch.tensor([[model.generation_config.decoder_start_token_id]]) if both else ids
    begin = tokens.shape[1]
    with torch.no_grad():
        for _ in range(max_tokens):
            inputs = {"input_ids": ids, "decoder_input_ids": tokens} if both else {"input_ids": tokens}
            logits = model(**inputs, use_cache=False).logits[:, -1:]
            logits[..., excluded] = -torch.inf
            best = logits.argmax(-1)
            tokens = torch.cat([tokens, best], 1)
    generated: list[int] = tokens[0, begin:].tolist()
    return generated


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _work(name: str, core: int, answer: Connection) -> None:
    os.sched_setaffinity(0, {core})  # several threads on a shared core wait for each other
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    warnings.simplefilter("ignore")
    try:
        result = judge(name)
    except Exception as error:  # a defect: a refusal is a TformerError
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        result = {"outcome": FAILED, "reason": f"{type(error).__name__} at {where}: {_line(error)}"}
    answer.send(result)


def run_all(names: list[str], jobs: int) -> dict[str, dict[str, Any]]:
    """Run each class in a process of its own, forked after all imports, `jobs` at a time with one core each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "tformer_export", "tformer_runtime.model"])
    results: dict[str, dict[str, Any]] = {}
    waiting, running = list(reversed(names)), {}
    free = sorted(os.sched_getaffinity(0))[-jobs:]
    while waiting or running:
        while waiting and free:
            receive, send = context.Pipe(duplex=False)
            core = free.pop()
            process = context.Process(target=_work, args=(waiting[-1], core, send))
            process.start()
            send.close()
            running[receive] = waiting.pop(), process, core, time.monotonic() + LIMIT
        soonest = min(deadline for *_, deadline in running.values())
        ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
        for receive, (name, process, core, deadline) in list(running.items()):
            if receive in ready:
                try:
                    results[name] = receive.recv()
                except EOFError:
                    process.join()
                    results[name] = {"outcome": FAILED, "reason": f"the process ended with {process.exitcode}"}
            elif time.monotonic() > deadline:
                results[name] = {"outcome": FAILED, "reason": f"more than {LIMIT} s"}
            else:
                continue
            process.kill()
            del running[receive]
            free.append(core)
            said = results[name]
            details = said.get("reason") or f"{said['seconds']} {said.get('note', '')}"
            print(f"{said['outcome']:12} {name:44} {details}", flush=True)
    return results


@click.command()
@click.argument("names", nargs=-1)
@click.option("--jobs", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the table here, as JSON.")
def main(names: tuple[str, ...], jobs: int, out: Path | None) -> None:
    """Print the outcome of each class (by default all) and the totals."""
    import transformers

    every = [*dict.fromkeys(classes()), *FORMS]
    results = run_all(list(names) or every, jobs)
    for title, chosen in (("classes", classes()), ("forms", FORMS)):
        counts = collections.Counter(r["outcome"] for n, r in results.items() if n in chosen)
        counted = sum(counts.values()) - counts[NOT_COUNTED]
        if counted:
            share = counts[EXPORTED] / counted
            print(f"{title}: {counts[EXPORTED]} of {counted} exported ({share:.1%}), {counts[NOT_COUNTED]} not counted")
    if out is not None:
        out.write_text(json.dumps({"transformers": transformers.__version__, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
