"""The models that one worker serves, by name, each with what the routes need of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flask import g

from server.api.batching import Infer, create_inference
from server.api.cache import ResponseCache
from server.api.exchange import Served
from server.api.record import Record
from server.api.statistics import Statistics
from server.errors import UnknownModel
from server.settings import Settings


@dataclass(frozen=True)
class Model:
    """One served model: how its tensors are computed, what is kept of its answers, what they took."""

    served: Served
    infer: Infer
    cache: ResponseCache
    statistics: Statistics

    @property
    def name(self) -> str:
        """The name by which clients ask for it."""
        return self.served.name

    @property
    def number(self) -> str:
        """Its version as the Open Inference Protocol names it: a number."""
        return self.served.version.removeprefix("v")


class Models:
    """Every model of one worker, in the order of their names."""

    def __init__(self, settings: Settings, served: Sequence[Served]) -> None:
        ordered = sorted(served, key=lambda one: one.name)
        self._by_name = {
            one.name: Model(one, create_inference(settings, one), ResponseCache(settings, one), Statistics())
            for one in ordered
        }

    def __iter__(self) -> Iterator[Model]:
        return iter(self._by_name.values())

    @property
    def only(self) -> Model | None:
        """The one model, where there is but one."""
        (first, *others) = self
        return None if others else first

    def find(self, name: str, version: str | None = None, *, param: str | None = None) -> Model:
        """Return the model of that name, and note in the request's record that it was asked.

        Raises:
            UnknownModel: there is none, or none of that version; *param* is the field that named it.
        """
        model = self._by_name.get(name)
        if model is None:
            here = ", ".join(repr(known) for known in self._by_name)
            raise UnknownModel(f"the model {name!r} does not exist; this server has {here}", param=param)
        note_asked(model.served)
        if version is not None and version not in (model.served.version, model.number):
            message = f"{name!r} has no version {version!r} here; this server has {model.number!r}"
            raise UnknownModel(message, param=param)
        return model


def note_asked(served: Served) -> None:
    """Note in the request's record which model and version answer it."""
    record: Record = g.record
    record.fields |= {"model": served.name, "version": served.version}
