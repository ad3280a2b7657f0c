"""Requests made from the description of the interface: every answer is one that it announces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import settings
from openapi_spec_validator import validate
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.unit.served import app_for_affine, app_for_tone, end_threads

# A body may fit its schema and not the model: tensors that their shape does not hold.
OTHERWISE = [positive_data_acceptance, not_a_server_error]
REFUSES = (501, 504)  # what the protocol has and this server does not; a timeout shorter than the model

tone = schemathesis.openapi.from_wsgi("/openapi.json", app_for_tone())
affine = schemathesis.openapi.from_wsgi("/openapi.json", app_for_affine())


@pytest.fixture(autouse=True, scope="module")
def _no_threads_left() -> Iterator[None]:
    yield
    end_threads()


@tone.parametrize()
@settings(max_examples=40, deadline=None)
def test_every_answer_of_a_speaking_model_is_described(case: schemathesis.Case) -> None:
    answer = case.call_and_validate(excluded_checks=OTHERWISE)
    assert answer.status_code < 500 or answer.status_code in REFUSES


@affine.include(path_regex="infer").parametrize()
@settings(max_examples=100, deadline=None)
def test_every_answer_of_a_model_of_tensors_is_described(case: schemathesis.Case) -> None:
    answer = case.call_and_validate(excluded_checks=OTHERWISE)
    assert answer.status_code < 500 or answer.status_code in REFUSES


@pytest.mark.parametrize("schema", [tone, affine])
def test_the_description_is_valid_openapi(schema: schemathesis.Schema) -> None:
    validate(schema.raw_schema)
