"""Files and batches that the benchmark makes for other engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from versus import processes
from versus.client import OURS, PEERS, Peer, PeerError
from versus.engines import gguf_weights
from versus.engines.batched import in_batches, left_padded, right_padded
from versus.shapes import ROWS, texts_of

CONFIG = {
    "vocab_size": 10, "max_position_embeddings": 16, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 12,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
}  # fmt: skip


def test_gguf_keys_hold_the_sizes_of_the_model():
    keys = gguf_weights.metadata(CONFIG | {"rope_parameters": {"rope_theta": 5e5}})
    sizes = {key.removeprefix("llama."): value for key, value in keys.items()}
    assert sizes["attention.head_count"] == 2
    assert sizes["attention.head_count_kv"] == 1
    assert sizes["rope.dimension_count"] == 4
    assert sizes["rope.freq_base"] == 5e5
    assert gguf_weights.metadata(CONFIG)["llama.rope.freq_base"] == 1e4
    assert keys["tokenizer.ggml.model"] == "none"


def test_gguf_tensors_have_their_names_and_only_queries_and_keys_are_reordered():
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": np.zeros((10, 8)),
        f"{layer}self_attn.q_proj.weight": np.arange(64.0).reshape(8, 8),
        f"{layer}self_attn.k_proj.weight": np.arange(32.0).reshape(4, 8),
        f"{layer}self_attn.v_proj.weight": np.arange(32.0).reshape(4, 8),
        f"{layer}mlp.down_proj.weight": np.zeros((8, 12)),
        f"{layer}post_attention_layernorm.weight": np.ones(8),
    }
    made = dict(gguf_weights.tensors(CONFIG, weights))
    assert list(made) == [
        "token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight",
        "blk.0.ffn_down.weight", "blk.0.ffn_norm.weight",
    ]  # fmt: skip
    # The two halves of each head of four rows alternate.
    assert (made["blk.0.attn_q.weight"][:, 0] // 8).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert (made["blk.0.attn_k.weight"][:, 0] // 8).tolist() == [0, 2, 1, 3]
    assert (made["blk.0.attn_v.weight"] == weights[f"{layer}self_attn.v_proj.weight"]).all()


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_norm.weight", "model.vision.weight"])
def test_weight_without_a_place_in_gguf_is_an_error(name):
    with pytest.raises(ValueError, match=f"{name} has no place"):
        list(gguf_weights.tensors(CONFIG, {name: np.zeros(3)}))


def test_batches_have_similar_lengths_and_results_keep_the_order():
    batches = []

    def run(rows):
        batches.append([len(row) for row in rows])
        return [[row[0]] for row in rows]

    inputs = [[7] * 2, [8] * 5, [9] * 1, [6] * 4]
    assert in_batches(inputs, run, rows=2) == [[7], [8], [9], [6]]
    assert batches == [[5, 4], [2, 1]]


def test_padding_is_before_or_after_the_ids():
    ids, mask = left_padded([[5, 6, 7], [8]])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    ids, mask = right_padded([[5, 6, 7], [8, 9]])
    assert ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_texts_are_the_same_in_every_process_and_of_mixed_lengths():
    texts = texts_of(ROWS[0].shape)
    assert texts == texts_of(ROWS[0].shape)
    lengths = sorted(map(len, texts))
    assert (len(texts), lengths[0], lengths[-1]) == (1000, 4, 80)
    assert 15 <= lengths[500] <= 21


def test_results_of_a_file_are_counted(tmp_path):
    path = tmp_path / "results.txt"
    with pytest.raises(PeerError, match="0 results for 2 texts"):
        processes.check_results(path, 2, 3)
    path.write_text("4 5 6\n7 8 9\n")
    processes.check_results(path, 2, 3)
    with pytest.raises(PeerError, match=r"\[3\] tokens, not 4"):
        processes.check_results(path, 2, 4)


def test_commands_for_files_are_tformer_run_or_a_job_of_the_engine():
    model = {"shape": ROWS[0].shape.__dict__, "folder": "models", "precision": "int8"}
    texts, results = Path("texts.txt"), Path("results.txt")
    latency = next(peer for peer in PEERS if peer.name == "tformer, for latency")
    for peer, folder in ((OURS, "tformer-int8"), (latency, "tformer-int8-latency")):
        program, file, *options = processes.file_command(peer, model, 2, texts, results)
        assert Path(program).name == "tformer-run"
        assert Path(file) == Path("models", folder, "model.onnx")
        assert {"texts.txt", "results.txt", "--workers"} <= set(options)
    command = processes.file_command(Peer("fake", "fake_engine"), model, 2, texts, results)
    assert command[:4] == [sys.executable, "-m", "versus.file_job", "fake_engine"]
    assert json.loads(command[4]) == {**model, "threads": 2, "texts": "texts.txt", "results": "results.txt", "new": 16}


class FakeBench:
    """A bench of two rounds, whose engines need no files."""

    threads, repeats, timeout = 1, 2, 60.0

    def __init__(self, peers, missing=(), turns=100):
        self.peers, self.missing, self.turns_left, self.told = peers, missing, turns, []

    def model(self, shape, precision):
        return {}

    def once(self, peer, do, **arguments):
        if peer.name in self.missing:
            raise PeerError("not installed")

    def is_over(self):
        self.turns_left -= 1
        return self.turns_left < 0

    def tell(self, text):
        self.told.append(text)


def test_rounds_of_processes_compare_the_same_round_and_list_failures(monkeypatch):
    seconds = {"tformer": iter([99.0, 1.0, 2.0]), "other": iter([99.0, 3.0, 8.0])}
    monkeypatch.setattr(processes, "least_disturbed", lambda run: (0.0, run()))

    def run(peer):
        if peer.name == "weak":
            raise PeerError("it ended")
        return {"start": next(seconds[peer.name])}

    peers = [OURS, *(Peer(name, "fake_engine") for name in ("other", "weak", "absent"))]
    bench = FakeBench(peers, missing=("absent",))
    found = processes._measure(bench, ROWS[0], "int8", "start", peers, run, warm=True)
    by_peer = {record["peer"]: record for record in found}
    assert by_peer["other"]["ratio"] == {"start": 3.5}  # of 3 and 4; the first round does not count
    assert by_peer["weak"]["error"] == "it ended"
    assert "absent" not in by_peer  # reported where the engine was measured


def test_incomplete_round_of_processes_does_not_count(monkeypatch):
    monkeypatch.setattr(processes, "least_disturbed", lambda run: (0.0, run()))
    peers = [OURS, Peer("other", "fake_engine"), Peer("late", "fake_engine")]

    def records(peers, turns, seconds):
        bench = FakeBench(peers, turns=turns)
        turns_of = {name: iter(values) for name, values in seconds.items()}

        def run(peer):
            return {"file": next(turns_of[peer.name])}

        return {r["peer"]: r for r in processes._measure(bench, ROWS[0], "int8", "file", peers, run)}

    # One round, and tformer's turn of the second
    both = records(peers[:2], 3, {"tformer": [1.0, 2.0], "other": [3.0]})
    assert both["tformer"]["seconds"] == {"file": [1.0]}
    assert both["other"]["ratio"] == {"file": 3.0}
    assert records(peers, 2, {"tformer": [1.0], "other": [3.0]})["late"]["error"] == "no time was left"
