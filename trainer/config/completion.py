"""Shell completion for `meshtrainer`: subcommands, recipes, keys and options."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.config.load import declared_keys, recipe_files
from trainer.errors import UserError, choice_error

_BASH = """\
_meshtrainer() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} key=
    [[ $word == "=" ]] && word= key=${{COMP_WORDS[COMP_CWORD-1]}}
    [[ ${{COMP_WORDS[COMP_CWORD-1]}} == "=" ]] && key=${{COMP_WORDS[COMP_CWORD-2]}}
    [[ $key == recipe ]] && COMPREPLY=($(compgen -W "{recipes}" -- "$word"))
    [[ -n $key ]] && return
    COMPREPLY=($(compgen -W "{words}" -- "$word"))
    [[ ${{COMPREPLY[0]-}} == *= ]] && compopt -o nospace
}}
complete -o default -F _meshtrainer meshtrainer
"""
_ZSH = """\
#compdef meshtrainer
_meshtrainer() {{ compadd -S '' -- {words}; _files }}
compdef _meshtrainer meshtrainer
"""


def completion(shell: str, commands: Iterable[str]) -> str:
    """Return the script that `eval "$(meshtrainer completion bash)"` loads, or the one for zsh.

    Raises UserError if the shell is missing or unknown.
    """
    scripts = {"bash": _BASH, "zsh": _ZSH}
    if not shell:
        raise UserError("completion: the shell is missing\n  for example: meshtrainer completion bash")
    if shell not in scripts:
        raise choice_error("completion", shell, sorted(scripts))
    words = [*commands, *(f"recipe={name}" for name in recipe_files()), "nproc="]
    words += [f"{key}=" for key in declared_keys()]
    words += ["--help", "--version", "--print-config", "--dry-run", "--allow-import"]
    return scripts[shell].format(words=" ".join(words), recipes=" ".join(recipe_files()))
