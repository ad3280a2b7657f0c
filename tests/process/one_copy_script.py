"""Map a version, fork, attach and compute in every child; print what the weights cost all of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from weights.attach import attach
from weights.lease import Lease
from weights.mapping import MappedVersion
from weights.residency import residency
from weights.verify import verify_layout

WIDTH = 512
PROCESSES = 4


def main(directory: Path) -> None:
    lease = Lease(directory)
    mapped = MappedVersion(verify_layout(directory))
    tensors = mapped.tensors()
    mapped.populate()
    children = []
    ready, told = os.pipe()
    wait, go = os.pipe()
    for _ in range(PROCESSES):
        pid = os.fork()
        if pid == 0:
            os.close(go)
            module = attach(torch.nn.Linear(WIDTH, WIDTH, device="meta"), tensors, mapped)
            torch.set_num_threads(2)  # hangs for ever here if the parent had started OpenMP
            module(torch.ones(64, WIDTH))
            os.write(told, b"1")
            os.read(wait, 1)  # until the parent has looked
            os._exit(0)
        children.append(pid)
    for _ in children:
        os.read(ready, 1)
    costs = [next(iter(residency(mapped.paths, pid).values())) for pid in (os.getpid(), *children)]
    os.close(go)
    for pid in children:
        os.waitpid(pid, 0)
    lease.close()
    total = {"pss": sum(c.pss_bytes for c in costs), "anonymous": sum(c.anonymous_bytes for c in costs)}
    print(json.dumps(total | {"mapped": mapped.mapped_bytes, "processes": len(costs)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
