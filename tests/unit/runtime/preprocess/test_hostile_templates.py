"""Chat templates that run for ever, fill the memory or call out: one sentence, and the next template works."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading

import pytest

from tformer_runtime import InputError, MissingExtraError
from tformer_runtime.preprocess import chat_template
from tformer_runtime.preprocess.chat_template import compile_template, unknown_tokens

MESSAGES = [{"role": "user", "content": "cat"}]
GOOD = "{{ messages[0].content }}!"
NESTED = "".join(f"{{% for i{n} in range(99999) %}}" for n in range(4)) + "x" + "{% endfor %}" * 4
DOUBLED = (
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
)
HOSTILE = {
    "nested loops": NESTED,
    "doubled text": DOUBLED,
    "lipsum": "{% for i in range(9999) %}{{ lipsum(n=99999) }}{% endfor %}",
    "wordwrap": "{{ ('a ' * 50000000) | wordwrap(1) }}",
    "center": "{{ 'a' | center(9999999999) }}",
    "format": "{{ '%099999999999d' | format(1) }}",
    "lists": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "endless recursion in a loop": "{% macro m() %}{% for i in range(9) %}{{ m() }}{% endfor %}{% endmacro %}{{ m() }}",
    "deep expression": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "calls out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "imports": "{{ cycler.__init__.__globals__.os.system('true') }}",
}


@pytest.fixture(autouse=True)
def short_time(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_TEMPLATE_SECONDS", 0.5)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name):
    with pytest.raises(InputError, match=r"the chat template cannot be (read|filled in): .") as caught:
        compile_template(HOSTILE[name], {})(MESSAGES)
    assert len(str(caught.value).splitlines()) == 1
    assert compile_template(GOOD, {})(MESSAGES) == "cat!"


def test_threads_get_their_own_replies():
    fill_in = compile_template("{{ messages[0].content * 2 }}", {})
    replies = {}

    def ask(number):
        replies[number] = [fill_in([{"role": "user", "content": f"<{number}.{i}>"}]) for i in range(20)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {number: [f"<{number}.{i}>" * 2 for i in range(20)] for number in range(8)}


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_forked_process_has_its_own_worker():
    fill_in = compile_template(GOOD, {})
    assert fill_in(MESSAGES) == "cat!"
    with multiprocessing.get_context("fork").Pool(2) as pool:
        texts = pool.map(_fill_in, [str(i) for i in range(20)])
    assert texts == [f"{i}!" for i in range(20)]
    assert fill_in(MESSAGES) == "cat!"


def _fill_in(content):
    return compile_template(GOOD, {})([{"role": "user", "content": content}])


def test_killed_worker_is_replaced():
    fill_in = compile_template(GOOD, {})
    process = chat_template._worker._process
    os.kill(process.pid, signal.SIGKILL)  # the worker may end before the next request or during it
    assert fill_in(MESSAGES) == "cat!"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of processor time")
def test_template_that_takes_too_long_is_told_so():
    with pytest.raises(InputError, match=r"filled in: its process took too much processor time$"):
        compile_template(NESTED, {})(MESSAGES)


def test_messages_are_json_values():
    show = compile_template("{{ messages[0] | tojson }}", {})
    assert show([{"role": "user", "content": ("é", 1.5, None, True), 3: {"a": [1]}}]) == (
        '{"role": "user", "content": ["é", 1.5, null, true], "3": {"a": [1]}}'
    )
    with pytest.raises(InputError, match="a message holds a value of type set"):
        show([{"role": "user", "content": "", "tools": {1}}])
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InputError, match="nested too deeply"):
        show([{"role": "user", "content": "", "tools": deep}])


def test_tokens_without_a_text_are_named():
    assert unknown_tokens("{{ bos_token }}{{ eos_token }}{{ messages }}", {"bos_token": "<s>"}) == ["eos_token"]


def test_program_without_an_interpreter_needs_a_name(monkeypatch, tmp_path):
    monkeypatch.setattr(chat_template, "_worker", type(chat_template._worker)(chat_template._worker._program, 60))
    python = sys.executable
    monkeypatch.setattr(sys, "executable", str(tmp_path / "app"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(MissingExtraError, match="TFORMER_PYTHON"):
        compile_template(GOOD, {})
    monkeypatch.setenv("TFORMER_PYTHON", python)
    assert compile_template(GOOD, {})(MESSAGES) == "cat!"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_fork_while_a_thread_waits_for_a_reply(monkeypatch):
    """The lock of the other thread is of no concern to the forked process."""
    monkeypatch.setattr(chat_template, "MAX_TEMPLATE_SECONDS", 2)
    started = threading.Event()

    def ask():
        started.set()
        with pytest.raises(InputError):
            compile_template(NESTED, {})(MESSAGES)

    thread = threading.Thread(target=ask)
    thread.start()
    started.wait()
    while not chat_template._worker._lock.locked():
        pass
    child = os.fork()
    if not child:
        os._exit(compile_template(GOOD, {})(MESSAGES) != "cat!")
    _, status = os.waitpid(child, 0)
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ strftime_now('%f') | length }}", "6"),
        ("{{ [1, 2] | tojson(true, 2) }}", "[\n  1,\n  2\n]"),
        ("{% set y = 1 %}{% generation %}{% set y = 5 %}a{% endgeneration %}{{ y }}", "a1"),
    ],
)
def test_functions_are_those_of_transformers(template, expected):
    from transformers.utils.chat_template_utils import _compile_jinja_template

    assert compile_template(template, {})(MESSAGES) == expected
    assert _compile_jinja_template(template).render(messages=MESSAGES) == expected
