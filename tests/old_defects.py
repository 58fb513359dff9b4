"""Deliberate defects: each is planted in a copy of the project, where a test of the promise that it breaks must fail.

    python -m tests.old_defects                     # all of them, against the tests of `make test`
    python -m tests.old_defects --campaign          # also against the tests of the campaign
    python -m tests.old_defects loss-scale --keep   # a single one; the copy is kept

Each is a small, realistic mistake in one function: a wrong scale, a missing flush, swapped axes. The place is given by
the function's name, so that code can be moved or reformatted without changing it here. If no test finds a defect, a
test is missing or cannot fail.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from tests.helpers.forked import REPOSITORY
from tests.promises import path_of, read_promises


@dataclass(frozen=True)
class Defect:
    """Replaces the code `old` with `new` in one function, which breaks `promise`, a row of tests/README.md."""

    name: str
    promise: str
    where: str
    """The function, method, class or module constant, such as `Trainer.train_step`, in any file.

    If several modules define the name, it is prefixed with the module: `trainer.run:_load`.
    """
    old: str
    """Code that occurs exactly once there. Spaces, line breaks and trailing commas do not matter."""
    new: str
    by_campaign: bool = False
    """True if only the campaign's tests of the promise find it; all others are found by `make test`."""

    def plant(self, root: Path) -> None:
        """Change the code below `root`."""
        path, text = self.planted(root)
        path.write_text(text)

    def planted(self, root: Path) -> tuple[Path, str]:
        """Return the file to change and its new text.

        Raises AssertionError unless `where` and `old` name exactly one place.
        """
        places = definitions(root).get(self.where, [])
        assert len(places) == 1, f"{self.name}: {self.where} is defined {len(places)} times: {places}"
        ((path, begin, end),) = places
        text = path.read_text()
        found = find_code(text[begin:end], self.old)
        assert len(found) == 1, f"{self.name}: {self.where} in {path} has {len(found)} times {self.old!r}"
        first, last = found[0]
        return path, text[: begin + first] + self.new.strip() + text[begin + last :]


@cache
def definitions(root: Path) -> dict[str, list[tuple[Path, int, int]]]:
    """Return the file of each definition, and the character range of its text in that file.

    The keys are dotted names, with and without their module: `Trainer.close` and `trainer.trainer:Trainer.close`.
    """
    found: dict[str, list[tuple[Path, int, int]]] = {}
    for top in ("trainer", "recipes", "objectives"):
        for path in sorted((root / top).rglob("*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            for name, begin, end in _spans(path.read_text()):
                for key in (name, f"{module}:{name}"):
                    found.setdefault(key, []).append((path, begin, end))
    return found


def _spans(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the dotted name and character range of each function, class and assignment in a module."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def visit(parent: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for node in ast.iter_child_nodes(parent):
            names, inner = [], prefix
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names, inner = [node.name], f"{prefix}{node.name}."
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            for name in names:
                begin = min(each.lineno for each in (node, *getattr(node, "decorator_list", [])))
                yield prefix + name, starts[begin - 1], starts[node.end_lineno or begin]
            yield from visit(node, inner)

    yield from visit(ast.parse(text), "")


def find_code(text: str, code: str) -> list[tuple[int, int]]:
    """Return the character ranges of `code` in `text`, ignoring line breaks and trailing commas."""
    words, wanted = _words(text), [word for word, _, _ in _words(code)]
    ends = range(len(words) - len(wanted) + 1)
    hits = [start for start in ends if [word for word, _, _ in words[start : start + len(wanted)]] == wanted]
    return [(words[start][1], words[start + len(wanted) - 1][2]) for start in hits]


def _words(text: str) -> list[tuple[str, int, int]]:
    found = [(match[0], match.start(), match.end()) for match in re.finditer(r"\w+|[^\w\s]", text)]
    closes = [word in (")", "]", "}") for word, _, _ in found]
    is_trailing = [word == "," and after for (word, _, _), after in zip(found, [*closes[1:], False], strict=True)]
    return [word for word, trails in zip(found, is_trailing, strict=True) if not trails]


DEFECTS: list[Defect] = [
    Defect("not-looked-at-again", "cut-short", "write_files", "if stored != data:", "if not data:"),
    Defect(
        "name-taken-at-its-word",
        "damage",
        "read_manifest",
        "step_of_folder not in (None, manifest.step)",
        "False",
    ),
    Defect(
        "flipped-bits-trained-on",
        "caches-heal",
        "Shard._verify",
        "if checksum != recorded:",
        "if False:",
    ),
    Defect(
        "pages-taken-unchecked",
        "shard-pages",
        "Shard._fill_verified",
        "if crc32(page_bytes[position : position + _PAGE_BYTES]) != page_sum:",
        "if False:",
    ),
    Defect(
        "lock-of-a-removed-file",
        "caches-heal",
        "locked",
        "if not is_locked or is_same_file(descriptor, path):",
        "if True:",
    ),
    # -- models and data by name ---------------------------------------------------------------------------------
    Defect(
        "a-moved-branch-moves-the-run",
        "hub-models",
        "fetched_models",
        "stored = {} if resolution.is_stored else _stored_config(keys, resolution)",
        "stored = {}",
    ),
    Defect(
        "downloads-start-over",
        "hub-models",
        "Repository._receive",
        'headers |= {"Range": f"bytes={start}-"} if start else {}',
        "pass",
    ),
    Defect(
        "a-data-set-that-moves",
        "hub-data",
        "pin_data",
        "stored = read_run_config(config.run_dir) if will_resume(config) else {}",
        "stored = {}",
    ),
    Defect(
        "key-heads-as-query-heads",
        "gguf",
        "_Gguf._values",
        'heads = int(self.get("llama.attention.head_count_kv") or heads)',
        "pass",
    ),
    Defect(
        "text-becomes-a-control-token",
        "gguf",
        "_merges_by_score",
        "if types[number] in (_NORMAL, _USER_DEFINED)",
        "",
    ),
    Defect(
        "short-rows-are-taken",
        "records",
        "_read_csv",
        "if len(row) != len(names):",
        "if False:",
    ),
    Defect(
        "a-cut-off-array-is-taken",
        "records",
        "trainer.data.records:_read_json",
        "if is_at_end and num_open > 0:",
        "if False:",
    ),
    Defect(
        "a-card-with-local-paths",
        "push",
        "_public_name",
        'return path.partition("?")[0] if "://" in path else path.rstrip("/").rpartition("/")[2]',
        "return path",
    ),
    Defect(
        "a-project-without-its-name",
        "installed",
        "write_project",
        "target = folder / file.name.replace(_NAME, module)",
        "target = folder / file.name",
    ),
    # -- when to save --------------------------------------------------------------------------------------------
    Defect(
        "each-rank-decides-when-to-save",
        "auto-interval",
        "AdaptiveInterval.is_due",
        "self._is_time.any_yes",
        "self.is_time()",
    ),
    Defect(
        "tied-table-not-gathered-back",
        "fewer-gathers",
        "is_embedding_unit",
        "    return not any(id(parameter) in shared for module in modules for parameter in module.parameters())",
        "    return True",
    ),
    Defect(
        "fused-across-products",
        "plan-published",
        "trainer.plan.kernels:_groups",
        "(operator.is_fused and not is_fused)",
        "0",
    ),
    # -- streaks of skipped steps --------------------------------------------------------------------------------
    Defect(
        "save-postponed-for-good",
        "streaks",
        "SaveSchedule.is_due",
        "return is_due or self.is_postponed",
        "return is_due",
    ),
    Defect(
        "pruned-in-a-streak",
        "streaks",
        "Checkpoints._save",
        "not failure and snapshot.num_skipped == 0 and state.num_skipped == 0",
        "not failure and snapshot.num_skipped == 0",
    ),
    # -- old names -----------------------------------------------------------------------------------------------
    Defect(
        "old-property-unread",
        "old-names",
        "Renamed.__get__",
        "return getattr(owner if instance is None else instance, self._new_name)",
        "return getattr(owner, self._new_name)",
    ),
    # -- the step ------------------------------------------------------------------------------------------------
    Defect(
        "a-view-handed-on",
        "unit-outputs",
        "_replace_views.replace",
        "        if tensor._base is None or not tensor.requires_grad:",
        "        if tensor._base is None or not is_plain:",
    ),
    Defect(
        "aliases-forgotten",
        "mistakes-advice",
        "trainer.config.keys:assign",
        'raise choice_error(key, value, choices, aliases=known_keys[key].metadata.get("aliases")) from error',
        "raise choice_error(key, value, choices) from error",
    ),
    Defect(
        "printed-unchecked",
        "print-config",
        "trainer.run:_load",
        "        _check_before_printing(config, arguments.nproc, env)",
        "        pass",
    ),
    Defect(
        "compiler-not-looked-for",
        "needs",
        "check_requirements",
        "    if config.train.compile is True:",
        '    if config.train.compile is True and device_type == "cuda":',
    ),
    Defect(
        "advice-scrolled-away",
        "out-of-memory",
        "Forecast.explain",
        "for text in self._explanation(error, traceback_place):",
        "for text in reversed([*self._explanation(error, traceback_place)]):",
    ),
    Defect(
        "plan-fits-whatever",
        "plan-fits",
        "_plan",
        "    if plan.fits:",
        "    if plan:",
    ),
    Defect(
        "loss-scale",
        "same-losses",
        "Trainer.train_step",
        "scale = self.world.size / (count or 1)",
        "scale = 1.0 / (count or 1)",
    ),
    Defect(
        "lr-one-late",
        "same-losses",
        "Trainer.train_step",
        "self.optimizer.set_lr(self.schedule.lr(self.state.step + 1))",
        "self.optimizer.set_lr(self.schedule.lr(self.state.step))",
    ),
    Defect(
        "ignored-counted",
        "loss",
        "Trainer.count",
        'return count_targets(batch["targets"])',
        'return batch["targets"].numel()',
    ),
    Defect(
        "not-clipped",
        "clipping",
        "Trainer.train_step",
        "norm_and_clip_factor(self.model, self.mesh, self.config.optim.max_grad_norm)",
        "norm_and_clip_factor(self.model, self.mesh, None)",
    ),
    Defect(
        "not-clipped-where-rounded",
        "clipping",
        "_update",
        "g = scale * g",
        "g = 1 * g",
    ),
    Defect(
        "norm-over-replicas",
        "clipping",
        "gradient_norm",
        "dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))",
        "dist.all_reduce(squares, group=mesh.get_group(0))",
    ),
    Defect(
        "reduced-each-time",
        "collectives",
        "gradient_sync",
        'module.set_requires_gradient_sync(enabled or fsdp.accumulate == "sharded", recurse=False)',
        "module.set_requires_gradient_sync(True, recurse=False)",
    ),
    Defect(
        "reduced-as-computed",
        "mixed-precision",
        "_precision_policies.policy",
        "reduce_dtype=None if reduce_dtype == param_dtype else reduce_dtype,",
        "reduce_dtype=None,",
    ),
    Defect(
        "step-although-not-finite",
        "skipped-updates",
        "Trainer.train_step",
        "self.optimizer.step(torch.isfinite(mean_loss + grad_norm), clipping)",
        "self.optimizer.step(None, clipping)",
    ),
    Defect(
        "filling-evaluated",
        "evaluation",
        "Trainer.evaluate",
        "count += self.count(batch)",
        'count += batch["targets"].numel()',
    ),
    # -- the model -----------------------------------------------------------------------------------------------
    Defect(
        "built-whole",
        "memory",
        "build_network",
        'with torch.device("meta"):',
        'with torch.device("cpu"):',
    ),
    Defect(
        "same-start-everywhere",
        "initial-weights",
        "materialize",
        "seed_of(seed, name_without_adapters(module_name)), scratch",
        "seed, scratch",
    ),
    Defect(
        "parts-from-the-beginning",
        "initial-weights",
        "DeferredFill._generators",
        "state, distance = self.generator_state, first",
        "state, distance = self.generator_state, 0",
    ),
    Defect(
        "ties-parted",
        "ties",
        "materialize",
        "for first, *aliases in ties:",
        "for first, *aliases in ties[1:]:",
    ),
    Defect(
        "turned-the-other-way",
        "to-hugging-face",
        "rotate",
        "torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)",
        "torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)",
    ),
    Defect(
        "experts-global_balance-by-rank",
        "native-models",
        "global_balance",
        "world.sum_on_device(choices_LE.clone())",
        "choices_LE.clone()",
    ),
    Defect(
        "evaluates-what-was-drawn",
        "evaluate",
        "trainer.evaluate:_load_checkpoint",
        "    fill(trainer.model, stored, stored.description, only=only)",
        "    pass",
    ),
    Defect(
        "evaluated-as-its-own-reference",
        "tuned-models",
        "trainer.evaluate:_init_from_value",
        "    if external is None:",
        "    if external is None or True:",
        by_campaign=True,
    ),
    Defect(
        "cache-of-another-layer",
        "generate",
        "Cache.keep",
        "self._layers[self._next_layer : self._next_layer + 1] = [state]",
        "self._layers[0:1] = [state]",
    ),
    Defect(
        "padding-is-attended",
        "generate-batch",
        "Cache.mask_of",
        "is_text_B1S = (keys_S >= self._padding.unsqueeze(1)).unsqueeze(1)",
        "is_text_B1S = (keys_S >= 0 * self._padding.unsqueeze(1)).unsqueeze(1)",
    ),
    Defect(
        "positions-count-padding",
        "generate-batch",
        "Cache.positions_of",
        "index_T - self._padding.to(tokens_BT.device).unsqueeze(1)",
        "index_T - 0 * self._padding.to(tokens_BT.device).unsqueeze(1)",
    ),
    Defect(
        "noise-of-the-place-in-the-batch",
        "generate-batch",
        "generate_tokens",
        "row_indices = [indices[row] if row < len(prompts) else 0 for row in rows]",
        "row_indices = list(range(len(rows)))",
    ),
    Defect(
        "answers-again",
        "generate-file",
        "AnswerFile.__init__",
        "= len(lines), len(content)",
        "= 0, len(content)",
    ),
    Defect(
        "answers-known-by-the-name-of-their-model",
        "generate-file",
        "AnswerFile.begin",
        'recorded.get("weights") != provenance["weights"]',
        'recorded.get("model") != model',
    ),
    Defect(
        "gathered-for-each-token",
        "gathered",
        "gathered",
        "group.post_forward_mesh_info = None",
        "pass",
    ),
    Defect(
        "never-reshards-again",
        "gathered",
        "gathered",
        "group.post_forward_mesh_info = info",
        "pass",
    ),
    Defect(
        "token-gradients-of-a-sum",
        "token-losses",
        "_LinearCrossEntropyPerToken.backward",
        "grad_outputs[0][chunk_rows].unsqueeze(1)",
        "grad_outputs[0].mean().expand(len(hidden_ND[chunk_rows]), 1)",
    ),
    Defect(
        "budget-by-size-alone",
        "recompute",
        "_fill_knapsack",
        "key=lambda operator: -operator.flops / operator.num_bytes",
        "key=lambda operator: operator.num_bytes",
    ),
    Defect(
        "chunks-added-in-bf16",
        "loss",
        "Gradients.add",
        "self.weight_VD = grad_VD.float() if self.weight_VD is None",
        "self.weight_VD = grad_VD if self.weight_VD is None",
    ),
    # -- experts -------------------------------------------------------------------------------------------------
    Defect(
        "no-padding-is-too-much",
        "placement",
        "choose_dim",
        "(1 + max_padding) * shape[0]",
        "(8 + max_padding) * shape[0]",
    ),
    Defect(
        "columns-of-another-rank",
        "placement",
        "local_box",
        "mesh.get_local_rank(axis)",
        "mesh.size(axis) - 1 - mesh.get_local_rank(axis)",
    ),
    Defect(
        "window-without-the-last-token",
        "windows-and-sinks",
        "_attend_in_window",
        ".triu(1).tril(window)",
        ".triu(2).tril(window)",
    ),
    Defect(
        "sinks-without-the-scale",
        "windows-and-sinks",
        "_with_sink_key",
        "options.sinks / scale",
        "options.sinks",
    ),
    Defect(
        "sinks-of-other-heads",
        "windows-and-sinks",
        "_attend_by_heads",
        "options.sinks.chunk(num_ranks)[slices.number]",
        "options.sinks.chunk(num_ranks)[0]",
    ),
    Defect(
        "halves-of-a-byte-swapped",
        "quantized-weights",
        "_Mxfp4.__getitem__",
        "(blocks_ENBX & 15, blocks_ENBX >> 4)",
        "(blocks_ENBX >> 4, blocks_ENBX & 15)",
    ),
    Defect(
        "scales-of-other-rows",
        "quantized-weights",
        "_Fp8.__getitem__",
        "[start - first * height :][: stop - start]",
        "[: stop - start]",
    ),
    Defect(
        "bias-on-the-choice-rounded",
        "quantized-weights",
        "_list_tensors",
        "source_dtype.is_floating_point and name in parameters",
        "source_dtype.is_floating_point",
    ),
    Defect(
        "groups-by-their-best-expert",
        "from-hugging-face",
        "GroupLimitedTopK.forward",
        "biased_SGX.topk(2, -1)",
        "biased_SGX.topk(1, -1)",
    ),
    Defect(
        "fast-pairs-stretched",
        "from-hugging-face",
        "YarnRope.frequencies",
        "frequencies * (1 - stretched + stretched / self.factor)",
        "frequencies * (stretched + (1 - stretched) / self.factor)",
    ),
    Defect(
        "inputs-clamped-on-one-side",
        "from-hugging-face",
        "recipes.gpt_oss.model:GptOssExperts.forward",
        ".clamp(-self.limit, self.limit)",
        ".clamp(max=self.limit)",
    ),
    Defect(
        "blocks-without-experts-repeated",
        "short-plans",
        "_longest_repetition",
        "kinds[n] == kinds[n - period] for n in range(first + period, len(kinds))",
        "kinds[n] == kinds[n - period] for n in range(first + 2 * period + 1, len(kinds))",
    ),
    Defect(
        "gradients-of-experts-are-sums",
        "experts-refused",
        "_run_experts",
        "scale_gradient(out_RD, 1 / group.size)",
        "scale_gradient(out_RD, 1.0)",
    ),
    Defect(
        "layers-of-experts-checked-together",
        "experts-refused",
        "_wrong_gradients",
        "*totals.tolist()",
        "*totals.mean(1, keepdim=True).expand_as(totals).tolist()",
    ),
    Defect(
        "tokens-of-the-wrong-experts",
        "experts",
        "_run_by_gather",
        "chosen_TA.long() - group.rank * num_local",
        "chosen_TA.long() - (group.size - 1 - group.rank) * num_local",
    ),
    Defect(
        "columns-of-a-rank-taken-for-an-expert",
        "adapters-of-experts",
        "PeftFactors.read",
        "stacked.permute(1, 2, 0)",
        "stacked.permute(1, 0, 2)",
    ),
    Defect(
        "gate-and-up-merged-with-the-same-rows",
        "adapters-of-experts",
        "find_adapter_parts",
        "start = stop",
        "start = 0",
    ),
    Defect(
        "experts-of-transformers-without-a-bias",
        "experts-of-transformers",
        "recipes.hf.experts:_outputs",
        "out_MD + grouped_bias(experts.down_proj_bias, ends_E, len(x_MD)) if experts.has_bias else out_MD",
        "out_MD",
    ),
    Defect(
        "experts-gathered-on-the-whole-axis",
        "experts-planned",
        "trainer.plan.step:_Group.__init__",
        "layout.shard // layout.expert if self.has_divided_experts else layout.shard",
        "layout.shard",
    ),
    Defect(
        "balance-of-the-last-micro-batch",
        "balance",
        "trainer.experts.balance:Balance.forward",
        "choices_LE if self.counted_LE is None else self.counted_LE + choices_LE",
        "choices_LE",
    ),
    Defect(
        "balance-of-one-rank",
        "balance",
        "trainer.experts.balance:ExpertBalance.after_step",
        "self._world.sum_on_device(balance.counted_LE) if balance.total_LE is None else balance.total_LE",
        "balance.counted_LE",
    ),
    Defect(
        "balance-after-a-skipped-step",
        "balance",
        "trainer.experts.balance:ExpertBalance.after_step",
        "shortfall_LE.sign() * is_applied",
        "shortfall_LE.sign()",
    ),
    Defect(
        "balance-of-slices-of-sequences",
        "balance",
        "trainer.experts.balance:Balance._sequence_loss",
        "if slices is not None:",
        "if False:",
    ),
    Defect(
        "balance-weighs-experts-by-the-bias",
        "balance",
        "trainer.experts.balance:TopKExperts.forward",
        "return scores_SE.gather(1, chosen_SA), chosen_SA",
        "return (scores_SE + self.bias).gather(1, chosen_SA), chosen_SA",
    ),
    Defect(
        "balance-counts-for-nothing-in-plans",
        "balance-planned",
        "trainer.plan.step:Step.run",
        "self._run_counting_pass(repeats=self.num_micro_batches - 1)",
        "pass",
    ),
    # -- the optimizer -------------------------------------------------------------------------------------------
    Defect(
        "embeddings-decay",
        "optimizers",
        "trainer.optim.groups:assign",
        "not (is_vector(name, parameter) or id(parameter) in embeddings)",
        "not is_vector(name, parameter)",
    ),
    Defect(
        "rows-of-the-next-rank",
        "muon",
        "trainer.model.placement:Division.box",
        "divmod(rank, self.expert)",
        "divmod(rank ^ 1, self.expert)",
    ),
    Defect(
        "momentum-of-what-is-not-finite",
        "muon",
        "_Step._direction",
        "gradient = torch.where(self._found_inf > 0, momentum, gradient)",
        "pass",
    ),
    Defect(
        "torchs-muon-is-not-recognized",
        "muon",
        "OptimizerState.differences",
        '"ns_steps" in group or MATCHES_TORCH_MUON in group',
        "MATCHES_TORCH_MUON in group",
    ),
    Defect(
        "row-squares-are-whole",
        "muon",
        "_moment_like",
        "stored.shape[:-1] == tuple(parameter.shape[:-1])",
        "len(stored.shape) == 1",
    ),
    Defect(
        "bfloat16-weights-for-muon",
        "groups",
        "trainer.config.rules:_check_settings",
        'dtype != "float32" and optimizer in ("sgd", "muon")',
        'dtype != "float32" and optimizer == "sgd"',
    ),
    Defect(
        "decay-counted-from-the-first-layer",
        "groups",
        "_with_groups",
        "** (max(layers) - layer)",
        "** layer",
    ),
    Defect(
        "groups-may-change-unasked",
        "groups",
        "_FIXED_ON_RESUME",
        '"optim.groups",',
        "",
    ),
    Defect(
        "rate-scaled-by-outputs",
        "widths",
        "Growth.lr_scale",
        "1 / self.input_ratio",
        "1 / self.output_ratio",
    ),
    Defect(
        "output-projection-starts-as-hidden",
        "widths",
        "Growth.init_scale",
        "hidden if self.output_ratio != 1 else hidden / math.sqrt(self.input_ratio)",
        "hidden",
    ),
    Defect(
        "buckets-of-four-times-their-size",
        "muon",
        "trainer.optim.muon:Ownership.__init__",
        "bucket_numel * shard / (1 + 1 / replicate)",
        "bucket_numel * shard * (1 + 1 / replicate)",
    ),
    Defect(
        "floor-never-reached",
        "schedules",
        "Schedule._relative_height",
        "steps_left = max(0, self.num_steps + extra - step)",
        "steps_left = max(0, self.num_steps + extra - step + 1)",
    ),
    Defect(
        "shards-draw-alike",
        "rounding",
        "random_bits",
        "(origin[1] + numbers) * _GOLDEN",
        "numbers * _GOLDEN",
    ),
    # -- the data ------------------------------------------------------------------------------------------------
    Defect(
        "prompt-trained-on",
        "chat-masks",
        "Encoder._encode_with_spans",
        "(spans[:, 0] < end) & (spans[:, 1] > start)",
        "(spans[:, 0] < end) & (spans[:, 1] >= start)",
    ),
    Defect(
        "header-never-trained-on",
        "chat-masks",
        "trainer.data.chat.masking:_assistant_spans",
        "return [(len(prompt), end)]",
        "return [(max(len(prompt), full.text.find('assistant') + 10), end)]",
    ),
    Defect(
        "end-of-turn-not-trained-on",
        "chat-masks",
        "trainer.data.chat.masking:_assistant_spans",
        "spans[-1] = (spans[-1][0], end)",
        "spans[-1] = spans[-1]",
    ),
    Defect(
        "pairs-of-neighbours",
        "sft",
        "ChatSource.batch",
        "documents[row, end:] += 1",
        "documents[row, end:] += 0",
    ),
    Defect(
        "each-epoch-alike",
        "data-order",
        "sample_at",
        "^ epochs.astype(np.uint64))",
        "^ np.zeros_like(epochs).astype(np.uint64))",
    ),
    Defect(
        "seed-ignored",
        "data-order",
        "make_order",
        "Permutation(len(source), config.data.seed)",
        "Permutation(len(source), 0)",
    ),
    Defect(
        "shares-overlap",
        "data-order",
        "TrainLoader._sample_indices",
        "offset = self._dp_rank * self._samples_per_rank",
        "offset = self._dp_rank * self._micro_batch_size",
    ),
    Defect(
        "phases-begin-anew",
        "mixtures",
        "Mixture.at",
        "numbers[mask] = numbers_in_phase + self._totals[phase][sources[mask]]",
        "numbers[mask] = numbers_in_phase",
    ),
    Defect(
        "grams-half-as-often",
        "data-command",
        "_Hasher.strided_grams",
        "return (stride_sums[:-1] + stride_sums[1:]) * self._inverses[: (num_strides - 1) * _STRIDE : _STRIDE]",
        "return ((stride_sums[:-1] + stride_sums[1:]) * self._inverses[: (num_strides - 1) * _STRIDE : _STRIDE])[:1]",
    ),
    Defect(
        "another-past",
        "mixtures",
        "Mixture.changes",
        "if not stored_phases or stored_phases == phases:",
        "if not stored_phases or len(stored_phases) == len(phases):",
    ),
    Defect(
        "padding-is-a-target",
        "windows",
        "TokenSource._read_windows",
        "tokens[row, filled:], targets[row, filled:] = self._padding, IGNORE",
        "tokens[row, filled:], targets[row, filled:] = self._padding, self._padding",
    ),
    Defect(
        "held-out-by-size",
        "prepare",
        "UnitWriter._assign_split",
        "digest.update(piece)",
        "digest.update(piece[:1])",
    ),
    Defect(
        "old-shards-kept",
        "prepare-mistakes",
        "publish",
        "path.unlink()",
        "path.touch()",
    ),
    # -- checkpoints ---------------------------------------------------------------------------------------------
    Defect(
        "resumed-one-late",
        "resume-exact",
        "CheckpointReader._load",
        "state.step = manifest.step",
        "state.step = manifest.step + 1",
    ),
    Defect(
        "dropout-repeats",
        "resume-exact",
        "RandomState.load_state_dict",
        'torch.set_rng_state(state["torch"])',
        "torch.manual_seed(self._seed)",
    ),
    Defect(
        "stored-settings-win",
        "resume-changes",
        "OptimizerState.load_state_dict",
        'if k not in ("lr", "initial_lr") and v != initial.get(k)',
        'if k not in ("lr", "initial_lr")',
    ),
    Defect(
        "batch-may-change",
        "resume-rules",
        "trainer.config.changes:_FIXED_ON_RESUME",
        '    "train.global_batch_size",',
        '    "train.micro_batch_size",',
    ),
    Defect(
        "not-flushed",
        "on-disk",
        "_SyncedFile.close",
        "os.fsync(self._file.fileno())",
        "self._file.flush()",
    ),
    Defect(
        "checksum-not-compared",
        "damage",
        "BlockReader._read_block",
        "if crc != self._blocks[number][1]:",
        "if len(buffer) != self._blocks[number][0]:",
    ),
    Defect(
        "damaged-left-there",
        "damage",
        "CheckpointReader.restore",
        "self.world.agreed(lambda: self._quarantine_damaged(damaged))",
        "self.world.agreed(lambda: self._quarantine_damaged(()))",
    ),
    Defect(
        "begins-anew-without-a-word",
        "checkpoints-gone",
        "EarlierAttempts.check",
        "if restored is None:",
        "if restored is None and progress.source_file == STATUS:",
    ),
    Defect(
        "superseded-lines-erased",
        "checkpoints-gone",
        "JsonLines._drop_lines_and_open",
        'self._append_superseded("".join(dropped))',
        'self._append_superseded("".join(dropped[:0]))',
    ),
    Defect(
        "copy-goes-on-in-the-original",
        "run-folders",
        "trainer.config.passes:run_paths",
        'run["dir"] = str(target)',
        'run["dir"] = stored_dir if continues_same_run else str(target)',
    ),
    Defect(
        "copy-appends-to-the-originals-wandb",
        "run-folders",
        "Resume._supersede",
        'self._folder.move_aside(["wandb", "trackers.json"])',
        "self._folder.move_aside([])",
        by_campaign=True,
    ),
    Defect(
        "pruned-one-too-many",
        "pruning",
        "RetentionPolicy.obsolete",
        "if step < newest[-1] and",
        "if step <= newest[-1] and",
    ),
    Defect(
        "saved-while-it-changes",
        "async",
        "Checkpoints.start",
        "tensors = self._staging.copy(snapshot.tensors, self._plans.boxes)",
        "tensors = {key: tensor.detach() for key, tensor in snapshot.tensors.items()}",
    ),
    Defect(
        "rows-rounded-down",
        "from-hugging-face",
        "chunk_of",
        "size = -(-(stop - start) // num_chunks)",
        "size = (stop - start) // num_chunks",
    ),
    Defect(
        "stored-the-wrong-way",
        "to-hugging-face",
        "recipes.gpt2.huggingface:NAMES",
        'Transposed("transformer.h.*.attn.c_proj.weight")',
        '"transformer.h.*.attn.c_proj.weight"',
    ),
    Defect(
        "shape-of-the-recipe-kept",
        "source-declares-model",
        "model_of_weights",
        "is_set = key in resolution.untyped.assignments or (name in free and key in resolution.untyped.values)",
        "is_set = key in resolution.untyped.assignments or key in resolution.untyped.values",
    ),
    Defect(
        "other-scaling-passed",
        "source-declares-model",
        "parse_rope",
        "if rope_type not in supported_types:",
        'if rope_type in ("yarn", "linear"):',
    ),
    Defect(
        "what-came-forgotten",
        "source-files-exported",
        "model_files_of",
        "model_files.files = read_model_files(source.description)",
        "model_files.files = {}",
    ),
    Defect(
        "reference-with-adapters",
        "preferences",
        "ObjectiveTrainer._reference_logps",
        "with _eval_mode(self.model), without_adapters(self.model):",
        "with _eval_mode(self.model):",
    ),
    Defect(
        "statistic-of-a-rank",
        "objectives",
        "ObjectiveTrainer._compute_mean_statistic",
        "total, count = self.world.sum_on_device(sums)",
        "total, count = sums",
    ),
    Defect(
        "settings-of-dpo-dropped",
        "objective-files",
        "objective_section",
        'if section == OLD_DPO_SECTION and objective == "dpo":',
        'if section == OLD_DPO_SECTION and objective == "ipo":',
    ),
    Defect(
        "labels-rounded",
        "objective-files",
        "Format.label",
        "number.is_integer() and 0 <= number",
        "0 <= number",
    ),
    Defect(
        "one-label-will-do",
        "objective-files",
        "LabeledSource.__init__",
        "labels[0] if len(labels) == 1 else None",
        "None",
    ),
    Defect(
        "lowest-accuracy-is-best",
        "score-models",
        "trainer.checkpoint.retention:find_best",
        "-1 if good[-1].higher_is_better else 1",
        "1",
    ),
    Defect(
        "teacher-taken-for-the-first-weights",
        "distillation",
        "DistillationTrainer.__init__",
        "self.world, TEACHER_KEY",
        "self.world",
    ),
    Defect(
        "teacher-of-a-cold-softmax",
        "distillation",
        "Distill.divergence",
        "(logps / self.temperature).log_softmax(-1) for logps in (student, teacher)",
        "(logps / t).log_softmax(-1) for logps, t in ((student, self.temperature), (teacher, 1.0))",
    ),
    Defect(
        "any-base-will-do",
        "adapters",
        "BaseWeights.changes_from",
        'stored["checksum"] == self.checksum',
        "True",
    ),
    Defect(
        "merged-with-another-scale",
        "adapters",
        "with_merged_adapters",
        "stored, alpha / rank, transposed",
        "stored, alpha, transposed",
    ),
    Defect("nibbles-swapped", "packed-base", "Packing._pack_into", "codes[..., 0] << 4", "codes[..., 1] << 4"),
    Defect(
        "merged-into-another-base",
        "packed-base",
        "with_merged_adapters",
        "in CODE_BITS and not into_original",
        "in CODE_BITS and into_original",
    ),
    Defect("bytes-counted-as-weights", "packed-base", "num_weights", "packing.width", "packing.row_bytes"),
    Defect("unpacked-kept", "packed-base", "_PackedMatmul.forward", "(weight)", "(layer.unpacked(weight, x.dtype))"),
    Defect("only-adapted-are-packed", "packed-base", "weights_to_pack", "(id(module) in inside or ", "("),
    Defect("last-piece-of-experts-alone", "packed-experts", "_multiply_by_columns", "total.add_(part)", "part"),
    Defect("only-adapted-experts-are-packed", "packed-experts", "weights_to_pack", "id(module) in inside or f", "f"),
    Defect(
        "unpacked-experts-kept",
        "packed-experts",
        "_PackedGroupedMatmul.forward",
        "ctx.save_for_backward(packed, ends_E)",
        "ctx.save_for_backward(packed, ends_E, packing.unpack(packed, x_MK.dtype))",
    ),
    Defect(
        "packed-experts-not-transposed",
        "packed-experts",
        "_PackedGroupedMatmul.backward",
        "_multiply_by_rows if ctx.is_transposed else _multiply_by_columns",
        "_multiply_by_columns",
    ),
    Defect("cache-planned-unpadded", "generation-planned", "_capacity", "[workload.prompt_len - 1]", "[]"),
    Defect(
        "generation-planned-without-weights",
        "generation-planned",
        "_gathered_bytes",
        "if layout.is_unsharded:",
        "if True:",
    ),
    Defect(
        "scores-of-capped-logits",
        "score-models",
        "_with_loss.forward",
        "isinstance(head, ScoreHead) or (targets",
        "(targets",
    ),
    Defect(
        "gathers-planned-unpacked",
        "packed-plan",
        "ParameterInfo.gathered_element_size",
        "self.element_size if self.num_quantized_weights else param_size",
        "param_size",
    ),
    Defect(
        "frozen-have-gradients",
        "frozen",
        "training_bytes",
        "gradients += numel * size * parameter.requires_grad",
        "gradients += numel * size",
    ),
    # -- the run -------------------------------------------------------------------------------------------------
    Defect(
        "owner-taken-for-dead",
        "folder-lock",
        "FolderLock._is_dead",
        'or _process_start_time(owner["pid"]) != owner["started"]',
        'or _process_start_time(owner["pid"]) == owner["started"]',
    ),
    Defect(
        "status-in-place",
        "status",
        "write_status",
        'write_atomically(run_dir / "status.json", text)',
        '(run_dir / "status.json").write_text(text)',
    ),
    Defect(
        "lost-folder-not-followed",
        "lost-folders",
        "Relocation.move_if_lost",
        "self._checkpoints.move_to(storage)",
        "pass",
    ),
    Defect(
        "room-for-fewer",
        "disk-space",
        "disk_space_warning",
        "needed_bytes = (counts.num_at_peak - len(existing)) * num_bytes",
        "needed_bytes = (counts.num_at_peak - len(existing) - 1) * num_bytes",
    ),
    Defect(
        "checkpoint-not-held",
        "read-during-training",
        "StoredWeights.__init__",
        "storage = PinnedStorage(storage.path, [MANIFEST, *self.manifest.files])",
        "storage = PinnedStorage(storage.path, [])",
    ),
    Defect(
        "stopped-with-0",
        "signals",
        "Lifecycle.end",
        "return EXIT_STOPPED",
        "return EXIT_FINISHED",
    ),
    Defect(
        "no-meeting",
        "signals-while-connecting",
        "World._open_group",
        "agree_to_start(store, rank, size, rendezvous_timeout.total_seconds(), problem)",
        "pass",
    ),
    Defect(
        "orphans-at-the-start",
        "signals-while-connecting",
        "die_with_parent",
        "prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if enabled else 0)",
        "prctl(_PR_SET_PDEATHSIG, 0)",
        by_campaign=True,
    ),
    Defect(
        "hup-not-caught",
        "closed-terminal",
        "trainer.distributed.stop_request:STOP_SIGNALS",
        "signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)",
        "signal.SIGUSR1, signal.SIGQUIT)",
    ),
    Defect(
        "nohup-overruled",
        "closed-terminal",
        "caught_signals",
        "if number not in _KEEP_IGNORED or",
        "if number in _KEEP_IGNORED or",
        by_campaign=True,
    ),
    Defect(
        "never-ended",
        "prompt-stops",
        "ImmediateStop._watch",
        "self._end(signal.Signals(number).name)",
        "pass",
    ),
    Defect(
        "parts-from-behind-a-gap",
        "chats-continue",
        "PartialResults.read",
        "self._remove_from(self._num_parts)  # these parts follow a corrupt one",
        "pass",
    ),
    Defect(
        "console-waits",
        "closed-output",
        "NonBlockingStream.__init__",
        "        if _may_block(stream):",
        "        if False:",
    ),
    Defect(
        "usr1-not-caught",
        "signals",
        "trainer.distributed.stop_request:STOP_SIGNALS",
        "STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP",
        "STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP",
    ),
    Defect(
        "empty-notice",
        "notice",
        "StopRequest.reason",
        "if self._notice.exists():",
        "if self._notice.exists() and self._notice.read_text():",
    ),
    Defect(
        "no-time-to-save",
        "deadline",
        "StopRequest.reason",
        "now + needs_s >= self._deadline",
        "now >= self._deadline",
    ),
    Defect(
        "evaluation-not-owed",
        "stop-evaluation",
        "Trainer.evaluate",
        "self.state.eval_pending = self.stopping",
        "self.state.eval_pending = False",
    ),
    Defect(
        "said-by-every-rank",
        "mistakes-once",
        "report_error",
        "    if env.rank == 0:",
        "    if env.local_rank >= 0:",
    ),
    Defect(
        "code-of-workers-lost",
        "nproc",
        "spawn",
        "for code in (EXIT_USER_ERROR, EXIT_STOPPED) if code in codes",
        "for code in (EXIT_USER_ERROR,) if code in codes",
    ),
    Defect(
        "first-limit-for-all",
        "watchdog",
        "Watchdog.begin_step",
        "limit = self._limits.first_step_limit_s if is_first else self._limits.step_limit_s",
        "limit = self._limits.first_step_limit_s",
    ),
    Defect(
        "pairs-not-compared",
        "self-check",
        "_checksum",
        "if piece.copies == 1 or tensor.numel() == 0",
        "if piece.copies <= 2 or tensor.numel() == 0",
    ),
    # -- console and reports ------------------------------------------------------------------------------------
    Defect(
        "lines-held-back",
        "metrics-file",
        "JsonLines._drop_lines_and_open",
        'open(self._path, "a+b", buffering=0)',
        'open(self._path, "a+b")',
    ),
    Defect(
        "steps-twice",
        "metrics-file",
        "_is_kept",
        'not in _WRITTEN_AGAIN or record["step"] <= resumed_step',
        'not in _WRITTEN_AGAIN or record["step"] <= resumed_step + 1',
    ),
    Defect(
        "curves-twice",
        "wandb",
        "TensorBoard.open",
        "purge_step=run.resumed_step + 1",
        "purge_step=None",
    ),
    Defect(
        "evaluation-comes-alone",
        "trackers",
        "RowReader._lacks_evaluation",
        "not row.has_evaluation and self._awaits_evaluation(row.step)",
        "False",
    ),
    Defect(
        "tracker-gives-up",
        "trackers",
        "Follower._work",
        "if self._run_ended.is_set():",
        "if num_failures == 0:",
    ),
    Defect(
        "tracked-twice",
        "trackers",
        "RowReader.read",
        "step > max(last_sent, self._last_returned)",
        "step > self._last_returned",
    ),
    Defect(
        "scraped-only-at-lines",
        "prometheus",
        "Metrics.progress",
        "self._prometheus.progress(step)",
        "self._prometheus.port",
    ),
    Defect(
        "checkpoints-in-the-container",
        "submit",
        "_submit_to_kubernetes",
        "job = make_job(options, arguments, volume=options.mount)",
        "job = make_job(options, arguments)",
    ),
    Defect(
        "two-runs-of-a-sweep-in-one-folder",
        "sweep",
        "trainer.sweep:names_of",
        "while name in names:",
        "while False:",
    ),
    Defect(
        "all-gpus-on-one-rank",
        "submit",
        "batch_file",
        "--ntasks-per-node={job.ranks_per_node}",
        "--ntasks-per-node=1",
    ),
    Defect(
        "killed-runs-run",
        "runs",
        "summarize",
        'state = "killed"',
        'state = "running"',
    ),
    Defect(
        "worst-is-best",
        "sweep",
        "trainer.sweep:find_best",
        "key=lambda pair: pair[1]",
        "key=lambda pair: -pair[1]",
    ),
    Defect(
        "sweep-starts-again",
        "sweep",
        "Supervisor.run",
        'if trial.state != "finished"',
        "if trial.folder",
    ),
    Defect(
        "skipped-are-good",
        "goodput",
        "TimeLedger._train",
        "self._total.update_s += (num_steps - num_skipped) * step_s",
        "self._total.update_s += num_steps * step_s",
    ),
    # -- the plan, and launch/ -----------------------------------------------------------------------------------
    Defect(
        "kept-between-micro-batches",
        "plan-memory",
        "Step._post_backward",
        "if is_last or self.layout.reshard_after_backward:",
        "if is_last or not self.layout.reshard_after_backward:",
    ),
    Defect(
        "one-gather-for-all",
        "plan-collectives",
        "_CollectiveCounter.gather",
        'Collective("all_gather", axis, num_ranks, num_bytes)] += self._repeats',
        'Collective("all_gather", axis, num_ranks, num_bytes)] += 1',
    ),
    # -- untrusted input -----------------------------------------------------------------------------------------
    Defect(
        "stored-may-import",
        "stored-is-data",
        "config_from_yaml",
        "return _build(Resolution(Path(origin), values=values, allow_import=allow_import, is_stored=True))",
        "return _build(Resolution(Path(origin), values=values, allow_import=(), is_stored=True))",
    ),
    Defect(
        "escaped-resolver",
        "stored-is-data",
        "trainer.config.keys:_KEY_REFERENCE",
        r'_KEY_REFERENCE = re.compile(r"(?<!\\)\$\{[\w.\[\]]+\}")',
        r'_KEY_REFERENCE = re.compile(r"\$\{[^:]+\}")',
    ),
    Defect(
        "credentials-kept",
        "secrets",
        "RunConfig.to_dict",
        "masked(plain_lists(dataclasses.asdict(self)))",
        "plain_lists(dataclasses.asdict(self))",
    ),
    Defect(
        "sample-obeyed",
        "terminal",
        "ConsoleWriter.print",
        "self._screen.show_line(printable(text), style)",
        "self._screen.show_line(text, style)",
    ),
    Defect(
        "clock-of-the-wall",
        "goodput",
        "Clock.now",
        "return self.time_at(uptime())",
        "return time.time()",
    ),
    Defect(
        "killed-by-whom",
        "killed-rank",
        "describe_killed_ranks",
        "if failure.exitcode < 0 and failure.timestamp <= first_death + 1}",
        "if failure.exitcode > 0 and failure.timestamp <= first_death + 1}",
    ),
    Defect(
        "notice-once",
        "batch-files",
        "Job._wait",
        "            if self.signals.stop_requested:",
        "            if self.signals.stop_requested and not (self.run_dir / NOTICE).exists():",
    ),
    # -- the data ------------------------------------------------------------------------------------------------
    Defect(
        "special-tokens-in-text",
        "documents",
        "FileTokenizer.__init__",
        "self._tokenizer.encode_special_tokens = True",
        "self._tokenizer.encode_special_tokens = False",
    ),
    Defect(
        "fingerprint-without-content",
        "data-changes",
        "sample_content",
        "digest.update(shard.peek(start, count).tobytes())",
        "digest.update(shard.peek(start, 0).tobytes())",
    ),
    Defect(
        "descriptor-per-shard",
        "many-shards",
        "DescriptorCache._get_or_open",
        "max_open = max(1, min(MAX_OPEN_FILES, file_limit() // 4))",
        "max_open = 10**9",
    ),
    Defect(
        "left-step-is-counted",
        "late-data",
        "TrainLoader.__next__",
        "            self._step_start = self._samples",
        "            self._step_start = self._samples + 1",
    ),
    Defect(
        "next-document-is-a-target",
        "packing",
        "MaskedSource.batch",
        "targets[is_start[:, 1:]] = IGNORE",
        "targets[is_start[:, :-1]] = IGNORE",
    ),
    Defect(
        "documents-see-those-before",
        "documents-apart",
        "Documents._make_mask",
        "queries_BQ[:, None, :, None] == self.numbers_BT[:, None, None, :]",
        "queries_BQ[:, None, :, None] >= self.numbers_BT[:, None, None, :]",
    ),
    Defect(
        "foreign-gradients-unseen",
        "documents-tested",
        "find_leak",
        "_is_nonzero(gradient, others_BT)",
        "_is_nonzero(gradient, others_BT & ~others_BT)",
    ),
    Defect(
        "places-compared-with-themselves",
        "documents-tested",
        "_compare_swapped",
        'torch.stack((batch["tokens"][0], batch["tokens"][0].roll(length)))',
        'torch.stack((batch["tokens"][0], batch["tokens"][0]))',
    ),
    Defect(
        "state-kept-at-borders",
        "hybrids-packed",
        "_with_document_resets",
        "if documents is None:",
        "if documents is None or True:",
    ),
    Defect(
        "slices-keep-all-states",
        "linear-attention",
        "_total_map",
        "return last_state(chunks.decay, chunks.keys, chunks.seen, chunks.writes, first_BNHX)",
        "return chunk_states(chunks.decay, chunks.keys, chunks.seen, chunks.writes, first_BNHX)[1]",
    ),
    Defect(
        "state-read-by-the-next-document",
        "linear-attention",
        "_prepare_chunks",
        "from_start = documents_BCS == 0",
        "from_start = documents_BCS >= 0",
    ),
    Defect(
        "first-piece-without-a-gather",
        "linear-attention",
        "_initial_states",
        "torch.stack(states)[_piece_indices(slices)].flatten(0, 1)",
        "torch.cat([states[index] for index in _piece_indices(slices)])",
    ),
    Defect(
        "maps-composed-in-reverse",
        "linear-attention",
        "_gather_pieces",
        "tails.flip(0)",
        "tails",
    ),
    Defect(
        "slices-counted-from-0",
        "context",
        "positions",
        "return torch.cat([counted[..., start:stop] for start, stop in slices.pieces], -1)",
        "return counted[..., : tokens_BT.shape[1]]",
    ),
    Defect(
        "gathered-keys-kept",
        "context-planned",
        "find_slices",
        'config.train.activation_checkpoint == "none"',
        'config.train.activation_checkpoint == "nothing"',
    ),
    Defect(
        "prompts-try-nothing",
        "context-refused",
        "_with_targets",
        'torch.where(batch["targets"] == IGNORE, batch["tokens"], batch["targets"])',
        'batch["targets"]',
    ),
    Defect(
        "tail-of-another-rank",
        "context",
        "_attend_to_all",
        "*reversed(tails_CBKSX.unbind())",
        "*tails_CBKSX.unbind()",
    ),
    Defect(
        "slices-unchecked",
        "context-refused",
        "trainer.lifecycle.selfcheck:check_context",
        "if not abs(full_loss - slice_loss) <= tolerance * abs(full_loss):",
        "if abs(one) > 1e30:",
    ),
    Defect(
        "ids-unchecked",
        "damaged-data",
        "TokenSource._read_rows",
        "if self._can_hold_unknown_ids and rows.max(initial=0) >= self.vocab_size:",
        "if self._can_hold_unknown_ids and rows.max(initial=0) > 10**6:",
    ),
    Defect(
        "offload-keeps-memory",
        "offload",
        "_Call.drop_from_device",
        "storage.on_device = None",
        "storage.on_device = storage.on_device",
    ),
    Defect(
        "offloaded-views-lose-their-offset",
        "offload",
        "_View.tensor",
        "data.as_strided(self.shape, self.stride, self.offset)",
        "data.as_strided(self.shape, self.stride, 0)",
    ),
    Defect(
        "meshes-outlive-their-groups",
        "trainers-in-turn",
        "World._destroy_group",
        "_forget_meshes()",
        "pass",
    ),
    Defect(
        "refused-trainer-keeps-its-group",
        "trainers-in-turn",
        "World.closing_on_user_error",
        "self._destroy_group()",
        "pass",
    ),
    Defect(
        "muon-with-rounded-moments",
        "compatibility",
        "trainer.config.rules:_check_settings",
        'dtype != "float32" and config.optim.name != "adamw"',
        'dtype != "float32" and config.optim.name == "sgd"',
    ),
]


@dataclass(frozen=True)
class Outcome:
    """The outcome of the tests for one defect."""

    defect: Defect
    found_by: str
    """The first test that failed; empty if none did."""
    seconds: float
    exit_code: int
    """pytest's exit code: 0 if all tests passed in spite of the defect."""
    output: str

    @property
    def verdict(self) -> str:
        if self.found_by:
            return f"found by {self.found_by}"
        last = (self.output.strip() or "no output").splitlines()[-1]
        return "NOT FOUND" if not self.exit_code else f"NOT FOUND: the tests broke off, exit {self.exit_code}: {last}"


def untracked(repository: Path) -> Callable[[str, list[str]], set[str]]:
    """Return the function for `shutil.copytree` that leaves out .git and whatever the repository's .gitignore names.

    Raises AssertionError for a kind of pattern that it does not read.
    """
    lines = [line.strip() for line in (repository / ".gitignore").read_text().splitlines()]
    patterns = [".git", *(line for line in lines if line and not line.startswith("#"))]
    for pattern in patterns:
        assert re.fullmatch("/?[^/!]+/?", pattern), f".gitignore: {pattern} is not read here"

    def ignore(folder: str, names: list[str]) -> set[str]:
        return {
            name
            for name in names
            for pattern in patterns
            if fnmatchcase(name, pattern.strip("/"))
            and (Path(folder) == repository or not pattern.startswith("/"))
            and (Path(folder, name).is_dir() or not pattern.endswith("/"))
        }

    return ignore


def try_defect(defect: Defect, in_campaign: bool, keep: bool = False) -> Outcome:
    """Plant the defect in a copy of the project and run the tests of its promise until one fails."""
    promise = read_promises()[defect.promise]
    in_campaign |= defect.by_campaign
    tests = [*promise.tests, *(promise.campaign if in_campaign else ())]
    folder = Path(tempfile.mkdtemp(prefix=f"defect-{defect.name}-"))
    try:
        root = folder / "project"
        shutil.copytree(REPOSITORY, root, ignore=untracked(REPOSITORY))
        defect.plant(root)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m"]
        command += ["" if in_campaign else "not campaign", f"--basetemp={folder / 'tmp'}"]
        began = time.monotonic()
        ran = subprocess.run(
            [*command, *(path_of(test) for test in dict.fromkeys(tests))],
            cwd=root,
            capture_output=True,
            text=True,
            env=os.environ | {"NO_BUDGET": "1"},  # a test that is slow has found nothing
        )
        failed = [line for line in ran.stdout.splitlines() if line.startswith("FAILED")]
        found_by = failed[0].split()[1] if ran.returncode == 1 and failed else ""
        return Outcome(defect, found_by, time.monotonic() - began, ran.returncode, ran.stdout)
    finally:
        if keep:
            print(f"left in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Try defects; return 1 if one is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.old_defects", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="which defects (default: all)")
    parser.add_argument("--campaign", action="store_true", help="run the campaign's tests of the promise too")
    parser.add_argument("--keep", action="store_true", help="leave the copy")
    parser.add_argument("--at-once", type=int, default=2, help="how many copies are tested at a time (default: 2)")
    chosen = parser.parse_args(argv)
    unknown = set(chosen.names) - {defect.name for defect in DEFECTS}
    if unknown:
        parser.error(f"no such defect: {', '.join(sorted(unknown))}")
    defects = [defect for defect in DEFECTS if defect.name in chosen.names or not chosen.names]
    missed = []
    with ThreadPoolExecutor(chosen.at_once) as threads:
        for outcome in threads.map(lambda defect: try_defect(defect, chosen.campaign, chosen.keep), defects):
            tier = " (with the campaign's tests)" if outcome.defect.by_campaign else ""
            print(f"{outcome.defect.name:28} {outcome.seconds:5.0f} s  {outcome.verdict}{tier}", flush=True)
            if not outcome.found_by:
                missed.append(outcome.defect.name)
    print(
        f"{len(defects) - len(missed)} of {len(defects)} defects found" + (f"; not: {', '.join(missed)}" * bool(missed))
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
