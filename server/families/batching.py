"""A family that computes several requests in one pass. Knows nothing of who waits for whom."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.families.base import Family, Instance, Value


@dataclass(frozen=True)
class Prepared:
    """One request as the pass takes it; those whose ``key`` is equal may share one.

    The key holds whatever a pass has in common: parameters, and how long the request is, roughly, where
    a pass pads all of them to the longest.
    """

    key: Hashable
    content: Any


class BatchingFamily(Family):
    """A family of tensors whose requests may be computed together, each as if it had come alone."""

    batches = True  # False on an object whose version cannot

    @abstractmethod
    def prepare(self, inputs: Mapping[str, Value], parameters: Mapping[str, Any]) -> Prepared:
        """Check one request and bring it into the form of the pass, in the request's own thread.

        Raises:
            InputError: a value is out of range.
        """

    @abstractmethod
    def infer_batch(self, instance: Instance, contents: Sequence[Any]) -> Sequence[Mapping[str, Value]]:
        """Run once on the contents of requests with one key; return the ``outputs`` of each, in order."""

    def infer(
        self, instance: Instance, inputs: Mapping[str, Value], parameters: Mapping[str, Any]
    ) -> Mapping[str, Value]:
        """Run on one request: a batch of its own."""
        (outputs,) = self.infer_batch(instance, [self.prepare(inputs, parameters).content])
        return outputs
