"""The sizes of the built images, for the documents: whole, without the base, and by package.

    python -m tests.docker.image_sizes [--out FILE]

Images that are not built keep their entry in the result file. Sizes are uncompressed, as `docker image inspect` says.
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "images.json"
TAGS = ("cpu", "gpu")
LARGEST = 5
EXTRAS = ("ray", "triton", "tensorboard", "peft")
"""What the extra `all` brings."""
PROGRAM = f"""
import json, site
from importlib.metadata import distributions, version
from pathlib import Path

top = Path(site.getsitepackages()[0])
sizes = {{d.metadata["Name"]: sum((top / f).lstat().st_size for f in d.files or () if (top / f).is_file())
         for d in distributions(path=[str(top)])}}
versions = {{name: version(name) for name in ("xtoken", "torch", "transformers", {", ".join(map(repr, EXTRAS))})}}
print(json.dumps({{"versions": versions, "sizes": sizes}}))
"""


def docker(*arguments: str) -> str:
    """Return the output of a docker command."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout


def built(tag: str) -> bool:
    """Return whether there is such an image."""
    return subprocess.run(["docker", "image", "inspect", f"xtoken:{tag}"], capture_output=True).returncode == 0


def measure(tag: str) -> dict[str, Any]:
    """Return the size of an image in bytes, that of what it is built upon, and its largest packages."""
    (inspected,) = json.loads(docker("image", "inspect", f"xtoken:{tag}"))
    layers = [
        int(size) for size in docker("history", "--human=false", "--format", "{{.Size}}", f"xtoken:{tag}").split()
    ]
    packages = json.loads(docker("run", "--rm", "--entrypoint", "python", f"xtoken:{tag}", "-c", PROGRAM))
    sizes = sorted(packages["sizes"].items(), key=lambda entry: -entry[1])
    return {
        "bytes": inspected["Size"],
        "base_bytes": layers[-1],
        "versions": packages["versions"],
        "largest_packages": dict(sizes[:LARGEST]),
        "extras": {name: packages["sizes"][name] for name in EXTRAS},
    }


def main() -> int:
    """Measure the images that are built and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    out = parser.parse_args().out
    report = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    report |= {tag: measure(tag) for tag in TAGS if built(tag)}
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
