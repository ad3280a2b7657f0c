"""What a worker reports of its memory."""

from __future__ import annotations

from pathlib import Path

import torch

from server.memory import own_memory, weights_outside

ROLLUP = """55d0-7ffc ---p 00000000 00:00 0                          [rollup]
Rss:                1608 kB
Pss:                 255 kB
Private_Clean:        40 kB
Private_Dirty:       112 kB
Private_Hugetlb:       0 kB
"""


def test_unique_memory_is_what_the_end_of_the_process_gives_back(tmp_path: Path) -> None:
    (tmp_path / "rollup").write_text(ROLLUP)
    found = own_memory(tmp_path / "rollup")
    assert found == {"resident_bytes": 1608 << 10, "unique_bytes": 152 << 10}


def test_own_memory_is_read_from_the_kernel() -> None:
    found = own_memory()
    assert 0 < found["unique_bytes"] <= found["resident_bytes"]


def test_weights_outside_the_mapping_are_counted_once() -> None:
    """Two instances share one module's tensors; a copy of one of them counts, however often it is named."""
    module = torch.nn.Linear(4, 4, bias=False)
    assert weights_outside([module, module], lambda tensor: True) == 0
    assert weights_outside([module, module], lambda tensor: False) == 64
