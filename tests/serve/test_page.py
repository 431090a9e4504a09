"""The page in a real browser: an image with its previews, stopping, errors, the keyboard, a phone, and no other hosts."""

import shutil

import pytest

from support.fake_runner import FakeRunner, Server, model, video_model
from tritium.serve.settings import Settings

CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

KEY = "a-key-of-the-page"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        # Containers often run as root, where Chromium's sandbox does not start; the only page it opens is our own.
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def server():
    runner = FakeRunner(model(name="tiny"), model(name="other", takes=(), loras=(), steps=6), video_model(), step=0.02)
    with Server(runner, Settings(drain_seconds=0.2)) as running:
        yield running


@pytest.fixture
def opened(browser, server):
    """A page that has loaded its models; errors on it and requests to other hosts fail the test."""
    contexts, wrong = [], []

    def open_page(address=None, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(5000)
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        home = address or server.address
        tab.on("request", lambda sent: None if sent.url.startswith((home, "data:")) else wrong.append(sent.url))
        tab.goto(home)
        tab.wait_for_selector("#server.ready")
        return tab

    yield open_page
    server.go_on()
    for context in contexts:
        context.close()
    expected = "Failed to load resource: the server responded with a status of 4"
    assert [text for text in wrong if not text.startswith(expected)] == []


def generate(tab, prompt="a lighthouse"):
    tab.locator("#prompt").fill(prompt)
    tab.get_by_role("button", name="Generate").click()


def width_of_image(tab):
    return tab.locator("#image").evaluate("image => image.naturalWidth")


def test_an_image_with_its_time_against_eager(opened):
    tab = opened()
    tab.locator("#seed").fill("7")
    generate(tab)
    tab.wait_for_selector("#save:not([hidden])")
    assert width_of_image(tab) == 64
    assert tab.locator("#news").inner_text().startswith("Done in 0.")
    assert "seed 7 · 4 steps" in tab.locator("#facts").inner_text()
    assert tab.locator("#time-eager").inner_text() == "0.02 s"
    assert "eager" in tab.locator("#ratio").inner_text()
    assert tab.locator("#save").get_attribute("download") == "tritium-7.png"
    # At another number of steps there is no measured time to compare with.
    tab.locator("#steps").fill("6")
    generate(tab, "another")
    tab.wait_for_selector("#history li:nth-child(2)")
    assert tab.locator("#ratio").inner_text() == "Eager was measured at 64 × 64 with 4 steps: 0.02 s."
    assert tab.locator("#eager-row").is_hidden()


def test_previews_and_queue_while_it_runs(opened, server):
    tab = opened()
    tab.locator("#steps").fill("20")
    generate(tab)
    tab.wait_for_selector("#stage.preview")
    server.hold()
    assert width_of_image(tab) == 8
    assert tab.locator("#badge").inner_text().startswith("preview · step ")
    assert 0 < tab.locator("#progress").evaluate("bar => bar.value") < 1
    tab.get_by_text("1 running", exact=True).wait_for()
    assert tab.locator("#news").inner_text().startswith("Step ")
    assert tab.get_by_role("button", name="Generate").is_disabled()
    server.go_on()
    tab.wait_for_selector("#save:not([hidden])")
    assert width_of_image(tab) == 64


def test_the_keyboard_alone_is_enough(opened, server):
    tab = opened()
    assert tab.evaluate("document.activeElement.id") == "prompt"
    tab.keyboard.type("a boat")
    names = []
    for _ in range(5):
        tab.keyboard.press("Tab")
        names.append(tab.evaluate("document.activeElement.id"))
    # The button beside the seed is disabled until there is an image.
    assert names[:3] == ["size", "seed", "steps"]
    tab.keyboard.press("Control+Enter")
    tab.wait_for_selector("#save:not([hidden])")
    first = tab.locator("#facts").inner_text()
    tab.locator("#steps").fill("20")
    server.hold()
    tab.keyboard.press("Control+Enter")
    tab.wait_for_selector("#stop:not([hidden])")
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#stop", state="hidden")
    server.go_on()
    # The job is stopped on the server as well, and the image before it is shown again.
    for _ in range(100):
        if not server.engine.status().running:
            break
        tab.wait_for_timeout(20)
    assert server.engine.status().running == 0
    assert tab.locator("#facts").inner_text() == first
    tab.locator("#history button").focus()
    tab.keyboard.press("Enter")
    assert tab.locator("#history [aria-current=true]").count() == 1


def test_models_change_what_can_be_chosen(opened):
    tab = opened()
    assert tab.locator("#model option").all_inner_texts() == ["tiny", "other"]
    assert tab.locator("#size option").all_inner_texts() == ["64 × 64", "96 × 64"]
    tab.locator("summary").click()
    assert tab.locator("#lora option").all_inner_texts() == ["none", "ink", "pastel"]
    tab.locator("#model").select_option("other")
    assert tab.locator("#more").is_hidden()
    assert tab.locator("#steps").input_value() == "6"


def test_errors_are_shown_in_words(opened):
    tab = opened()
    tab.locator("#prompt").fill("a boat")
    tab.evaluate("document.getElementById('size').options[0].value = '640x480'")
    tab.get_by_role("button", name="Generate").click()
    tab.wait_for_selector("#problem:not([hidden])")
    assert "640x480 is not among the sizes" in tab.locator("#problem").inner_text()
    assert tab.locator("#image").is_hidden()


def test_a_server_with_keys_gets_one(opened):
    with Server(FakeRunner(model()), Settings(api_keys=(KEY,), drain_seconds=0.2)) as locked:
        tab = opened(locked.address)
        tab.wait_for_selector("#key-field:not([hidden])")
        assert tab.locator("#problem").inner_text() == "This server needs an API key."
        tab.locator("#key").fill(KEY)
        tab.locator("#key").press("Tab")
        tab.wait_for_selector("#size option", state="attached")
        generate(tab)
        tab.wait_for_selector("#save:not([hidden])")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(opened, scheme):
    tab = opened(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    generate(tab, "a very long prompt " * 20)
    tab.wait_for_selector("#save:not([hidden])")
    wide, shown = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert shown == 390
    assert wide <= shown


def test_text_is_legible(opened):
    """The contrast of text and its background is at least 4.5 in both schemes."""
    for scheme in ("light", "dark"):
        tab = opened(color_scheme=scheme)
        low = tab.evaluate(
            """() => {
                const parse = (color) => color.match(/[\\d.]+/g).map(Number);
                const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
                    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
                const behind = (node) => { for (; node; node = node.parentElement) {
                    const color = parse(getComputedStyle(node).backgroundColor); if (color.length < 4 || color[3] > 0) return color; }
                    return [255, 255, 255]; };
                return [...document.querySelectorAll("h1, label, p, small, kbd, button, span")].filter(node => node.offsetParent && !node.disabled && node.innerText)
                    .map(node => { const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
                        return [node.innerText, (Math.max(a, b) + .05) / (Math.min(a, b) + .05)]; })
                    .filter(([, ratio]) => ratio < 4.5);
            }"""
        )
        assert low == []
