"""Draw docs/images/playground-*.png, probe.png and check.png: the playground, and two reports.

All show the bundled model: compared with itself, probed, and checked.

Needs chromium and playwright, and a checkout: python docs/screenshots.py [FOLDER of the images]
"""

import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).parent / "images"
QUESTION = "List the first 12 primes."
SIZE = {"width": 1280, "height": 640}


@contextmanager
def served() -> Iterator[str]:
    """Yield the URL of a server with the bundled model."""
    command = [sys.executable, "-m", "lockstep", "serve", "--port", "0"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        ready_line = next(line for line in running.stdout if line.startswith("Ready: "))
        url = ready_line.split(" at ")[1].split("/v1")[0]
        urllib.request.urlopen(f"{url}/health").read()
        yield url
    finally:
        running.terminate()
        running.communicate()


def draw(browser: Browser, url: str, scheme: str, path: Path) -> None:
    """Take one picture of a comparison."""
    page = browser.new_page(viewport=SIZE, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(url)
    page.get_by_label("Compare without speculation").check()
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.keyboard.press("Enter")
    page.locator(".agreement.good").wait_for(timeout=120_000)
    page.screenshot(path=path)
    page.close()


def write_report(url: str, path: Path) -> None:
    """Probe the server with short sections and write the HTML report."""
    sections = "protocol,logprobs,determinism,stop,sampling,json,tools,speed"
    words = ("--url", url, "--sections", sections, "--seconds", "1800", "--report", str(path))
    done = subprocess.run([sys.executable, "-m", "lockstep.probe", *words])
    assert done.returncode in (0, 1), "the server could not be probed"


def write_check(path: Path) -> None:
    """Check the bundled model and write the HTML report."""
    words = ("check", "--quick", "--report", str(path))
    subprocess.run([sys.executable, "-m", "lockstep", *words], check=True)


def draw_report(browser: Browser, report: Path, path: Path) -> None:
    """Draw the first screen of a report."""
    page = browser.new_page(viewport=SIZE)
    page.goto(report.absolute().as_uri())
    page.screenshot(path=path)
    page.close()


def main() -> None:
    """Draw the pictures, the playground in light and dark."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with TemporaryDirectory() as reports, served() as url, sync_playwright() as playwright:
        report = Path(reports) / "probe.html"
        write_report(url, report)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        draw_report(browser, report, folder / "probe.png")
        checked = Path(reports) / "check.html"
        write_check(checked)
        draw_report(browser, checked, folder / "check.png")
        for scheme in ("light", "dark"):
            draw(browser, url, scheme, folder / f"playground-{scheme}.png")


if __name__ == "__main__":
    main()
