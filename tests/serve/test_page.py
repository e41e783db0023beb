"""The page at / in a real browser. Nothing is loaded of other servers, and no error is in its console."""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from support.served_tasks import audio_file, png
from support.servers import HANG_SECONDS, RunningServer, StepGate

import tformer_serve

PAGE = Path(tformer_serve.__file__).parent / "page"
MAX_GZIP_BYTES = 20_000  # of all files of the page
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PALETTE = """() => [...Array(8).keys()].map(number => {
    const mark = document.createElement("mark");
    mark.className = `c${number}`;
    document.body.append(mark);
    return getComputedStyle(mark).backgroundColor;
})"""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """Return a function that opens the page of a server. Afterwards its console must have no errors."""
    pages, problems = [], []

    def open_(server, expects_errors=False, **settings):
        page = browser.new_page(**settings)
        page.set_default_timeout(HANG_SECONDS * 1000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" and not expects_errors else None)
        page.on("request", lambda request: problems.append(request.url) if not is_of(request.url, server) else None)
        page.goto(server.url)
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    assert problems == []


def is_of(url, server):
    return url.startswith(("blob:", "data:")) or urlsplit(url).netloc == urlsplit(server.url).netloc


def choose(page, name):
    page.get_by_role("navigation").get_by_role("button", name=name).first.click()
    page.get_by_role("heading", name=name, exact=True, level=2).wait_for()


def wait_until_done(page):
    """Wait for the status that screen readers say."""
    page.get_by_role("status").filter(has_text=re.compile(r"^Done in [\d.]+ m?s$")).wait_for()


def rows_of(page):
    """Return the rows of the first table of the result, as (name, number)."""
    page.locator(".result table tbody tr").first.wait_for()
    rows = page.locator(".result table").first.locator("tbody tr").all()
    return [(row.locator("th").inner_text(), float(row.locator("td.number").inner_text())) for row in rows]


def test_models_have_the_forms_of_their_tasks(task_server, open_page):
    page = open_page(task_server)
    names = page.get_by_role("navigation").get_by_role("button")
    names.first.wait_for()
    assert names.count() == len(task_server.models)
    fields = {
        "vector": "One text", "scores": "Text", "spans": "Text", "answers": "Context", "masks": "Text",
        "relevance": "Query", "images": "Image", "audio": "Recording", "series": "History", "letters": "Text",
    }  # fmt: skip
    for name, label in fields.items():
        choose(page, name)
        assert page.get_by_label(label, exact=True).first.is_visible()
    choose(page, "states")
    assert "no form here" in page.locator("main").inner_text() or page.get_by_text("no path").is_visible()


def test_chat_streams_and_keeps_the_conversation(files, references, open_page):
    with RunningServer({"chat": files["chat"]}) as server:
        page = open_page(server)
        model, messages = references["chat"], []
        page.get_by_label("Maximum tokens").first.fill("12")
        for text in ("the oil", "why"):
            messages.append({"role": "user", "content": text})
            expected = model.generate(model.prompt(messages), max_new_tokens=12).text
            messages.append({"role": "assistant", "content": expected})
            page.get_by_label("Message").fill(text)
            page.keyboard.press("Control+Enter")
            page.get_by_role("button", name="Send").and_(page.locator(":enabled")).wait_for()
        shown = page.locator(".message > span").all()
        assert [one.evaluate("node => node.textContent") for one in shown] == [one["content"] for one in messages]
        assert page.get_by_role("log", name="Conversation").is_visible()
        page.get_by_role("button", name="New conversation").click()
        assert page.locator(".message").count() == 0


def test_stopped_answer_is_not_part_of_the_conversation(files, references, open_page):
    with RunningServer({"chat": files["chat"]}) as server:
        page = open_page(server)
        page.get_by_label("Maximum tokens").first.fill("12")
        message = page.get_by_label("Message")
        message.fill("the oil")
        with StepGate.closed(server.models["chat"].model) as gate:
            page.keyboard.press("Control+Enter")
            gate.wait_until_reached()
            assert page.get_by_role("status").first.inner_text() == "Running …"
            page.get_by_role("button", name="Stop").first.click()
            page.get_by_role("status").filter(has_text="Stopped").wait_for()
            gate.open()
        assert message.input_value() == "the oil"  # it has no answer
        assert page.locator(".message:not(.dropped)").count() == 0
        message.fill("why")
        page.keyboard.press("Control+Enter")
        wait_until_done(page)
        model = references["chat"]
        expected = model.generate(model.prompt([{"role": "user", "content": "why"}]), max_new_tokens=12).text
        last = page.locator(".message.assistant > span").last
        assert last.evaluate("node => node.textContent") == expected


def test_another_model_ends_the_request(files, open_page):
    with RunningServer({name: files[name] for name in ("letters", "chat")}) as server:
        page = open_page(server)
        choose(page, "letters")
        page.get_by_label("Text").fill("hello")
        with StepGate.closed(server.models["letters"].model) as gate:
            page.get_by_role("button", name="Generate").click()
            gate.wait_until_reached()
            page.evaluate("location.hash = 'chat'")  # as a link does
            page.get_by_role("heading", name="chat", exact=True, level=2).wait_for()
            gate.open()
        server.wait_for("tformer_requests_total", 1, outcome="client_gone")


def test_text_is_completed(task_server, references, open_page):
    page = open_page(task_server)
    choose(page, "letters")
    page.get_by_label("Text").fill("hello")
    page.get_by_label("Maximum tokens").fill("9")
    page.get_by_role("button", name="Generate").click()
    wait_until_done(page)
    expected = references["letters"].generate("hello", max_new_tokens=9).text
    assert page.locator(".result .text").evaluate("node => node.textContent") == expected


def test_alignment_is_a_heat_map(files, references, open_page):
    with RunningServer({"pronounce": files["pronounce"]}) as server:
        page = open_page(server)
        page.get_by_label("Source").fill("hello")
        page.get_by_role("button", name="Align").click()
        table = page.get_by_role("region", name="Heat map")
        table.wait_for()
        expected = references["pronounce"].generate("hello", cross_attentions=True)
        source, tokens = references["pronounce"].labels("hello", expected)
        assert [head.inner_text() for head in table.locator("thead th").all()] == source
        assert [head.inner_text() for head in table.locator("tbody th").all()] == tokens
        shown = [[float(box.get_attribute("fill-opacity")) for box in row.locator("rect").all()]
                 for row in table.locator("tbody tr").all()]  # fmt: skip
        np.testing.assert_allclose(shown, expected.cross_attentions, atol=1e-4)


def test_spans_are_coloured_in_their_text(task_server, task_models, open_page):
    page = open_page(task_server)
    choose(page, "spans")
    text = "🎬 the old film a day <b>"
    page.get_by_label("Text").fill(text)
    page.get_by_role("button", name="Label").click()
    rows = rows_of(page)
    spans = task_models["spans"].entities([text])[0]
    assert rows == [(f"{span.label}: {span.text}", pytest.approx(span.score, abs=1e-4)) for span in spans]
    marks = page.locator("mark").all()
    assert [mark.evaluate("node => node.firstChild.data") for mark in marks] == [span.text for span in spans]
    colours = {mark.evaluate("node => getComputedStyle(node).backgroundColor") for mark in marks}
    assert len(colours) == len({span.label for span in spans}) > 1


def test_answer_is_marked_and_masks_are_filled(task_server, task_models, open_page):
    page = open_page(task_server)
    choose(page, "answers")
    page.get_by_label("Question").fill("a good")
    page.get_by_label("Context").fill("the old day film")
    page.get_by_label("Question").press("Enter")
    page.locator("mark").wait_for()
    (best,) = task_models["answers"].answer([("a good", "the old day film")])
    assert page.locator("mark").evaluate("node => node.firstChild.data") == best.text
    choose(page, "masks")
    page.get_by_label("Text").fill("a good ")
    page.get_by_role("button", name="Insert old").click()
    page.get_by_role("button", name="Fill in").click()
    expected = task_models["masks"].fill(["a good old"], top_k=8)[0][0]
    assert [name for name, _ in rows_of(page)] == [candidate.token for candidate in expected]


def test_image_is_shown_with_its_labels(task_server, open_page):
    page = open_page(task_server)
    choose(page, "images")
    file = {"name": "leaf.png", "mimeType": "image/png", "buffer": png(10, 200, 30)}
    page.get_by_label("Image").set_input_files(file)
    page.get_by_role("button", name="Classify").click()
    assert rows_of(page)[0][0] == "green"
    image = page.get_by_role("img", name="The image leaf.png")
    assert image.evaluate("async node => { await node.decode(); return node.naturalWidth; }") == 9


def test_recording_is_played_at_the_times_of_its_parts(task_server, task_models, open_page):
    page = open_page(task_server)
    choose(page, "audio")
    page.get_by_label("Recording").set_input_files(
        {"name": "a.wav", "mimeType": "audio/wav", "buffer": audio_file(9.0)}
    )
    page.get_by_role("button", name="Transcribe").click()
    parts = page.get_by_role("list", name="Parts with their times").get_by_role("button")
    parts.nth(1).wait_for()
    words = task_models["audio"].transcribe(audio_file(9.0), timestamps=True).segments
    assert [part.evaluate("node => node.lastChild.data") for part in parts.all()] == [word.text for word in words]
    assert page.locator("p.text").inner_text().split() == task_models["audio"].transcribe(audio_file(9.0)).text.split()
    begin = float(re.match(r"\d+\.\d+", parts.nth(1).inner_text())[0])
    parts.nth(1).click()
    assert page.locator("audio").evaluate("node => node.currentTime") >= begin > 0


def test_forecast_is_plotted_over_its_history(task_server, task_models, open_page):
    page = open_page(task_server)
    choose(page, "series")
    page.get_by_role("textbox", name="History").fill("1, 2\n2 3\n3;4.5")
    page.get_by_label("Steps").fill("2")
    page.get_by_role("button", name="Forecast", exact=True).click()
    plot = page.get_by_role("img", name=re.compile("^high: 3 steps of history, then a forecast of 2 steps"))
    plot.wait_for()
    assert page.locator("svg.plot path.forecast[d*=L]").count() >= 2
    page.get_by_text("The forecast as a table").click()
    shown = [[float(cell.inner_text()) for cell in row.locator("td").all()] for row in page.locator("tbody tr").all()]
    expected = task_models["series"].forecast([[1, 2], [2, 3], [3, 4.5]], 2)
    np.testing.assert_allclose(shown, expected, rtol=1e-4)
    page.get_by_role("textbox", name="History").fill("1, 2\n2 x")
    page.get_by_role("button", name="Forecast", exact=True).click()
    page.get_by_text("row 2 is 2 x: it needs 2 numbers").wait_for()


def test_error_of_the_server_is_shown(task_server, open_page):
    page = open_page(task_server, expects_errors=True)  # the browser writes the status 400 to its console
    choose(page, "scores")
    page.get_by_label("Text").fill("good " * 30)
    page.get_by_role("button", name="Classify").click()
    assert "the input is 32 tokens long" in page.get_by_role("alert").locator("p").inner_text()


def test_key_is_asked_for(files, open_page):
    with RunningServer({"letters": files["letters"]}, api_keys=("secret",)) as server:
        page = open_page(server, expects_errors=True)
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        page.get_by_label("Text").wait_for()
        assert page.get_by_label("API key").is_hidden()


def contrast(one, other):
    """Return the ratio of two colours as WCAG defines it."""

    def light(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    return max(light(one), light(other)) / min(light(one), light(other))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read_and_the_keyboard_suffices(task_server, open_page, scheme):
    page = open_page(task_server, color_scheme=scheme)
    choose(page, "scores")
    style = "(selector, name) => getComputedStyle(document.querySelector(selector))[name]"

    def colours(selector, back):
        names = (selector, "color"), (back, "backgroundColor")
        return [page.evaluate(f"([selector, name]) => ({style})(selector, name)", list(pair)) for pair in names]

    border = page.evaluate(f"({style})('textarea', 'borderTopColor')")
    assert contrast(border, colours("main", "main")[1]) >= 3
    for selector, back in (
        ("main h2", "main"),
        ("form button", "form button"),
        ("nav small", "body"),
        ("textarea", "textarea"),
    ):
        assert contrast(*colours(selector, back)) >= 4.5, selector
    assert (contrast(colours("body", "body")[1], "rgb(255, 255, 255)") < 1.1) == (scheme == "light")
    palette = page.evaluate(PALETTE)
    for back in palette:
        assert contrast(colours("body", "body")[0], back) >= 4.5, back
    page.locator("main").focus()
    page.keyboard.press("Tab")
    page.keyboard.type("a good film")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert rows_of(page)


def test_narrow_page_has_its_models_in_a_row(task_server, open_page):
    page = open_page(task_server, viewport={"width": 360, "height": 640})
    choose(page, "scores")
    names = page.get_by_role("navigation").get_by_role("button")
    first, second = (names.nth(i).bounding_box() for i in range(2))
    assert first["y"] == second["y"]
    assert first["x"] + first["width"] <= second["x"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 360  # the row of names scrolls, the page does not


def test_labels_of_a_plot_are_legible_in_a_narrow_page(task_server, open_page):
    page = open_page(task_server, viewport={"width": 360, "height": 640})
    choose(page, "series")
    page.get_by_role("textbox", name="History").fill("1 2\n2 3\n3 4.5")
    page.get_by_role("button", name="Forecast", exact=True).click()
    labels = page.locator("svg.plot text")
    labels.first.wait_for()
    assert min(label.bounding_box()["height"] for label in labels.all()) > 9
    boxes = [label.bounding_box() for label in labels.all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 360 for box in boxes)


def test_files_of_the_page_are_small_and_in_the_wheel():
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(PAGE.parents[2]))
    shipped = {Path(one.path) for one in builder.recurse_included_files()}
    pages = [path for path in PAGE.rglob("*") if path.is_file()]
    assert {"index.html", "style.css", "icon.svg", "runForm.js"} <= {path.name for path in pages}
    assert set(pages) <= shipped
    assert sum(len(gzip.compress(path.read_bytes())) for path in pages) <= MAX_GZIP_BYTES


def test_page_may_load_nothing_of_others(task_server):
    with task_server.http() as client:
        for path in ("/", "/page/main.js", "/page/components/style.css", "/page/components/elements.js"):
            answer = client.get(path)
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
        outside = ("/page/..%2Fapp.py", "/page/components/../../app.py", "/page/components/..%2F..%2Fapp.py")
        for path in ("/page/", "/page/ruff.toml", "/page/components", "/page/components/none.js", *outside):
            assert client.get(path).status_code == 404
        assert "<script>" not in client.get("/").text
        assert " style=" not in client.get("/").text
