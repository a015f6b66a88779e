"""What the machine has, and settings of torch that every command shares: threads on the CPU, attention on CUDA."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from reasonlab.errors import UserError


def default_device() -> str:
    """Where a command runs that is not told: on CUDA where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def prepare(device: str | None, on_cpu: str = "--device cpu") -> torch.device:
    """Set torch up for many small operations and return the device; None stands for the default one.

    `on_cpu` is what to type where there is no CUDA.

    Parallel work is done by our own threads, each computing single-threaded: on a busy machine torch's own threads
    wait for each other inside every tiny operation. cuDNN attention plans each new shape on the host for 13 ms, and
    packed batches have a new shape every step; the other kernels need no plan.
    """
    torch.set_num_threads(1)
    device = device or default_device()
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("no CUDA device is available", f"Use {on_cpu}, or install a CUDA build of torch")
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(device)


def worker_pool(workers: int) -> ThreadPoolExecutor:
    """Threads that each compute single-threaded. A new thread does not inherit torch's setting: it must be told."""
    return ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))


@cache
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
