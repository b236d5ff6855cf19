"""The demo's table and page are read from the runs' files."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console

from xtoken_services.demo.report import read_run, running_mean, table, write_report


def write_run(directory: Path, *, final: float, kl: float | None, steps: int = 30) -> Path:
    directory.mkdir()
    with (directory / "steps.jsonl").open("w") as file:
        for step in range(steps):
            line = {"step": step, "ce_loss": 5 - step / 20, "kl_loss": kl, "tokens": 100, "seconds": 0.5}
            line |= {"accuracy": step / 100, "grad_norm": 1.0, "tokens_per_second": 200.0, "loss": None}
            file.write(json.dumps(line) + "\n")
    with (directory / "eval.jsonl").open("w") as file:
        for step, bits in ((0, 8.0), (steps, final)):
            line = {"step": step, "bits_per_byte": bits, "nll_nats": 1.0, "bytes": 5000, "tokens": 1700, "documents": 7}
            file.write(json.dumps(line | {"next_token_accuracy": 0.4321}) + "\n")
    return directory


def printed(*runs: Path) -> str:
    console = Console(width=160, record=True, file=None, quiet=True)
    console.quiet = False
    with console.capture() as captured:
        console.print(table([read_run(path.name, path) for path in runs]))
    return captured.get()


def test_table_shows_the_last_evaluation(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "plain", final=2.34567, kl=0.0), write_run(tmp_path / "distilled", final=2.1, kl=3)]
    text = printed(*runs)
    rows = {line.split()[1]: line for line in text.splitlines() if re.search("plain|distilled", line)}
    assert re.findall(r"[\d.,%]+", rows["plain"]) == ["2.3457", "43.2%", "30", "3,000"]
    assert "2.1000" in rows["distilled"]


def test_report_is_self_contained(tmp_path: Path) -> None:
    teacher = read_run("teacher <b>", write_run(tmp_path / "t", final=1.9, kl=None))
    plain = read_run("cross-entropy only", write_run(tmp_path / "c", final=2.3, kl=0.0))
    distilled = read_run("distilled", write_run(tmp_path / "d", final=2.1, kl=3.0))
    write_report(tmp_path / "report.html", teacher, [plain, distilled])
    page = (tmp_path / "report.html").read_text()
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 7
    for picture in pictures:
        assert len(ElementTree.fromstring(picture)) > 0
    assert "teacher &lt;b&gt;" in page
    assert "teacher <b>" not in page
    assert not re.search(r'(src|href)="(?!#)', re.sub(r'xlink:href="#', "", page))
    assert page.count("<tr>") == 4
    assert page.count("<td>5,000</td>") == 3


def test_empty_curve_has_no_plot(tmp_path: Path) -> None:
    run = read_run("plain", write_run(tmp_path / "plain", final=2.0, kl=0.0))
    write_report(tmp_path / "report.html", run, [run])
    assert "Distillation loss" not in (tmp_path / "report.html").read_text()


def test_running_mean_at_the_ends() -> None:
    assert running_mean([1.0, 2.0, 3.0, 4.0, 5.0], width=3) == [1.5, 2.0, 3.0, 4.0, 4.5]
    assert running_mean([2.0]) == [2.0]
