"""The doctor's output in docs/guides/doctor.md, made by the commands that stand there: python docs/make_outputs.py."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parent / "guides" / "doctor.md"
SEVEN_BILLION = "import transformers; transformers.LlavaConfig().save_pretrained('llava_7b')"


def outputs(page: str) -> dict[str, str]:
    """What the page's commands print.

    Args:
        page: Its text, with the configuration in the first block of YAML.

    Returns:
        ``"doctor"`` and ``"estimate"``.
    """
    match = re.search(r"^```yaml config\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert match is not None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.yaml").write_text(match[1])
        _run(folder, "-c", SEVEN_BILLION)
        command = ("-c", "import sys; from lightning_fcl.cli import main; sys.exit(main())", "doctor")
        return {
            "doctor": _run(folder, *command, "--config", "run.yaml"),
            "estimate": _run(folder, *command, "--estimate", "llava_7b", "--devices", "8"),
        }


def _run(folder: str, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[2]), "COLUMNS": "120"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout.strip()


def main() -> None:
    """Fill the page."""
    page = PAGE.read_text()
    for name, text in outputs(page).items():
        mark = re.compile(f"<!-- output: {name} -->.*?<!-- /output -->", re.DOTALL)
        block = f"<!-- output: {name} -->\n```text\n{text}\n```\n<!-- /output -->"
        page = mark.sub(lambda _, block=block: block, page)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
