"""Make the pictures of the documents from real runs: `python docs/pictures/record.py`.

`demo.svg` is a recording of `raypool demo` in a terminal; it moves where SVG may, and shows its last
frame elsewhere. `show.svg` is the last frame of a sweep that is listed and shown. `search.svg` is a frame
of the search of `docs/search.md`. `report.png` is the report that the README's first two programs
write, as Chromium shows it. `watch.png` is the live page of a longer sweep.
"""

from __future__ import annotations

import base64
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from fcntl import ioctl
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

import pyte

HERE = Path(__file__).parent
LETTER, LINE, MARGIN = 8.4, 18, 14
EVERY_S, LAST_S = 0.25, 6.0
COLORS = {
    "default": "#d8dee9",
    "black": "#4c566a",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",  # pyte's name for yellow
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
    "white": "#f0f6fc",
}

CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


SHOW = """
show() { printf '$ %s\n' "$*"; "$@"; }
show raypool ls runs
show raypool show runs/digits --sort -accuracy --top 5
show raypool show runs/digits --failed
"""

PREPARE = """
const length = document.querySelector(".dt-length select");
length.value = 10;
length.dispatchEvent(new Event("change"));
for (const item of [0, 1, 2, 3, 6]) {
  const click = new MouseEvent("click", { bubbles: true, ctrlKey: true });
  document.querySelector(`#item-${item} td.mark`).dispatchEvent(click);
}
document.getElementById("path").style.display = "none"; // a temporary folder
document.getElementById("curves").scrollIntoView();
"""
"""Show ten rows, four curves, and the details of an item that has failed."""

IS_READY = """
const has_failed = document.getElementById("item-6")?.innerText.includes("failed");
return has_failed && document.getElementById("stop-all").offsetParent !== null;
"""

IS_DRAWN = "return document.querySelectorAll('#curves .scatterlayer .js-line').length > 0"


def main() -> None:
    """Make all pictures."""
    # `raypool` of this environment
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        frames, screen = record(["raypool", "demo", "--workers", "2"], folder, columns=90, rows=24)
        (HERE / "demo.svg").write_text(animation("raypool demo", frames, screen))
        picture_of_show(Path(folder))
        picture_of_search(Path(folder))
        picture_of_report(Path(folder))
        picture_of_watch(Path(folder))


Frames = list[tuple[float, list[str]]]
"""What a screen showed, as lines of SVG, and since when [s]."""


def record(
    command: list[str], folder: str | Path, columns: int, rows: int, status: int = 0
) -> tuple[Frames, pyte.Screen]:
    """Run a command in a terminal; return what its screen showed, and the screen at the end."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    parent, child = pty.openpty()
    ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
    process = subprocess.Popen(
        command, cwd=folder, env=environ, stdin=child, stdout=child, stderr=child
    )
    os.close(child)
    frames: Frames = []
    began = shown = time.monotonic()
    while True:
        if select.select([parent], [], [], EVERY_S)[0]:
            try:
                stream.feed(os.read(parent, 65536))
            except OSError:  # Linux says so at the end of a terminal's last process
                break
        if time.monotonic() - shown >= EVERY_S:
            shown = time.monotonic()
            keep(frames, shown - began, screen)
    os.close(parent)
    if process.wait() != status:
        shown = "\n".join(screen.display)
        raise SystemExit(f"{command} ended with status {process.returncode}:\n{shown}")
    keep(frames, time.monotonic() - began, screen)
    return frames, screen


def keep(frames: Frames, at_s: float, screen: pyte.Screen) -> None:
    """Add what the screen shows, if it has changed."""
    lines = [line_of(screen, row) for row in range(screen.lines)]
    if not frames or frames[-1][1] != lines:
        frames.append((at_s, lines))


def line_of(screen: pyte.Screen, row: int) -> str:
    """Return a line as SVG: one `tspan` for letters of the same look."""
    cells = [screen.buffer[row][column] for column in range(screen.columns)]
    text = ""
    for (color, is_bold), group in groupby(cells, lambda cell: (cell.fg, cell.bold)):
        letters = escape("".join(cell.data for cell in group))
        fill = COLORS.get(color, f"#{color}" if len(color) == 6 else COLORS["default"])
        weight = ' font-weight="bold"' if is_bold else ""
        text += f'<tspan fill="{fill}"{weight}>{letters}</tspan>'
    return text


def animation(title: str, frames: Frames, screen: pyte.Screen) -> str:
    """Return an SVG that shows the frames in turn, each for as long as it was there."""
    first_s = frames[0][0]
    frames = [(at_s - first_s, lines) for at_s, lines in frames]
    end_s = frames[-1][0] + LAST_S
    width, height = screen.columns * LETTER + 2 * MARGIN, screen.lines * LINE + 2 * MARGIN
    styles, groups = [], []
    for number, (at_s, lines) in enumerate(frames):
        until_s = frames[number + 1][0] if number + 1 < len(frames) else end_s
        first, last = 100 * at_s / end_s, 100 * until_s / end_s
        is_last = number + 1 == len(frames)
        styles.append(
            f"@keyframes f{number}{{0%,{max(first - 0.001, 0):.3f}%{{opacity:0}}"
            f"{first:.3f}%,{last - 0.002:.3f}%{{opacity:1}}"
            + ("" if is_last else f"{last - 0.001:.3f}%,100%{{opacity:0}}")
            + f"}}#f{number}{{animation:f{number} {end_s:.1f}s infinite}}"
        )
        rows = "".join(
            f'<text x="{MARGIN}" y="{MARGIN + LINE * (row + 0.75):.1f}">{line}</text>'
            for row, line in enumerate(lines)
            if line
        )
        groups.append(f'<g id="f{number}" opacity="{int(is_last)}">{rows}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img"><title>{escape(title)}</title>'
        f"<style>text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;"
        f"white-space:pre}}{''.join(styles)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{"".join(groups)}</svg>\n'
    )


def picture_of_show(folder: Path) -> None:
    """Run the networks of the first tutorial as a sweep, and take a picture of its tables."""
    digits, *_ = CODE.findall((HERE.parent / "tutorials/first_sweep.md").read_text())
    (folder / "digits.py").write_text(digits)
    configs = [(width, lr) for width in (8, 32, 128) for lr in (0.01, 0.03, 0.1, 100)]
    rows = "".join(f"{width},{lr}\n" for width, lr in configs)
    (folder / "configs.csv").write_text(f"width,lr\n{rows}")
    sweep = ["raypool", "sweep", "digits:train", "configs.csv", "--run-dir", "runs/digits"]
    subprocess.run([*sweep, "--seed", "0", "--profile", "threads"], cwd=folder, check=False)
    frames, screen = record(["sh", "-c", SHOW], folder, columns=90, rows=16)
    picture = animation("raypool ls and raypool show", frames[-1:], screen)
    (HERE / "show.svg").write_text(picture)


def picture_of_search(folder: Path) -> None:
    """Run the search of the documents, and take a picture of its last live frame."""
    program, *_ = CODE.findall((HERE.parent / "search.md").read_text())
    (folder / "search_digits.py").write_text(program)
    frames, screen = record([sys.executable, "search_digits.py"], folder, columns=100, rows=6)
    live = [frame for frame in frames if "worker 0" in "".join(frame[1])]
    picture = animation("pool.search in a terminal", live[-1:], screen)
    (HERE / "search.svg").write_text(picture)


def picture_of_report(folder: Path) -> None:
    """Run the README's sweep, and take a picture of its report."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("There is no Chromium here: apt-get install chromium")
    ten_lines, resume, *_ = CODE.findall((HERE.parents[1] / "README.md").read_text())
    subprocess.run([sys.executable, "-c", ten_lines + resume], cwd=folder, check=True)
    subprocess.run(
        [
            chromium,
            "--headless=new",
            "--no-sandbox",
            "--hide-scrollbars",
            "--virtual-time-budget=10000",
            "--window-size=1280,900",
            f"--screenshot={HERE / 'report.png'}",
            (folder / "first.html").as_uri(),
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def picture_of_watch(folder: Path) -> None:
    """Run the networks of the first tutorial for longer, and take a picture of the live page."""
    from selenium import webdriver

    digits, *_ = CODE.findall((HERE.parent / "tutorials/first_sweep.md").read_text())
    (folder / "digits.py").write_text(digits.replace("range(5)", "range(200)"))
    configs = [(width, lr) for lr in (0.1, 100, 0.03, 0.01) for width in (8, 16, 32, 64, 128, 256)]
    rows = "".join(f"{width},{lr}\n" for width, lr in configs)
    (folder / "configs.csv").write_text(f"width,lr\n{rows}")
    sweep = ["raypool", "sweep", "digits:train", "configs.csv", "--run-dir", "runs/long"]
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--hide-scrollbars",
        "--window-size=1280,900",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options)
    running = [subprocess.Popen([*sweep, "--seed", "0", "--profile", "threads"], cwd=folder)]
    try:
        wait_for(lambda: [*folder.glob("runs/long/items/*/*")])
        watch = ["raypool", "watch", "runs/long"]
        running.append(subprocess.Popen(watch, cwd=folder, stdout=subprocess.PIPE, text=True))
        lines = iter(running[1].stdout.readline, "")
        driver.get(next(found[0] for line in lines if (found := re.search(r"http://\S+", line))))
        wait_for(lambda: driver.execute_script(IS_READY))
        driver.execute_script(PREPARE)
        wait_for(lambda: driver.execute_script(IS_DRAWN))
        end = driver.execute_script("return document.querySelector('.pair').offsetTop + 560")
        clip = {"x": 0, "y": 0, "width": 1280, "height": end, "scale": 1}
        wanted = {"captureBeyondViewport": True, "clip": clip}
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", wanted)["data"]
        (HERE / "watch.png").write_bytes(base64.b64decode(shot))
    finally:
        driver.quit()
        for process in reversed(running):
            process.terminate()
            process.wait()


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until something holds."""
    while not condition():
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
