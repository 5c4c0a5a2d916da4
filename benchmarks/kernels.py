"""Times and memory of the Triton kernels on a GPU beside torch's flash attention: python -m benchmarks.kernels --out FOLDER

bf16, batch 1, 32 heads, D = V = 128, 64 slots, medians of eager calls. Floor: every input read once and every output written once at the
copy bandwidth that the same run measures.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention
from triton.testing import do_bench

import mva_ref as mva

HEADS, WIDTH, SLOTS = 32, 128, 64
LENGTHS = (1024, 4096, 8192, 16384, 65536, 131072)


def inputs(T: int, levels: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v in bf16, and gates like those of GSA at its start."""
    rng = torch.Generator("cuda").manual_seed(0)
    tokens = [torch.randn(1, T, HEADS, WIDTH, device="cuda", generator=rng).bfloat16() for _ in range(3)]
    return tokens, logsigmoid(torch.randn(levels, 1, T, HEADS, SLOTS, device="cuda", generator=rng)) / 8


def median(f: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    return float(do_bench(f, warmup=20, rep=60, return_mode="median"))


def both(f: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[float, float, float]:
    """Milliseconds of forward and of forward with backward, and the memory in GiB that the latter takes beyond inputs and gradients."""
    forward = median(lambda: f(*tensors))
    leaves = [x.detach().requires_grad_() for x in tensors]
    upstream = torch.randn_like(f(*tensors))
    for x in leaves:
        x.grad = torch.zeros_like(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    whole = median(lambda: f(*leaves).backward(upstream))
    return forward, whole, (torch.cuda.max_memory_allocated() - before) / 2**30


def bandwidth() -> float:
    """Bytes a millisecond of a large copy, read and written."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_(0, 255)
    y = torch.empty_like(x)
    return 2 * x.numel() / median(lambda: y.copy_(x))


SUBJECTS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "flash": (0, lambda q, k, v: scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)),
    "gsa": (1, lambda q, k, v, g: mva.gsa(q, k, v, g[0], impl="triton").o),
    "mva-2": (2, lambda q, k, v, g: mva.mva(q, k, v, g, impl="triton").o),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="results/kernels")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    rate, rows = bandwidth(), []
    for T in map(int, args.lengths.split(",")):
        for name, (levels, f) in SUBJECTS.items():
            tokens, g = inputs(T, max(levels, 1))
            given = [*tokens, g] if levels else tokens
            floor = (sum(x.nbytes for x in given) + tokens[0].nbytes) / rate
            forward, whole, memory = both(f, given)
            rows.append({"T": T, "subject": name, "forward_ms": forward, "forward_backward_ms": whole, "extra_gib": memory,
                         "forward_over_floor": forward / floor, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                         "mva_ref": mva.__version__})
            print(f"{T:7d} {name:6s} forward {forward:8.3f} ms  with backward {whole:8.3f} ms  {memory:6.2f} GiB  "
                  f"{forward / floor:5.1f} x floor", flush=True)
            with open(out / "kernels.csv", "w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
