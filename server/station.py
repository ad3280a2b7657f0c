"""What the arbiter gives a worker before the fork."""

from __future__ import annotations

from dataclasses import dataclass

from server.board import Board, Record
from server.generation import Generation
from server.placement import Place
from server.settings import Settings


@dataclass(frozen=True)
class Station:
    """One worker's post. ``others`` are mapped by the arbiter too, and none of this worker's business."""

    generation: Generation
    others: tuple[Generation, ...]
    settings: Settings
    board: Board
    slot: Record
    workers: int
    place: Place
