"""Take the pictures of docs/playground.md: `make screenshots`. Needs Chromium and the test extra."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import expect, sync_playwright

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
SIZES = {"desktop": (1360, 940, 1), "phone": (390, 844, 2)}  # width, height, pixels per point
RANDOM, FAR = "data=ring&noise=random&level=0.3&seed=0", "data=ring&noise=large-margin&level=0.15&seed=0"
PICTURES = {  # by name: size, theme, settings, and where the pointer is in the second picture, from 0 to 1
    "playground-desktop-light": ("desktop", "light", RANDOM, (0.52, 0.28)),
    "playground-desktop-dark": ("desktop", "dark", FAR, None),
    "playground-phone-light": ("phone", "light", FAR, None),
    "playground-phone-dark": ("phone", "dark", RANDOM, None),
}


def main(only: list[str]) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("screenshots need Chromium: apt-get install chromium")
    command = [sys.executable, "-m", "bitempered", "playground", "--no-browser", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, (size, theme, settings, pointer) in PICTURES.items():
                if only and name not in only:
                    continue
                width, height, scale = SIZES[size]
                page = browser.new_page(
                    viewport={"width": width, "height": height}, device_scale_factor=scale, color_scheme=theme
                )
                page.goto(f"{address}#{settings}")
                expect(page.locator("#state")).to_contain_text("Finished", timeout=300_000)
                if pointer:
                    box = page.locator("#picture-1").bounding_box()
                    page.mouse.move(box["x"] + pointer[0] * box["width"], box["y"] + pointer[1] * box["height"])
                    expect(page.locator("#probe-1")).to_contain_text("probabilities")
                # 256 colours are enough, and make a third of the file.
                image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                image.quantize(256, kmeans=2, dither=Image.Dither.NONE).save(FIGURES / f"{name}.png", optimize=True)
                page.close()
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
