"""Builds the configuration of the teacher in distillation: a frozen model without adapters, on the student's mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from trainer.config.files import CONFIG
from trainer.config.load import load_stored
from trainer.config.model_folder import find_native, generic_model_of
from trainer.config.parallel import uneven_heads
from trainer.config.schema import LoraSection, RunConfig
from trainer.config.weights import locate
from trainer.errors import setting_error
from trainer.objective import Tokens

TEACHER_KEY = "objective.teacher"
"""The key of the setting that names the teacher."""


def teacher_config(config: RunConfig) -> RunConfig | None:
    """Return the run's configuration with the teacher in place of its model; None if its objective needs no teacher.

    The teacher is sharded on the same mesh as the student, and its weights have the run's compute dtype.

    Raises UserError if no teacher is named, if its model is unknown, if the vocabulary sizes differ, or if the teacher
    does not support the mesh.
    """
    if "teacher" not in config.objective.needs:
        return None
    path: str | None = config.objective.teacher
    if not path:
        raise setting_error(TEACHER_KEY, path, "must name the model to imitate", proposal="models/Qwen3-8B")
    location = locate(path)
    init_from: str | None = path
    if location.kind == "huggingface":
        native = find_native(path, TEACHER_KEY)
        model = (native or generic_model_of(path))[1]
        init_from = path if native else None  # the generic model loads the weights from `model.path` itself
    elif (location.folder / CONFIG).is_file():
        model = load_stored((location.folder / CONFIG).read_text(), TEACHER_KEY).model
    else:
        rule = "must be a Hugging Face folder, a run folder or a checkpoint"
        raise setting_error(TEACHER_KEY, path, rule, fix="name one, or a model on the Hugging Face Hub: OWNER/NAME")
    weights_dtype: Literal["bfloat16", "float32"] = "bfloat16" if config.fsdp.param_dtype == "bfloat16" else "float32"
    train = replace(config.train, init_from=init_from, freeze=(), weights_dtype=weights_dtype)
    fsdp = replace(config.fsdp, reshard_after_forward="default")
    teacher = replace(config, model=model, train=train, fsdp=fsdp, lora=LoraSection(), objective=Tokens())
    if teacher.vocab_size != config.vocab_size:
        rule = f"has a vocabulary of {teacher.vocab_size} tokens, but the trained model's has {config.vocab_size}"
        raise setting_error(TEACHER_KEY, path, rule, fix="use a teacher with the same tokenizer")
    if config.context > 1 and not teacher.spec.context:
        rule = f"is a {teacher.spec.name!r}, which needs whole sequences"
        raise setting_error(TEACHER_KEY, path, rule, fix="set mesh.context=1")
    if config.tensor > 1 and (teacher.spec.tensor is None or uneven_heads(teacher)):
        rule = f"is a {teacher.spec.name!r}, whose matrices and heads mesh.tensor={config.tensor} cannot divide"
        raise setting_error(TEACHER_KEY, path, rule, fix="set mesh.tensor=1")
    if config.expert > 1:
        rule = "only one model's experts can be divided among ranks, and a teacher is a second model"
        raise setting_error("mesh.expert", config.expert, rule, 1)
    return teacher
