"""Compiles every kernel of a training step on fake GPUs, and prints the results as one line of JSON.

python tests/fake_gpu/kernels.py TRITON_CACHE OVERRIDE...
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch
import triton
from torch._dynamo.utils import counters

from trainer import Trainer, load_config


def instructions(folder: Path) -> dict[str, float]:
    """Return the number of machine instructions of each kernel, per element of a thread."""
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    found = {}
    for binary in folder.rglob("*.cubin"):
        listed = subprocess.run([dump, "--dump-sass", binary], capture_output=True, text=True, check=True).stdout
        count = len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s", listed, re.MULTILINE))
        facts = json.loads(binary.with_suffix(".json").read_text())
        sizes = re.findall(r"make_range \{end = (\d+)", binary.with_suffix(".ttir").read_text())
        elements = max(map(int, sizes)) / (32 * facts["num_warps"])
        found[f"{facts['name']} {binary.parent.name[:6]}"] = count / elements
    return found


def main() -> None:
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    with mock.patch.object(torch, "isfinite", return_value=torch.ones(1, dtype=torch.bool)):  # of loaded weights
        trainer = Trainer(load_config("llama_small", overrides))
    batches, graphs = iter(trainer.loader), []
    for _ in range(4):
        trainer.train_step(list(itertools.islice(batches, trainer.num_micro_batches)))
        graphs.append(counters["stats"]["unique_graphs"])
    torch.cuda.set_sync_debug_mode("error")
    trainer.train_step(list(itertools.islice(batches, trainer.num_micro_batches)))
    torch.cuda.set_sync_debug_mode("default")
    trainer.close()
    print(json.dumps({"graphs": graphs, "kernels": instructions(folder), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
