"""The playground's page in headless Chromium: `make test-browser`, which fails where Chromium is missing."""

import os
import re
import shutil
import time

import pytest

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="needs the test extra")
from playground_cases import command_running, serving

expect = sync_api.expect
SECONDS = 1000  # Playwright counts in milliseconds


@pytest.fixture(scope="module")
def address():
    with command_running() as (_, (host, port)):
        yield f"http://{host}:{port}/"


@pytest.fixture(scope="module")
def chromium():
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "Chromium is missing: apt-get install chromium, or set CHROMIUM to its path"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page that fails its test if anything goes wrong in it, or if it asks another server for something."""
    context = chromium.new_context(viewport={"width": 1360, "height": 940})
    page = context.new_page()
    page.set_default_timeout(30 * SECONDS)
    expect.set_options(timeout=30 * SECONDS)
    troubles, asked = [], set()
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: message.type == "error" and troubles.append(message.text))
    page.on("request", lambda request: asked.add(request.url.split("/")[2].split(":")[0]))
    yield page
    context.close()
    assert troubles == []
    assert asked <= {"127.0.0.1"}


def finished(page):
    expect(page.locator("#state")).to_contain_text("Finished", timeout=300 * SECONDS)  # 4 on two free cores


def accuracies(page):
    return [float(page.locator(f"#clean-{side}").inner_text().split()[0]) for side in (0, 1)]


def link(page):
    return dict(part.split("=") for part in page.url.split("#")[1].split("&"))


def points_become(page, count):
    """Wait until the link has that many points."""
    page.wait_for_url(lambda url: len(url.split("&points=")[1]) == 4 * count)


def choose(page, name, value):
    """Click the label, which people see and which does not move any more; the button in it may have no size."""
    button = page.locator(f"input[name={name}][value='{value}']")
    page.locator("label").filter(has=button).click()
    expect(button).to_be_checked()


def set_slider(page, name, value):
    """Move a slider as a user's pointer does: to a place on its track."""
    slider = page.locator(f"#{name}")
    slider.scroll_into_view_if_needed()
    low, high = (float(slider.get_attribute(end)) for end in ("min", "max"))
    box = slider.bounding_box()
    thumb = 16  # its middle stays half a thumb away from the ends
    x = box["x"] + thumb / 2 + (value - low) / (high - low) * (box["width"] - thumb)
    page.mouse.click(x, box["y"] + box["height"] / 2)


def place(page, x, y, picture="#picture-1"):
    """Where a point of the plane is on the screen."""
    box = page.locator(picture).bounding_box()
    return box["x"] + (x / 1.25 + 1) / 2 * box["width"], box["y"] + (1 - y / 1.25) / 2 * box["height"]


@pytest.mark.parametrize(("noise", "level"), [("random", "0.3"), ("large-margin", "0.15")])
def test_the_presets_show_the_effect_live(page, address, noise, level):
    """Pushed steps are counted in the page, from the first to the last."""
    page.goto(f"{address}#noise={noise}&level={level}")
    expect(page.locator("#state")).to_contain_text("step")
    started = time.monotonic()
    seen = set()
    while "Finished" not in (text := page.locator("#state").inner_text()):
        seen.add(text)
        assert time.monotonic() - started < 300  # it does not end; 4 on two free cores
    logistic, ours = accuracies(page)
    print(f"{noise}: {len(seen)} states seen in {time.monotonic() - started:.1f} s, {logistic} and {ours} % right")
    assert len(seen) > 20
    assert ours > 94
    assert logistic < 93


def test_moving_both_sliders_changes_the_loss_and_the_nets(page, address):
    page.goto(f"{address}#noise=large-margin&level=0.15")
    finished(page)
    logistic, ours = accuracies(page)
    assert ours > logistic + 3
    set_slider(page, "t2", 1)
    expect(page.locator("#t2-out")).to_have_text("1.0")
    set_slider(page, "t1", 1)
    expect(page.locator("#t1-out")).to_have_text("1.00")
    expect(page.locator("#t1-says")).to_contain_text("can cost any amount")
    expect(page.locator("#pair-now")).to_have_text("t1 = 1, t2 = 1")
    finished(page)
    logistic, ours = accuracies(page)
    assert ours == logistic  # at t1 = t2 = 1 there is one loss
    assert {name: link(page)[name] for name in ("t1", "t2")} == {"t1": "1", "t2": "1"}


def test_t1_never_exceeds_t2(page, address):
    page.goto(f"{address}#t1=0.9&t2=1")
    set_slider(page, "t2", 0.5)
    expect(page.locator("#pair-now")).to_have_text("t1 = 0.5, t2 = 0.5")
    set_slider(page, "t1", 1)
    expect(page.locator("#pair-now")).to_have_text("t1 = 1, t2 = 1")
    expect(page.locator("#message")).to_be_hidden()


def test_changing_the_noise_changes_the_accuracy(page, address):
    page.goto(f"{address}#noise=random&level=0.3")
    finished(page)
    noisy, _ = accuracies(page)
    page.locator("input[name=noise][value=none]").check()
    expect(page.locator("#state")).to_contain_text("Training")
    finished(page)
    clean, _ = accuracies(page)
    assert clean > 98 > noisy
    expect(page.locator("#wrong-legend")).to_be_hidden()


def test_own_points_are_added_dragged_and_removed(page, address):
    page.goto(f"{address}#noise=none")
    page.locator("input[name=data][value=own]").check()
    expect(page.locator("#truth-legend")).to_be_hidden()  # they have no true boundary
    page.locator("#clear").click()
    expect(page.locator("#message")).to_contain_text("at least two classes")
    page.mouse.click(*place(page, -0.5, 0))
    choose(page, "paint", "1")
    page.mouse.click(*place(page, 0.5, 0))
    finished(page)
    assert accuracies(page) == [100, 100]
    before = link(page)["points"]
    assert len(before) == 2 * 4
    page.mouse.move(*place(page, 0.5, 0))
    page.mouse.down()
    page.mouse.move(*place(page, 0.2, 0.8), steps=8)
    page.mouse.up()
    expect(page.locator("#state")).to_contain_text("Training")
    after = link(page)["points"]
    assert after[:4] == before[:4]
    assert after[4:] != before[4:]
    page.mouse.click(*place(page, 0.9, -0.9))
    points_become(page, 3)
    page.mouse.click(*place(page, 0.9, -0.9), button="right")
    points_become(page, 2)
    assert link(page)["points"] == after
    choose(page, "paint", "none")
    page.mouse.click(*place(page, 0.9, -0.9))  # there is none any more
    page.mouse.click(*place(page, 0.2, 0.8))
    points_become(page, 1)


def test_own_points_by_finger(chromium, address):
    context = chromium.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(f"{address}#noise=none")
    expect(page.locator("#state")).to_contain_text("step")
    choose(page, "data", "own")
    points_become(page, 60)
    page.locator("#picture-1").scroll_into_view_if_needed()
    before = page.locator("#nets").bounding_box()
    page.touchscreen.tap(*place(page, 1.1, 1.1))
    points_become(page, 61)
    expect(page.locator("#probe-0")).to_contain_text("1.1")
    assert page.locator("#nets").bounding_box()["height"] == before["height"]  # nothing below moves under a finger
    choose(page, "paint", "none")
    page.locator("#picture-1").scroll_into_view_if_needed()
    page.touchscreen.tap(*place(page, 1.1, 1.1))
    points_become(page, 60)
    context.close()


def test_a_share_link_restores_everything(page, address, chromium):
    page.goto(address)
    page.locator("input[name=data][value=spirals]").check()
    page.locator("input[name=data][value=own]").check()
    page.locator("input[name=noise][value=small-margin]").check()
    set_slider(page, "level", 10)
    set_slider(page, "t1", 0.5)
    set_slider(page, "t2", 2)
    page.locator("#schedule").check()
    page.locator("#marks").uncheck()
    page.locator("#seed").fill("7")
    page.locator("#seed").press("Enter")
    page.mouse.click(*place(page, 1.1, 1.1))
    finished(page)
    found, chosen = accuracies(page), link(page)
    assert len(chosen.pop("points")) == 61 * 4
    assert 0.08 < float(chosen.pop("level")) < 0.12
    assert chosen == {
        "data": "own", "noise": "small-margin", "t1": "0.5", "t2": "2", "schedule": "1", "seed": "7", "marks": "0"
    }  # fmt: skip
    shared = page.url
    other = chromium.new_context().new_page()
    other.goto(shared)
    finished(other)
    assert accuracies(other) == found
    assert other.url == shared
    expect(other.locator("#schedule")).to_be_checked()
    expect(other.locator("#marks")).not_to_be_checked()
    expect(other.locator("#seed")).to_have_value("7")
    other.reload()
    finished(other)
    assert accuracies(other) == found
    other.context.close()


@pytest.mark.parametrize(
    "fragment", ["t1=7", "data=nothing", "data=own&points=!!!!", "t1=&seed=-1", "%%%", "level=1e9"]
)
def test_a_broken_link_is_told_and_gets_the_defaults(page, address, fragment):
    page.goto(f"{address}#{fragment}")
    expect(page.locator("#pair-now")).to_have_text("t1 = 0.2, t2 = 4")
    if fragment != "%%%":
        expect(page.locator("#message")).to_contain_text(re.compile("must be|place points"))


def test_hovering_shows_activations_and_probabilities(page, address):
    page.goto(f"{address}#noise=none")
    finished(page)
    page.mouse.move(*place(page, 0, 0))
    for side in (0, 1):
        expect(page.locator(f"#probe-{side}")).to_contain_text("activations")
    text = page.locator("#probe-1").inner_text()
    blue, orange = (float(number) for number in re.findall(r"([\d.]+)\s%", text))
    assert orange > blue  # the disc is orange
    assert blue + orange == pytest.approx(100, abs=0.11)
    page.mouse.move(2, 2)
    expect(page.locator("#probe-1")).to_be_empty()


def test_the_page_can_be_used_from_the_keyboard(page, address):
    page.goto(address)
    expect(page.locator("#state")).to_contain_text("Training")
    page.keyboard.press("Space")
    expect(page.locator("#state")).to_contain_text("Paused")
    page.keyboard.press("n")
    expect(page.locator("#seed")).to_have_value("1")
    page.locator("#t1").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#t1-out")).to_have_text("0.25")
    page.locator("input[name=data]").first.focus()
    page.keyboard.press("ArrowRight")
    assert link(page)["data"] == "moons"
    page.locator("input[name=data][value=own]").check()
    expect(page.locator("#truth-legend")).to_be_hidden()
    page.locator("#picture-0").focus()
    for key in ("ArrowUp", "ArrowRight", "2"):
        page.keyboard.press(key)
    expect(page.locator("#probe-0")).to_contain_text("At (0.05, 0.05)")
    page.keyboard.press("Enter")
    points_become(page, 61)
    page.keyboard.press("Delete")
    points_become(page, 60)


def test_the_theme_follows_the_system_and_the_button(page, address):
    page.emulate_media(color_scheme="dark")
    page.goto(address)
    html = page.locator("html")
    expect(html).to_have_attribute("data-theme", "dark")
    page.emulate_media(color_scheme="light")
    expect(html).to_have_attribute("data-theme", "light")
    for shown in ("light", "dark", "light"):  # light, dark, auto
        page.locator("#theme").click()
        expect(html).to_have_attribute("data-theme", shown)


@pytest.mark.parametrize(("width", "height"), [(320, 640), (390, 844), (844, 390), (1024, 768), (1920, 1080)])
def test_nothing_is_wider_than_the_screen(page, address, width, height):
    page.set_viewport_size({"width": width, "height": height})
    page.goto(address)
    expect(page.locator("#state")).to_contain_text("step")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = [page.locator(f"#picture-{side}").bounding_box() for side in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]  # side by side on every screen
    assert boxes[0]["width"] > min(0.35 * width, 0.4 * height)


def test_a_page_says_that_its_server_has_gone_and_comes_back(chromium):
    context = chromium.new_context()
    page = context.new_page()
    with serving() as (host, port):
        page.goto(f"http://{host}:{port}/#seed=3")
        expect(page.locator("#state")).to_contain_text("step")
    expect(page.locator("#message")).to_contain_text("Disconnected")
    expect(page.locator("#reconnect")).to_be_visible()
    page.mouse.move(*place(page, 0, 0))
    page.keyboard.press("Space")
    expect(page.locator("#state")).to_have_text("Disconnected")
    with serving(port=port):
        page.locator("#reconnect").click()
        finished(page)
        expect(page.locator("#message")).to_be_hidden()
        expect(page.locator("#seed")).to_have_value("3")
    context.close()
