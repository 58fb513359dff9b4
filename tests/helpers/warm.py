"""Done once, in the fork server, so that not every run does it first.

A configuration is read, the standard library's files are listed, a step is planned: the caches of these (of structured
configurations, of files, of operators on tensors without values, of probes) come to what is forked filled.
"""

from __future__ import annotations

from tests.helpers.probes import keep_probes, planned_again
from tests.helpers.ranks import tiny_overrides
from trainer import load_config
from trainer.config import MeshShape
from trainer.data.stdlib import StdlibCorpus
from trainer.plan.machine import find_machine
from trainer.plan.plan import without_data

keep_probes()
StdlibCorpus()
for size in (1, 2):
    tiny = load_config("llama_small", tiny_overrides(f"train.micro_batch_size={size}"))
    planned_again(without_data(tiny), MeshShape(1, 1), find_machine("cpu"))
