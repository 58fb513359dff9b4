"""Create a project of your own: a model, its recipe, a test, and a Slurm batch file.

meshtrainer init mine            creates the folder mine/
cd mine && meshtrainer run recipe=mine.yaml
"""

from __future__ import annotations

import keyword
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from trainer.errors import EXIT_FINISHED, CommandParser, UserError, print_stdout, run_command
from trainer.files import writing_to
from trainer.registry import all_models

_NAME = "my_model"
"""The model's name in the template's file names and contents.  The name of the new project replaces it."""


def write_project(name: str, parent: Path) -> Path:
    """Create a project in the folder `parent/name`, which must be new or empty, and return the folder.

    Raises UserError if the name, with `_` in place of `-`, is not a valid module name, or is the name of a registered
    model, of a standard-library module, or of `trainer`, `torch` or `recipes`; if the folder is not empty; or if the
    disk is full.
    """
    module = name.replace("-", "_")
    if not module.isidentifier() or keyword.iskeyword(module):
        raise UserError(
            f"NAME={name}: must be a valid Python module name: letters, digits and _\n  for example: my_model"
        )
    reserved = {spec.name for spec in all_models()} | set(sys.stdlib_module_names) | {"trainer", "torch", "recipes"}
    if module in reserved:
        raise UserError(f"NAME={name}: is the name of another module or model\n  for example: my_{module}")
    folder = parent / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"NAME={name}: {folder} already exists\n  to fix: choose another name, or remove the folder")
    with writing_to("NAME", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(Path(str(resources.files("trainer.init"))).joinpath("template").iterdir()):
            if file.is_file():
                text = file.read_text(encoding="utf-8").replace(_NAME, module)
                target = folder / file.name.replace(_NAME, module)
                target.write_text(text, encoding="utf-8")
                target.chmod(0o755 if text.startswith("#!") else 0o644)
    return folder


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = CommandParser(prog="python -m trainer.init", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="name of the project folder and of the model")

    def create() -> int:
        arguments = parser.parse_args(argv)
        folder = write_project(arguments.name, Path())
        module = folder.name.replace("-", "_")
        files = ", ".join(sorted(path.name for path in folder.iterdir()))
        print_stdout(f"{folder}: {files}\nnext: cd {folder} && meshtrainer run recipe={module}.yaml")
        return EXIT_FINISHED

    return run_command(create)


if __name__ == "__main__":
    sys.exit(command_line())
