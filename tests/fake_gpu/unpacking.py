"""Unpacks weights by the GPU's kernel in Triton's interpreter, on the CPU, and compares them with the CPU's code.

python tests/fake_gpu/unpacking.py   (with TRITON_INTERPRET=1)
"""

from __future__ import annotations

import torch

from trainer.model import packed_cuda
from trainer.model.packed import BLOCK_SIZE, CODE_BITS, Packing, _values


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for name, bits in CODE_BITS.items():
        for num_rows, width in ((3, 64), (2, 192), (2, 4096)):  # parts of a tile, and several
            packing = Packing(name, width)
            packed = packing.pack(torch.randn(num_rows, width, generator=generator))
            for dtype in (torch.float32, torch.float16):  # in bfloat16 the interpreter truncates, unlike a GPU
                found = torch.full((num_rows, width), torch.nan, dtype=dtype)
                packed_cuda.unpack_into(found, packed, _values(name, packed.device), bits, BLOCK_SIZE)
                assert torch.equal(found, packing.unpack(packed, dtype)), (name, width, dtype)
    print("equal")


if __name__ == "__main__":
    main()
