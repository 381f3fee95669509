"""transformers' own generation tests, served by `sc.generate`: how many pass, and what the others come to.

    python tests/hf_generation/run.py path/to/transformers --json docs/generation_tests.json

Needs a checkout of transformers' repository at the installed version, since packages come without these tests, and
beside this environment what they import (`parameterized`, `httpx`, `timeout-decorator`). Each test runs twice, first as
it is. Counted are those that pass so and call `generate`; not those about compiling the model's forward, which say
nothing of generation, and none that need a download, a GPU or another library, which do not pass as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TYPES = ("llama", "mistral", "gemma2", "qwen2_moe", "opt", "gpt2", "mamba")
OUTCOMES = ("passed", "refused", "failed")
NOT_THESE = "not torch_compile_test"
LONG_VALUE = re.compile(r", got (?:(?:a )?tensor|\w*Cache)\b")  # what was given differs from type to type
BAR = 0.9

Results = dict[str, dict[str, Any]]


def main() -> int:
    arguments = _arguments()
    if not (arguments.checkout / "tests" / "generation" / "test_utils.py").exists():
        print(f"checkout must hold tests/generation/test_utils.py, got {arguments.checkout}", file=sys.stderr)
        return 2
    rows = []
    for model_type in arguments.types.split(","):
        alone, served = (run_tests(arguments.checkout, model_type, serve=serve) for serve in (False, True))
        found = merged(model_type, alone, served)
        print(f"{model_type:12} {counts_of(found)}", flush=True)
        rows += found
    if not rows:
        print("no test was counted", file=sys.stderr)
        return 2
    print(summary(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
        arguments.json.with_suffix(".md").write_text(page(rows, arguments.about))
    return 0 if not any(row["outcome"] == "failed" for row in rows) else 1


def run_tests(checkout: Path, model_type: str, *, serve: bool) -> Results:
    """What a pytest in the checkout, whose package `tests` is not ours, finds."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "through_engine", "--results", str(results)]
        command += ["-p", "no:cacheprovider", "-p", "no:logging", "-W", "ignore", "-m", NOT_THESE]
        command += ["--serve"] * serve + [str(Path("tests", "models", model_type, f"test_modeling_{model_type}.py"))]
        paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        if not results.exists() or done.returncode not in (0, 1):
            raise SystemExit(f"pytest failed for {model_type}:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
        found: Results = json.loads(results.read_text())
        return found


def merged(model_type: str, alone: Results, served: Results) -> list[dict[str, Any]]:
    """A row for each test that counts."""
    return [
        {
            "type": model_type,
            "test": name.rpartition("::")[2],
            "outcome": served[name]["outcome"],
            "reason": LONG_VALUE.split(served[name]["reason"])[0],
        }
        for name, result in alone.items()
        if result["outcome"] == "passed" and result["calls"] and name in served
    ]


def counts_of(rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["outcome"] for row in rows)
    return ", ".join(f"{counts[name]} {name}" for name in OUTCOMES) + f" of {len(rows)}"


def summary(rows: list[dict[str, Any]]) -> str:
    share = sum(row["outcome"] == "passed" for row in rows) / len(rows)
    return f"{counts_of(rows)}: {share:.0%} pass, bar {BAR:.0%}: {'met' if share >= BAR else 'MISSED'}"


def page(rows: list[dict[str, Any]], about: str) -> str:
    lines = ["# transformers' own generation tests", "", *(__doc__ or "").strip().split("\n\n")[2].split("\n"), ""]
    lines += [about, ""] if about else []
    lines += [f"{summary(rows)}.", "", "| type | passed | refused by name | failed |", "|---|---|---|---|"]
    for model_type in dict.fromkeys(row["type"] for row in rows):
        counts = Counter(row["outcome"] for row in rows if row["type"] == model_type)
        lines.append(f"| {model_type} | " + " | ".join(str(counts[name]) for name in OUTCOMES) + " |")
    lines += ["", "| test that does not pass | types | outcome |", "|---|---|---|"]
    others: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["outcome"] != "passed":
            others.setdefault((row["test"], f"{row['outcome']}: {row['reason']}"), []).append(row["type"])
    lines += [f"| `{test}` | {', '.join(types)} | {reason} |" for (test, reason), types in sorted(others.items())]
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--types", default=",".join(TYPES), help="of models, by the names of their folders")
    parser.add_argument("--about", default="", help="a line for the page: which checkout it was")
    parser.add_argument("--json", type=Path, help="where to write the rows; the page goes beside it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
