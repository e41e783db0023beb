"""`tformer-run --ray`: each row of the input has its result once, in its row, whatever dies on the way."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
from support.command_lines import PROGRAM, failed, run, start_process, usage_error
from support.ray_clusters import add_machine

pytest.importorskip("ray", reason="Ray is not installed: pip install 'tformer[ray]'")
import pyarrow as pa
import pyarrow.parquet as parquet

import tformer_runtime.cli.tables as tables_module
import tformer_runtime.distributed.job as job_module
from tformer_runtime import UnsupportedCallError
from tformer_runtime.distributed.cluster import Workers
from tformer_runtime.distributed.job import PartWorker

TEXTS = ["".join(random.Random(i).choices("abcxyz", k=1 + i % 11)) for i in range(120)]
SHORT = ["--max-new-tokens", "4"]
SAMPLED = [*SHORT, "--temperature", "1.3", "--seed", "3"]
THOROUGH = pytest.mark.thorough


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_texts(folder, texts=TEXTS):
    (folder / "in.txt").write_text("".join(f"{text}\n" for text in texts))


def results_of(folder):
    """Return the rows of the files of JSON in a folder, in the order of their names."""
    paths = sorted(folder.glob("part-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def reference(file, texts, *flags):
    """Return the fields of each text that a run without Ray writes."""
    result = run(file, "--json", "--device", "cpu", *flags, stdin="".join(f"{text}\n" for text in texts))
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def run_job(file, *arguments):
    return run(file, "--ray", "--output-file", "out", *arguments)


def done(result):
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    return result.stderr


def assert_complete(folder, file, *flags, texts=TEXTS):
    """Assert that a folder has the result of each text once, in the order of the texts, and nothing else."""
    rows = results_of(folder)
    assert [row["input"] for row in rows] == texts
    expected = reference(file, texts, *flags)
    assert [row["token_ids"] for row in rows] == [fields["token_ids"] for fields in expected]
    assert json.loads((folder / "_tformer.json").read_text())["finished"] is True
    assert all(name.startswith("part-") or name == "_tformer.json" for name in os.listdir(folder))


@pytest.mark.parametrize("flags", [pytest.param(SHORT, marks=THOROUGH), SAMPLED], ids=["greedy", "sampled"])
def test_texts(here, files, cluster, flags):
    """A seed gives a row the same sample as in a run without Ray."""
    write_texts(here)
    assert done(run_job(files["letters"], "--input-file", "in.txt", "--part-rows", "50", *flags)) == ""
    assert_complete(here / "out", files["letters"], *flags)
    assert len(list((here / "out").glob("part-*"))) == 3


def test_parquet_of_several_files(here, files, cluster):
    texts = ["good day", "bad", "the old film", "old night"] * 10
    for number in range(2):
        half = texts[number * 20 :][:20]
        table = pa.table({"id": list(range(number * 20, number * 20 + 20)), "text": half})
        parquet.write_table(table, here / f"in-{number}.parquet", row_group_size=7)
    flags = ["--input-column", "text", "--output-column", "label=mood", "--output-column", "score"]
    assert done(run_job(files["scores"], "--input-file", "*.parquet", "--part-rows", "8", *flags)) == ""
    table = parquet.read_table(here / "out")  # leaves out the journal, as other readers do
    assert table.column_names == ["id", "text", "mood", "score"]
    rows = sorted(table.to_pylist(), key=lambda row: row["id"])
    expected = reference(files["scores"], texts)
    assert [(r["id"], r["text"], r["mood"]) for r in rows] == [
        (i, text, fields["label"]) for i, (text, fields) in enumerate(zip(texts, expected, strict=True))
    ]


def test_csv_of_pairs_with_rows_that_fail(here, files, cluster):
    rows = [["good day", "bad film"], ["old", "night"], ["a"], ["good " * 20, "bad"], ["the, day", 'a "film"']]
    with open("in.csv", "w", newline="") as file:
        csv.writer(file).writerows([["one", "two"], *rows])
    flags = ["--input-column", "one", "--input-column", "two", "--output-column", "label", "--on-error", "keep"]
    message = done(run_job(files["scores"], "--input-file", "in.csv", *flags))
    assert message == "2 of 5 rows failed: the column error tells why\n"
    with open("out/part-00000-000000.csv", newline="") as file:
        found = list(csv.DictReader(file))
    good = [0, 1, 4]
    expected = reference(files["scores"], ["\t".join(rows[i]) for i in good])
    assert [found[i]["label"] for i in good] == [fields["label"] for fields in expected]
    assert [i for i, row in enumerate(found) if not row["error"]] == good
    assert found[2]["error"] == "it has 1 values, and the header has 2 names"
    assert [found[3]["label"], found[3]["two"]] == ["", "bad"]


def test_json_lines_of_ids(here, files, cluster):
    rows = [{"ids": [4, 5, 6], "more": {"a": 1}}, {"ids": [7]}]
    (here / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done(run_job(files["letters"], "--input-file", "in.jsonl", "--input-column", "ids", *SHORT))
    found = results_of(here / "out")
    assert [{name: row[name] for name in old} for row, old in zip(found, rows, strict=True)] == rows
    expected = reference(files["letters"], ["4 5 6", "7"], "--ids", *SHORT)
    assert [row["token_ids"] for row in found] == [fields["token_ids"] for fields in expected]


def test_row_that_fails_ends_the_job_which_is_resumed(here, files, cluster):
    write_texts(here, [*TEXTS[:70], "a!b", *TEXTS[71:]])
    arguments = ["--input-file", "in.txt", "--part-rows", "20", "--workers", "1", *SHORT]
    assert failed(run_job(files["letters"], *arguments)).startswith(f"{here}/in.txt, line 71: ")
    before = {path.name: path.stat().st_mtime_ns for path in (here / "out").glob("part-*")}
    assert sorted(before) == [f"part-00000-{i:06d}.jsonl" for i in range(3)]
    assert "give --resume to continue, or --force" in failed(run_job(files["letters"], *arguments))
    changed = failed(run_job(files["letters"], *arguments, "--resume", "--max-new-tokens", "5"))
    assert changed.startswith("--max-new-tokens is 5, but was 4 in the run that wrote")
    kept = [*arguments, "--resume", "--on-error", "keep"]
    assert '--on-error is "keep", but was "fail"' in failed(run_job(files["letters"], *kept))
    write_texts(here)  # the input is mended
    assert "in.txt has changed since the run" in failed(run_job(files["letters"], *arguments, "--resume"))
    done(run_job(files["letters"], *arguments, "--force"))
    assert_complete(here / "out", files["letters"], *SHORT)
    assert "there is nothing to resume" in failed(run_job(files["letters"], *arguments, "--resume"))


def test_folder_with_files_of_others_is_left(here, files, cluster):
    write_texts(here)
    (here / "out").mkdir()
    (here / "out" / "thesis.jsonl").write_text("all\n")
    for flags in ([], ["--force"], ["--resume"]):
        message = failed(run_job(files["letters"], "--input-file", "in.txt", *flags))
        assert message == "out has other files, such as thesis.jsonl: give the name of a new folder"
    assert (here / "out" / "thesis.jsonl").read_text() == "all\n"
    (here / "file").write_text("")
    result = run(files["letters"], "--ray", "--input-file", "in.txt", "--output-file", "file")
    assert failed(result) == "file is a file: give the name of a folder to --output-file"


class _Kills(tables_module._Messages):
    """Does something when the first part is finished, while other parts are computed. warnings: about workers."""

    kill = None
    warnings: ClassVar[list[str]] = []

    def advanced(self, rows):
        if _Kills.kill is not None:
            kill, _Kills.kill = _Kills.kill, None
            kill()

    def warned(self, sentence):
        _Kills.warnings.append(sentence)


@pytest.fixture
def killing(monkeypatch):
    """Return a function that takes what happens when the first part of the job is finished."""
    monkeypatch.setattr(tables_module, "_Messages", _Kills)
    monkeypatch.setattr(_Kills, "warnings", [])
    monkeypatch.setattr(_Kills, "kill", None)

    def at_first_part(kill):
        _Kills.kill = kill

    return at_first_part


class _Mortal(PartWorker):
    """Kills its process once, at a moment of its third part. The job has no other worker at that time."""

    moment = ""

    def run(self, task):
        mark = Path(self._job.output_folder).parent / "killed"
        dies = task.name == "part-00000-000002.jsonl" and not mark.exists()
        if dies:
            mark.touch()
            if self.moment == "half":
                (Path(self._job.output_folder) / ".tformer-half").write_text("half of the results")
        if not dies or self.moment == "after":
            failed = super().run(task)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return failed


@pytest.mark.parametrize(
    "moment", [pytest.param("before", marks=THOROUGH), pytest.param("half", marks=THOROUGH), "after"]
)
def test_killed_worker_is_replaced(here, files, cluster, killing, monkeypatch, moment):
    """A worker dies before it has written a part, while it writes, and after it has written and not yet told so."""
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # which workers cannot import
    monkeypatch.setattr(job_module, "PartWorker", type("_Mortal", (_Mortal,), {"moment": moment}))
    write_texts(here)
    done(run_job(files["letters"], "--input-file", "in.txt", "--part-rows", "12", *SHORT))
    assert _Kills.warnings == ["a worker died while it computed part-00000-000002.jsonl; another one takes its place"]
    assert_complete(here / "out", files["letters"], *SHORT)


def test_lost_machine_is_done_without(here, files, cluster, killing):
    """A machine of the cluster ends at once, with its workers. Those of the other machine compute the rest."""
    machine = add_machine(cluster)
    write_texts(here)
    killing(lambda: cluster.remove_node(machine, allow_graceful=False))
    done(run_job(files["letters"], "--input-file", "in.txt", "--part-rows", "4", "--workers", "3", *SHORT))
    assert_complete(here / "out", files["letters"], *SHORT)


def test_killed_job_is_resumed(here, files, cluster):
    """The process of the command is killed twice. Finished parts are kept, and the rest is computed."""
    write_texts(here)
    arguments = ["--ray", "--input-file", "in.txt", "--output-file", "out", "--part-rows", "3", *SHORT]
    kept: dict[str, int] = {}
    for resume in ([], ["--resume"]):
        command = start_process(*PROGRAM, files["letters"], *arguments, *resume)
        before = len(kept)
        while len(kept) < before + 2:
            assert command.poll() is None, command.communicate()
            kept = {path.name: path.stat().st_ino for path in here.glob("out/part-*")}
            time.sleep(0.002)
        command.kill()
        command.communicate()
        assert command.returncode == -signal.SIGKILL
    (here / "out" / ".tformer-half").write_text("what a killed worker leaves")
    message = done(run(files["letters"], *arguments, "--resume"))
    assert message.startswith("resume: ")
    assert int(message.split()[1]) >= 3 * len(kept)
    assert_complete(here / "out", files["letters"], *SHORT)


def test_second_job_of_a_folder_is_refused(here, files, cluster, killing):
    write_texts(here)
    messages = []
    killing(lambda: messages.append(failed(run_job(files["letters"], "--input-file", "in.txt", "--force"))))
    done(run_job(files["letters"], "--input-file", "in.txt", "--part-rows", "20", *SHORT))
    assert messages == ["another run is writing out"]
    assert_complete(here / "out", files["letters"], *SHORT)


class _Task:
    def __init__(self, name):
        self.name = name


class _Actor:
    """Dies with each task of a name."""

    def load(self):
        pass

    def run(self, task):
        if task.name == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        return task.name.upper()


def test_task_that_kills_its_workers_ends_the_job(cluster):
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # which workers cannot import
    warnings: list[str] = []
    actor = ray.remote(num_cpus=1)(_Actor)
    names = ["a", "poison", "b", "c"]
    found = []
    with Workers(ray, actor.remote, 1, warnings.append) as workers, pytest.raises(UnsupportedCallError) as caught:
        found += [result for _, result in workers.results([_Task(name) for name in names])]
    assert str(caught.value).startswith("3 workers died while they computed poison (")
    assert len(warnings) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray", "abc"], "--ray reads files and writes a folder: give --input-file and --output-file, no INPUT"),
        (["--ray", "--input-file", "-", "--output-file", "o"], "--ray reads files and writes a folder"),
        (["--ray", "--input-file", "x.txt", "--output-file", "o", "--json"], "not with --json"),
        (["abc", "--on-error", "keep"], "--on-error is for columns of files: give --ray too"),
        (["abc", "--input-column", "a"], "--input-column is for columns of files: give --ray too"),
    ],
)
def test_options_that_do_not_go_together(files, arguments, message):
    assert message in usage_error(run(files["letters"], *arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input-file", "none.txt"], "none.txt: there is no such file"),
        (
            ["--input-file", "in.xml"],
            "in.xml has the ending .xml: rows are read of .parquet, .jsonl, .ndjson, .csv",
        ),
        (["--input-file", "two.csv"], "two.csv has the columns a, b: name the one of the inputs with --input-column"),
        (["--input-file", "two.csv", "--input-column", "c"], "the rows have no column 'c': they have a, b"),
        (["--input-file", "in.txt", "--output-column", "label"], "the results have no column 'label': they have text"),
        (["--input-file", "in.txt", "--output-column", "text=input"], "the rows have a column 'input' already"),
        (["--input-file", "in.txt", "--image", "x.png"], "--image, --timing, --stream and --cross-attentions are not"),
        (["--input-file", "in.txt", "--threads", "64"], "no machine of the cluster has 64 CPUs for a worker"),
        (["--input-file", "in.txt", "--top-k", "x"], "--top-k"),
    ],
)
def test_wrong_jobs(here, files, cluster, arguments, message):
    write_texts(here)
    (here / "in.xml").write_text("<a/>")
    (here / "two.csv").write_text("a,b\nx,y\n")
    assert message in failed(run_job(files["letters"], *arguments))


def test_without_ray_the_extra_is_named(here, files, monkeypatch):
    write_texts(here)
    monkeypatch.setitem(sys.modules, "ray", None)
    message = failed(run_job(files["letters"], "--input-file", "in.txt"))
    assert message == "--ray needs Ray: pip install 'tformer[ray]'"
